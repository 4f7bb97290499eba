"""Training side by side: torch's AdamW and optax's, from the same weights on the same batches."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

from jaxtwin.configs import BadInput
from jaxtwin.parity.compare.tolerances import OPTIMIZER
from jaxtwin.parity.report.results import Check
from jaxtwin.parity.selftest.optimizer_faults import (
    CONFIG,
    STEPS,
    changed,
    letters,
    lively,
    reference,
    tiny,
)
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.parity.training import adam, moments, trajectory
from jaxtwin.parity.training.adam import ObservedStep
from jaxtwin.parity.training.single_step import differences, local_error
from jaxtwin.parity.training.torch_training import IGNORE, TorchSide, observe, random_batches
from jaxtwin.parity.training.trajectory import JaxSide
from jaxtwin.parity.training.trajectory import trajectory as side_by_side
from jaxtwin.tests.helpers import kit
from jaxtwin.tests.helpers.levels import slow
from jaxtwin.tests.helpers.training import rates

CALM = replace(CONFIG, peak=1e-2)
KEYS = {
    "step", "loss_torch", "loss_jax", "norm_torch", "norm_jax", "clip_torch", "clip_jax",
    "rate_torch", "rate_jax", "parameters", "mu", "nu", "worst",
}  # fmt: skip


def failed(checks: list[Check]) -> list[Check]:
    return [check for check in checks if not check.ok]


@pytest.mark.parametrize(
    ("layout", "accumulate", "tied"),
    [("scan", 2, True), slow("unroll", 1, False)],
)
def test_fifty_steps_in_float64(layout: str, accumulate: int, tied: bool) -> None:
    spec = tiny(tied=tied)
    found = side_by_side(
        spec, lively(spec), CALM, steps=50, batches=random_batches(spec, 50),
        accumulate=accumulate, layout=layout,
    )  # fmt: skip
    assert failed(found.checks) == []
    assert [c.name.split(",")[0] for c in found.checks] == [
        "trained: the optimizer's fresh state", "trained: rate", "trained: clip",
        "trained: loss", "trained: parameters", "trained: mu",
        "trained: nu",
    ]  # fmt: skip
    assert [step["step"] for step in found.steps] == list(range(1, 51))
    assert all(step.keys() == KEYS for step in found.steps)
    assert all(0 <= step[key] <= 1e-9 for step in found.steps for key in ("parameters", "mu", "nu"))
    # They were trained: clipped at times, and to some effect.
    assert {step["clip_torch"] < 1 for step in found.steps} == {True, False}
    first, last = (np.mean([s["loss_torch"] for s in some]) for some in
                   (found.steps[:5], found.steps[-5:]))  # fmt: skip
    assert last < first
    assert found.steps[0]["rate_torch"] == found.steps[0]["rate_jax"] == 0
    assert found.steps[0]["parameters"] == 0


@pytest.mark.slow
def test_float32_is_within_what_torch_was_seen_to_lose() -> None:
    config = replace(CALM, b2=0.999)  # where optax's float32 correction of nu is coarse
    found = side_by_side(
        tiny(), lively(tiny()), config, steps=12, batches=random_batches(tiny(), 12),
        accumulate=2, dtype="float32", layout="unroll",
    )  # fmt: skip
    assert failed(found.checks) == []
    assert max(c.budget for c in found.checks) < 1e-4  # a budget that sees something
    assert all(
        c.error > 0 for c in found.checks if not {"loss", "fresh"} & set(re.findall(r"\w+", c.name))
    )


@pytest.mark.parametrize(
    ("new", "kinds"),
    [
        ({"b1": 0.9001}, {"mu"}),
        slow({"clip": 1.0001}, {"clip", "mu", "nu"}),
        slow({"peak": 1.0001e-2}, {"rate", "parameters"}),
    ],
)
def test_a_number_that_is_a_little_off_fails(new: dict[str, float], kinds: set[str]) -> None:
    batches = random_batches(tiny(), 5)
    given: Any = {"steps": 9, "batches": batches, "build": changed(**new), "layout": "unroll"}
    given["accumulate"] = 2
    found = side_by_side(tiny(), lively(tiny()), CALM, **given)
    assert kinds <= {c.name.split(": ")[1].split(",")[0] for c in failed(found.checks)}


def test_a_fault_is_over_the_float32_budget_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory, "DRAWS", ((2, 1),))
    found = side_by_side(
        tiny(), lively(tiny()), CALM, steps=9, batches=random_batches(tiny(), 5),
        dtype="float32", layout="unroll", build=changed(weight_decay=0.0),
    )  # fmt: skip
    assert [c.name.split(",")[0] for c in failed(found.checks)].count("trained: parameters") == 1


def test_accumulating_is_one_step_of_all() -> None:
    """Rows in four parts, four times: four steps of the optimizer and of the schedule."""
    batches = random_batches(tiny(), 4, rows=8)
    sides = [TorchSide(tiny(), lively(tiny()), CALM, 9, "float64") for _ in range(2)]
    for batch in batches:
        one, two = (side.step(batch, k) for side, k in zip(sides, (1, 4), strict=True))
        assert one == pytest.approx(two, rel=1e-12)
    assert [side.state().count for side in sides] == [4, 4]
    for name, x in sides[0].state().params.items():
        assert kit.apart(sides[1].state().params[name], x) <= 1e-12

    with jax.enable_x64(True):
        ours = JaxSide(tiny(), lively(tiny()), CALM, 9, "float64", "unroll")
        for batch in batches[:2]:
            ours.step(batch, 4)
        counts = {int(x) for _, x in optax.tree.get_all_with_path(ours.opt_state, "count")}
    assert counts == {2}


def test_torchs_own_clip_is_off_by_the_millionth_it_adds() -> None:
    """torch divides by norm + 1e-6: here it is the norm alone, as in optax."""
    side = TorchSide(tiny(), lively(tiny()), CONFIG, STEPS, "float64")
    batch = random_batches(tiny(), 1)[0]
    side.backward(batch, 1)
    params = list(side.model.parameters())
    before = [p.grad.clone() for p in params]
    norm = float(torch.nn.utils.clip_grad_norm_(params, 1.0))
    theirs = [p.grad.clone() for p in params]
    for p, g in zip(params, before, strict=True):
        p.grad = g.clone()
    result = side.apply()
    assert result["norm"] == norm > 1
    for p, clipped, g in zip(params, theirs, before, strict=True):
        assert kit.apart(p.grad, g * result["clip"]) <= 1e-15
        assert kit.apart(clipped, p.grad) == pytest.approx(1e-6 / norm, rel=1e-3)


def test_torchs_groups_and_rates() -> None:
    side = TorchSide(tiny(), lively(tiny()), CONFIG, STEPS, "float64")
    groups = side.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert "embed.weight" in groups[0]["param_names"]  # once: it is the head too
    assert len([n for group in groups for n in group["param_names"]]) == len(side.state().params)
    assert all("norm" in n or "pre_" in n for n in groups[1]["param_names"])
    due = [adam.rate(CONFIG, STEPS, i) for i in range(12)]
    assert rates(CONFIG, STEPS, 12) == pytest.approx(due, rel=1e-6, abs=1e-9)
    assert due[:3] == [0.0, 0.05, 0.1]
    assert due[9:] == pytest.approx([1e-3] * 3)


def test_batches_have_uneven_targets() -> None:
    for batch in random_batches(tiny(), 3, rows=8):
        counts = (batch.labels != IGNORE).sum(1)
        assert counts.min() >= 1
        assert counts[0] == 8
        assert batch.tokens == counts.sum()
        assert sum(part.tokens for part in batch.parts(2)) == batch.tokens
        assert batch.parts(2)[1].ids.tolist() == batch.ids[1::2].tolist()
        assert (batch.positions[:, 0] == 0).all()
        assert (np.diff(batch.segments, axis=1) >= 0).all()


# ---- one step alone ------------------------------------------------------------------------------


def right(**new: Any) -> list[ObservedStep]:
    """The right optimizer's own steps, or those of another config."""
    return local_error(tiny(), changed(**new)(CONFIG, STEPS, letters()), reference())


def over(result: list[ObservedStep]) -> list[set[str]]:
    """At each step, which of update, mu and nu are over their band somewhere."""
    return [
        {
            what
            for what, errors in differences(got, want).items()
            if any(not error <= band for error, band in errors.values())
        }
        for got, want in zip(result, reference(), strict=True)
    ]


def test_the_right_optimizer_injects_nothing() -> None:
    assert over(right()) == [set()] * len(reference())


def test_a_wrong_number_shows_where_it_acts_and_nowhere_else() -> None:
    assert over(right(eps=1e-5))[:3] == [set(), {"update"}, {"update"}]  # the first rate is 0
    assert over(right(b2=0.951))[0] == {"nu"}
    assert over(right(b1=0.9001))[0] == {"mu"}


def test_a_band_is_as_wide_as_torchs_parameters_are_coarse() -> None:
    """With a tiny rate the update is lost in the parameters' rounding, and that is no fault."""
    config = replace(CONFIG, peak=1e-9, floor=0.0)
    observed = observe(tiny(), lively(tiny()), config, steps=9, batches=random_batches(tiny(), 3))
    for got, want in zip(
        local_error(tiny(), trajectory.optimizer(config, 9, letters()), observed),
        observed,
        strict=True,
    ):
        found = differences(got, want)
        assert all(error <= band for some in found.values() for error, band in some.values())
    errors = [error for error, _ in found["update"].values()]
    assert max(errors) > OPTIMIZER  # the plain band would have cried wolf


def test_bad_input_is_refused() -> None:
    batches = random_batches(tiny(), 2, rows=4)
    given: dict[str, Any] = {"steps": 9, "batches": batches}
    for new, said in (
        ({"dtype": "bfloat16"}, "float64 or float32, not in bfloat16"),
        ({"batches": []}, "at least one batch"),
        ({"steps": 2}, "warmup=2 leaves no step of steps=2"),
        ({"accumulate": 3}, "batch 0 has 4 rows, which do not divide by accumulate=3"),
        ({"accumulate": 0}, "accumulate=0"),
    ):
        with pytest.raises(BadInput, match=said):
            side_by_side(tiny(), lively(tiny()), CALM, **{**given, **new})


def test_counts_are_wide_where_a_schedule_needs_them() -> None:
    """From an int32 count optax's schedule is float32, whatever the parameters are."""
    with jax.enable_x64(True):
        ours = JaxSide(tiny(), lively(tiny()), CONFIG, STEPS, "float64", "unroll")
        assert optax.tree.get_all_with_path(ours.opt_state, "count")[0][1].dtype == np.int64
    ours = JaxSide(tiny(), {n: Tensor.of(t.read().astype("f4")) for n, t in lively(tiny()).items()},
                   CONFIG, STEPS, "float32", "unroll")  # fmt: skip
    assert optax.tree.get_all_with_path(ours.opt_state, "count")[0][1].dtype == np.int32
    assert moments.from_optax(tiny(), ours.opt_state, "unroll")[2] == 0
