"""Other people's models: the guide in docs is run, and its mistakes are found."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jaxtwin
from jaxtwin.configs import BadInput
from jaxtwin.parity.table.row import Row
from jaxtwin.tests.helpers import ROOT

pytestmark = pytest.mark.slow  # the guide runs for most of a minute
GUIDE = ROOT / "docs" / "your-own-model.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def guide() -> dict[str, Any]:
    """The names that the guide's code defines, once it has run (its own asserts among it)."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for block in BLOCKS:
            exec(compile(block, str(GUIDE), "exec"), names)
    return {**names, "said": said.getvalue().strip()}


def test_the_guide_runs_and_prints_what_it_says(guide: dict[str, Any]) -> None:
    assert guide["said"] == "blocks.1.channels.act -> uses the tanh GELU"
    assert f"`{guide['said']}`" in GUIDE.read_text()


def found(guide: dict[str, Any], wrong: Any, **how: Any) -> list[tuple[str, str | None]]:
    how = {"probes": guide["probes"], "params": guide["params"], "dtypes": ("float64",), **how}
    how = {"jit": False, **how}
    report = jaxtwin.compare(guide["theirs"], wrong, guide["table"], guide["inputs"], **how)
    assert not report.equal
    return [
        (s.place, s.cause.name if s.cause and s.cause.proven else None) for s in report.divergences
    ]


def test_an_eps_of_its_own(guide: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    norm = guide["norm"]
    monkeypatch.setitem(guide["mixer"].__globals__, "norm", lambda p, x: norm(p, x, 1e-6))
    names = dict(found(guide, guide["mixer"]))
    assert names == {f"blocks.{{0..2}}.norm{j}": "norm-eps" for j in (1, 2)}


def test_the_glue_between_parts_that_agree(guide: dict[str, Any]) -> None:
    """Every part is right and the block is not: the sum of the two is what is wrong."""

    def wired(params: Any, x: Any) -> Any:
        source = BLOCKS[1].replace('mlp(b["channels"], y,', '2 * mlp(b["channels"], y,')
        names = {**guide}
        exec(source, names)
        return names["mixer"](params, x)

    parts = found(guide, wired)
    assert parts == [("blocks.{0..2}", "sum-of-others")]


def test_a_weight_that_differs_is_said_first(guide: dict[str, Any]) -> None:
    params = {k: np.array(v) for k, v in guide["params"].items()}
    params["blocks/2/tokens/up/kernel"][1, 2] += 1e-3
    report = jaxtwin.compare(
        guide["theirs"], guide["mixer"], guide["table"], guide["inputs"], params=params, jit=False
    )
    assert not report.equal
    assert report.provisional
    assert [d.what for d in report.preflight] == ["weight: blocks.2.tokens.up.weight"]
    assert "1 of 216 elements" in report.preflight[0].about
    assert "[2, 1]" in report.preflight[0].about


def test_a_probe_on_one_side_only_is_refused(guide: dict[str, Any]) -> None:
    how = {"params": guide["params"], "dtypes": ("float64",), "jit": False}
    fewer = guide["probes"][1:]
    with pytest.raises(BadInput, match="blocks/0: unexpected"):
        jaxtwin.compare(
            guide["theirs"], guide["mixer"], guide["table"], guide["inputs"], probes=fewer, **how
        )
    more = [*guide["probes"], Row("nowhere", "head", "b c -> b c")]
    with pytest.raises(BadInput, match="nowhere: missing"):
        jaxtwin.compare(
            guide["theirs"], guide["mixer"], guide["table"], guide["inputs"], probes=more, **how
        )
    with pytest.raises(BadInput, match="no submodule 'tail'"):
        jaxtwin.compare(
            guide["theirs"],
            guide["mixer"],
            guide["table"],
            guide["inputs"],
            probes=[Row("head", "tail", "b c -> b c")],
            **how,
        )


def test_a_function_without_its_parameters_is_refused(guide: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="needs its parameters"):
        jaxtwin.compare(guide["theirs"], guide["mixer"], guide["table"], guide["inputs"])


def test_an_nnx_module() -> None:
    theirs = torch.nn.Linear(3, 2)
    ours = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    ours.kernel.set_value(jnp.asarray(theirs.weight.detach().numpy().T))
    ours.bias.set_value(jnp.asarray(theirs.bias.detach().numpy()))
    table = [Row("kernel", "weight", "o i -> i o"), Row("bias", "bias", "o -> o")]
    x = np.random.default_rng(0).normal(size=(5, 3))
    assert jaxtwin.compare(theirs, ours, table, [x], dtypes=("float64",)).equal
    ours.bias.set_value(ours.bias[...] * 2)
    wrong = jaxtwin.compare(theirs, ours, table, [x], dtypes=("float64",))
    assert not wrong.equal
    assert [d.what for d in wrong.preflight] == ["weight: bias"]
