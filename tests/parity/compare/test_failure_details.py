"""What failed, tensor by tensor: the details of a failing check, and where they are read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from rich.console import Console

import jaxtwin
from jaxtwin.configs import PRESETS
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.compare import budgets, curves, failure_details
from jaxtwin.parity.report import console as console_report
from jaxtwin.parity.report import details, html, junit, results, wording
from jaxtwin.parity.report.results import Check, Report
from jaxtwin.parity.selftest.faults import FAULTS
from jaxtwin.parity.selftest.faults.making import turning
from jaxtwin.parity.selftest.kill_table import TOKENS
from jaxtwin.parity.selftest.tiny_models import shapes, weights
from jaxtwin.parity.sides.inputs import check_inputs
from jaxtwin.parity.sides.runs import InjectedFault, Reference, faulty_decoder
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.tests.helpers.kit import torch_model

SPEC = shapes()["pre-norm"]
HEADS = SPEC.layers[0].attn.heads


def explained(wrong: InjectedFault, search: bool = False) -> Report:
    """What a check of that fault finds, with logits and two gradients that fail.

    Without the search for the cause, which takes a while.
    """
    tensors, given = weights(SPEC, 3), check_inputs(SPEC, TOKENS, 3)
    grads = ("layers.1.attn.q.weight", "embed.weight")
    checks = [Check("gradient", "float64", 2.0 + i, 1e-13, name) for i, name in enumerate(grads)]
    found = Report([Check("logits", "float64", 1.0, 1e-13), *checks])
    reference = Reference(SPEC, tensors, given)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        subject = faulty_decoder(SPEC, tensors, given, wrong)
        if search:
            decoder_check.explain(found, reference, subject, None)
            return found
        truth, end_to_end = reference.run(), subject.run(None)
        patched = subject.run(truth)
    accumulated, local = curves.measure(end_to_end, truth), curves.measure(patched, truth)
    found.points = curves.points(accumulated, [local], truth, "float64")
    seen = failure_details.Runs(truth, end_to_end, patched)
    failure_details.add(found, found.checks, "float64", seen, budgets.axes(SPEC, given))
    return found


def everywhere(found: Report, name: str, said: str) -> None:
    """The reading is in the console, the JSON, the page and JUnit's XML."""
    console = Console(width=200, record=True, quiet=False)
    console_report.show(found, console)
    assert f"detail: {name}: {said}" in console.export_text()
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    (one,) = [d for d in data["details"] if d["name"] == name]
    assert one["reading"].startswith(said)
    page = html.page(found, "made-up")
    assert "What failed, in numbers" in page
    assert f"<strong>{said}" in page
    assert f"{name}: {said}" in junit.junit(found)


def answering(change: Callable[[Any], Any]) -> InjectedFault:
    """The rotation answers otherwise: what the queries and the keys come out of."""
    return InjectedFault(edit=turning(lambda rotate, self, x, p: change(rotate(x, p))))


@pytest.mark.slow
def test_heads_in_another_order() -> None:
    found = explained(FAULTS["heads-rotated"], search=True)
    first = found.details[0]
    assert (first.name, first.local, first.axes) == ("layers.0.attn.q", True, "b t n h")
    everywhere(found, "layers.0.attn.q", "the same values in another order along n")
    others = [d.name for d in found.details if not d.local]
    assert others == ["logits", "grad embed.weight", "grad layers.1.attn.q.weight"]  # worst first
    assert found.details[-1].axes == "n h d"
    (logits,) = [d for d in found.details if d.name == "logits"]
    assert logits.axes == "b t v"
    assert logits.logits is not None
    page = html.page(found, "made-up")
    assert f"KL {results.number(logits.logits.kl)} nats at b " in page
    assert f"{logits.logits.flips} of {logits.logits.positions} top-1 tokens flip" in page


@pytest.mark.slow
def test_values_that_are_scaled() -> None:
    found = explained(answering(lambda q: q * 1.25 if q.shape[2] == HEADS else q))
    everywhere(found, "layers.0.attn.q", "the values times 1.25")
    assert f"{found.details[0].scale:.6g} leaves " in html.page(found, "made-up")


def test_a_nan() -> None:
    def planted(q: Any) -> Any:
        return q.at[1, 2, 3, 0].set(jnp.nan) if q.shape[2] == HEADS else q

    found = explained(answering(planted))
    said = "1 not finite where the reference is, the first at b 1, t 2, n 3, h 0"
    everywhere(found, "layers.0.attn.q", said)
    page = html.page(found, "made-up")
    assert "<td>1 JAX alone</td>" in page
    assert "nan at b 1, t 2, n 3, h 0: nan, not " in page


def test_at_most_so_many_and_the_first_divergences_before_all() -> None:
    found = explained(answering(lambda q: q * 1.25))
    found.details.clear()
    tensors, given = weights(SPEC, 3), check_inputs(SPEC, TOKENS, 3)
    truth = Reference(SPEC, tensors, given).run()
    checks = [Check("gradient", "float64", math.nan, 0.0, name) for name in truth.grads]
    known, seen = budgets.axes(SPEC, given), failure_details.Runs(truth, truth, truth)
    failure_details.add(found, checks, "float64", seen, known)
    assert len(found.details) == failure_details.MOST < len(checks)
    assert 1 <= sum(d.local for d in found.details) <= failure_details.FIRST
    failure_details.add(found, checks, "float64", seen, known)
    assert len(found.details) == failure_details.MOST
    assert set(known) >= {*truth.values, *truth.grads}


@pytest.mark.slow
def test_nothing_of_what_holds() -> None:
    tiny = PRESETS["reference-tiny"]
    held = {n: Tensor.of(x.numpy()) for n, x in torch_model(tiny).state_dict().items()}
    found = decoder_check.check(tiny, held, dtypes=("float64", "bfloat16"), tokens=64)
    assert found.equal
    assert found.details == []
    assert found.to_json()["details"] == []
    assert "What failed, in numbers" not in html.page(found, "made-up")
    (note,) = found.notes
    assert note.startswith("bfloat16: ")
    assert "of 128 top-1 tokens flip, the largest margin 0." in note


@pytest.mark.slow
def test_a_working_dtype_alone() -> None:
    """Without float64 there is no diagnosis, and yet what failed is told in numbers."""
    tiny = PRESETS["reference-tiny"]
    held = {n: Tensor.of(x.numpy()) for n, x in torch_model(tiny).state_dict().items()}
    wrong = InjectedFault(
        edit=lambda model: setattr(model.head, "__class__", doubled(type(model.head)))
    )
    found = decoder_check.check(tiny, held, dtypes=("float32",), tokens=32, injected=wrong)
    assert not found.equal
    assert found.details[0].name == "logits"
    assert len(found.details) == failure_details.MOST
    assert wording.readings(found)[0] == ("logits in float32", details.reading(found.details[0]))
    assert details.reading(found.details[0]).startswith("the values times 2, to ")


def doubled(cls: type) -> type:
    def call(self: Any, x: Any, embed: Any) -> Any:
        return 2 * cls.__call__(self, x, embed)

    return type(cls.__name__, (cls,), {"__call__": call})


def test_a_comparison_of_ones_own() -> None:
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    params = {
        f"{i}/{n}": p.detach().numpy().T for i in (0, 1) for n, p in theirs[i].named_parameters()
    }
    table = [Row(f"{i}/weight", f"{i}.weight", "o i -> i o") for i in (0, 1)]
    table += [Row(f"{i}/bias", f"{i}.bias", "o -> o") for i in (0, 1)]

    def ours(p: Any, x: Any) -> Any:
        y = jaxtwin.probe(1.5 * (x @ p["0/weight"] + p["0/bias"]), "first")
        return y @ p["1/weight"] + p["1/bias"]

    found = jaxtwin.compare(
        theirs,
        ours,
        table,
        [np.random.default_rng(0).normal(size=(5, 3))],
        probes=[Row("first", "0", "r c -> r c")],
        params=params,
        jit=False,
    )
    first, *rest = found.details
    assert (first.name, first.axes, details.reading(first)[:20]) == (
        "0", "r c", "the values times 1.5",
    )  # fmt: skip
    assert {"output", "grad 0.weight"} <= {d.name for d in rest}
    assert [d.axes for d in rest if d.name == "output"] == ["axis0 axis1"]
