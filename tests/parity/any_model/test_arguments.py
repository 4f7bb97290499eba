"""What `jaxtwin.compare` is called with by mistake, and what a report says of itself."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jaxtwin
from jaxtwin.configs import BadInput
from jaxtwin.parity.any_model import compare
from jaxtwin.parity.check import source_check
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.compare.options import CheckOptions
from jaxtwin.parity.report.results import Report
from jaxtwin.parity.table.row import Row
from jaxtwin.tests.helpers import reports

X = np.random.default_rng(0).normal(size=(5, 3))
TABLE = [Row("kernel", "weight", "o i -> i o"), Row("bias", "bias", "o -> o")]


def linear(params: Any, x: Any) -> Any:
    return x @ params["kernel"] + params["bias"]


THEIRS = torch.nn.Linear(3, 2)
PARAMS = {"kernel": THEIRS.weight.detach().numpy().T, "bias": THEIRS.bias.detach().numpy()}


def compared(**change: Any) -> Report:
    given = {"torch_module": THEIRS, "jax_side": linear, "table": TABLE, "inputs": [X]}
    given |= {"params": PARAMS, "dtypes": ["float64"], "jit": False} | change
    return jaxtwin.compare(**given)


def without(name: str) -> dict[str, Any]:
    return {path: x for path, x in PARAMS.items() if path != name}


@pytest.mark.parametrize("jit", [True, False])
def test_the_settings_say_whether_jax_compiled(jit: bool) -> None:
    report = compared(jit=jit)
    assert report.equal
    assert report.environment["settings"]["float64"]["jax"]["jit"] is jit


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"params": without("bias")}, r"the JAX side does not hold.*\n  bias: missing"),
    ({"params": {**PARAMS, "more": X}}, "more: unexpected"),
    ({"params": {**PARAMS, "bias": X}}, r"bias: shape \(5, 3\), expected \(2,\)"),
    ({"table": TABLE[:1], "params": without("bias")}, r"the torch side.*\n  bias: unexpected"),
    ({"params": {"a": 3}}, "params has 'a', which holds an int and no array"),
    ({"params": {"a": {"b": X}, "a/b": X}}, "params has 'a/b' twice"),
    ({"params": [X]}, "params must be a dict .* got a list"),
    ({"params": None}, "a JAX function needs its parameters"),
    ({"jax_side": nnx.Linear(3, 2, rngs=nnx.Rngs(0))}, "params is for a JAX function"),
    ({"jax_side": 3}, "jax_side must be an NNX or linen module or a function"),
    ({"jax_side": lambda p, x: p["kernal"]}, "asks for 'kernal'.*did you mean 'kernel'"),
    ({"inputs": X}, r"inputs must be a list .* an ndarray of shape \(5, 3\); .* inputs=\[x\]"),
    ({"inputs": jnp.asarray(X)}, r"inputs must be a list .* inputs=\[x\]"),
    ({"inputs": torch.from_numpy(X)}, r"inputs must be a list .* a Tensor of shape \(5, 3\)"),
    ({"inputs": "x"}, "inputs must be a list .* got a str"),
    ({"inputs": [None]}, r"inputs\[0\] is a NoneType"),
    ({"inputs": [[X, [1]]]}, r"inputs\[0\] cannot be made a NumPy array"),
    ({"table": TABLE[0]}, "table must be a list of jaxtwin.Row, got a Row"),
    ({"table": ["kernel"]}, "table must be a list of jaxtwin.Row"),
    ({"probes": {"a": "b"}}, "probes must be a list of jaxtwin.Row, got a dict"),
    ({"torch_module": linear}, "torch_module must be a torch.nn.Module, got a function"),
    ({"dtypes": "float64"}, "dtypes must be a list such as .* got 'float64'"),
    ({"dtypes": ["float63"]}, "dtypes has 'float63'; did you mean"),
]


@pytest.mark.parametrize(("change", "said"), MISTAKES)
def test_a_mistake_is_one_message(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=f"(?s){said}"):
        compared(**change)


def test_a_key_that_the_function_misses_elsewhere_is_its_own_error() -> None:
    with pytest.raises(KeyError, match="bias"):
        compared(jax_side=lambda p, x: {}["bias"])


def test_a_report_is_a_line() -> None:
    report = reports.failing()
    assert str(report).startswith("NOT EQUAL: first divergence at layers.3.attn.q: 'rope-base'")
    assert repr(report) == f"<Report: {report}>"
    assert len(repr(report)) < 300
    assert repr(Report()) == "<Report: NOTHING WAS COMPARED>"


def keywords(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("public", "options"),
    [
        (jaxtwin.check, keywords(source_check.check) | keywords(CheckOptions)),
        (jaxtwin.compare, keywords(compare.compare)),
    ],
)
def test_every_keyword_is_documented(public: Any, options: set[str]) -> None:
    documented = set(re.findall(r"`(\w+)`", public.__doc__))
    wanted = options | keywords(public)
    if public is jaxtwin.check:  # which `steps` and `run` make; names, spec and ignore
        wanted -= {"training", "reading"}
    assert wanted - documented == set()


def test_an_unknown_keyword_is_named() -> None:
    for call in (jaxtwin.check, jaxtwin.assert_parity):
        with pytest.raises(TypeError, match="unexpected keyword argument 'dtype'"):
            call("reference-tiny", dtype="float64")
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtype'"):
        compared(dtype="float64")


@pytest.mark.slow
def test_a_folder_for_what_fails_may_be_named_by_a_text(tmp_path: Path) -> None:
    how = {"dtypes": ["float64"], "tokens": 8, "layout": "unroll", "witness": False}
    other = open_source("reference-tiny", seed=1)
    report = jaxtwin.check("reference-tiny", against=other, replay=str(tmp_path / "out"), **how)
    assert not report.equal
    assert any(str(tmp_path / "out") in note for note in report.notes)


def test_a_baseline_says_what_changed() -> None:
    before = compared()
    assert "since the baseline: nothing changed" in compared(baseline=before.to_json()).notes
    wrong = {**PARAMS, "bias": PARAMS["bias"] + 1}
    after = compared(params=wrong, baseline=before.to_json())
    assert any(n.startswith("since the baseline: fails now: float64 output") for n in after.notes)
    with pytest.raises(AssertionError, match="since the baseline: fails now"):
        jaxtwin.assert_parity(compared(params=wrong), baseline=before.to_json())
    with pytest.raises(BadInput, match="not the JSON of a check"):
        compared(baseline={})


def test_a_probe_is_looked_for_in_both_kinds() -> None:
    with pytest.raises(BadInput, match="no submodule 'weigth' and calls no"):
        compared(probes=[Row("a", "weigth", "b o -> b o")])
    with pytest.raises(BadInput, match="a probe cannot be called 'output'"):
        compared(probes=[Row("output", "", "b o -> b o")])


def test_outputs_of_other_shapes_are_refused() -> None:
    with pytest.raises(BadInput, match=r"is \(5, 2\) in torch, .* \(2, 5\) in JAX"):
        compared(jax_side=lambda p, x: linear(p, x).T)


def test_what_has_no_partner_is_noted() -> None:
    report = compared(jax_side=lambda p, x: {"cache": x, "logits": linear(p, x)})
    assert report.equal
    assert any("also returns cache (5, 3), which has no partner" in note for note in report.notes)
