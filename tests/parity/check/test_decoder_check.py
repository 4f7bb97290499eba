"""The check's own numbers: metrics on arrays of known error, budgets, inputs, reports."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from rich.console import Console

import jaxtwin
from jaxtwin.configs import PRESETS, BadInput
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.compare import budgets
from jaxtwin.parity.compare.working_dtype import WorkingDtype
from jaxtwin.parity.report import console as console_report
from jaxtwin.parity.report import metrics, results
from jaxtwin.parity.report.results import Check, Report
from jaxtwin.parity.selftest.faults import FAULTS
from jaxtwin.parity.sides import runs
from jaxtwin.parity.sides.inputs import check_inputs
from jaxtwin.parity.sides.outcome import Outcome
from jaxtwin.parity.table import bridge
from jaxtwin.tests.helpers.kit import torch_model
from jaxtwin.tests.helpers.levels import slow

TINY = PRESETS["reference-tiny"]


def test_relative_l2() -> None:
    assert metrics.relative_l2(np.array([3.0, 4.0]), np.array([3.0, 4.5])) == pytest.approx(
        0.5 / math.hypot(3, 4.5), rel=1e-15
    )
    assert metrics.relative_l2(np.zeros(3), np.zeros(3)) == 0
    assert metrics.relative_l2(np.array([1e-100]), np.zeros(1)) == math.inf
    assert math.isnan(metrics.relative_l2(np.array([np.nan, 1]), np.array([1.0, 1])))
    assert math.isnan(metrics.relative_l2(np.array([np.nan]), np.zeros(1)))
    with pytest.raises(ValueError, match="shapes differ"):
        metrics.relative_l2(np.zeros((2, 3)), np.zeros((3, 2)))


def test_worst_row_is_not_an_average() -> None:
    want = np.ones((2, 100, 4))
    got = want.copy()
    got[1, 7] *= 1.5
    assert metrics.worst_row(got, want) == pytest.approx(0.5)
    assert metrics.relative_l2(got, want) < 0.04
    got[0, 0, 0] = np.nan
    assert math.isnan(metrics.worst_row(got, want))


def test_worst_kl_is_in_nats_and_summed_over_the_vocabulary() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    want = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    shifted = np.log(q) + 7  # logits are known up to a constant
    assert metrics.worst_kl(shifted, np.log(p)) == pytest.approx(want, rel=1e-12)
    rows = np.stack([np.log(p), np.log(p)])
    both = np.stack([np.log(p), np.log(q)])
    assert metrics.worst_kl(both, rows) == pytest.approx(want, rel=1e-12)


def test_worst_kl_of_nearly_equal_logits_does_not_cancel() -> None:
    """KL is half the variance of the gap where it is small: here 1e-24, far below one ulp of 1."""
    logits = np.zeros((1, 2))
    gap = np.array([[1e-12, -1e-12]])
    assert metrics.worst_kl(logits + gap, logits) == pytest.approx(0.5e-24, rel=1e-3)


def test_rounded() -> None:
    x = np.array([1 + 2**-9, 1 + 2**-7])
    assert metrics.rounded(x, np.dtype(ml_dtypes.bfloat16)).tolist() == [1.0, 1 + 2**-7]


def outcome(scale: float) -> Outcome:
    logits = np.linspace(-1, 1, 24).reshape(1, 4, 6)
    return Outcome(
        logits * scale, np.array([1.0, 2.0]) * scale, {"w": np.array([3.0, 4.0]) * scale}
    )


def held(jax: list[float], torch: list[float]) -> list[Check]:
    """The checks of runs that are off the truth by those factors."""
    truth = outcome(1.0)
    of = [[budgets.errors(outcome(scale), truth) for scale in side] for side in (jax, torch)]
    return budgets.budgeted(*of, budgets.rounding(truth, "float32"), "float32")


def test_largest_torch_draw_sets_the_budget_and_a_fault_is_in_every_draw() -> None:
    assert all(c.ok for c in held([1 + 1.9e-4], [1 + 2e-5, 1 + 1e-4]))
    assert all(c.ok for c in held([1 + 9e-4, 1 + 1.9e-4], [1 + 1e-4]))
    assert not any(c.ok for c in held([1 + 9e-4, 1 + 2.1e-4], [1 + 2e-5, 1 + 1e-4]))


def test_budget_is_twice_torchs_error_and_the_rounding() -> None:
    by = {c.name: c for c in held([1 + 1.9e-4], [1 + 1e-4])}
    assert all(c.ok for c in by.values()), by
    assert by["grad w"].error == pytest.approx(1.9e-4, rel=1e-9)
    assert by["grad w"].budget == pytest.approx(2e-4, rel=1e-9)  # 3 and 4 round to themselves
    over = {c.name: c for c in held([1 + 2.1e-4], [1 + 1e-4])}
    assert not any(c.ok for c in over.values()), over


def test_nan_never_passes() -> None:
    assert not Check("logits", "float32", math.nan, 1.0).ok
    assert not Check("logits", "float32", 0.0, math.nan).ok
    broken = outcome(1.0)
    broken.grads["w"][0] = np.nan
    bad, good = (budgets.errors(x, outcome(1.0)) for x in (broken, outcome(1 + 1e-4)))
    noise = budgets.rounding(outcome(1.0), "float32")
    for draws, torchs in (([bad], [good]), ([good, bad], [good]), ([good], [bad, good])):
        checks = budgets.budgeted(draws, torchs, noise, "float32")
        assert [c.name for c in checks if not c.ok] == ["grad w"]


def test_a_budget_that_is_no_number_allows_nothing() -> None:
    nan, inf = float("nan"), float("inf")
    assert Check("logits", "float16", 1.0, 1.0).ok
    for error, budget in ((1.0, inf), (inf, inf), (nan, 1.0), (1.0, nan), (0.0, inf)):
        assert not Check("logits", "float16", error, budget).ok


def test_a_budget_that_lets_anything_pass_is_said() -> None:
    sizes = {"w": 3.0, "v": 0.7}
    checks = [Check("gradient", "float16", 0.1, size, name) for name, size in sizes.items()]
    loose = [*checks, Check("logits", "float16", 0.1, 0.2), Check("kl", "float16", 0, 9.0)]
    assert budgets.hollow(loose, "float16") == [
        "grad w and 1 more in float16: torch's own rounding leaves nothing to compare"
    ]
    assert budgets.hollow(loose[2:], "float16") == []


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"tokens": 9.5}, "8 tokens or more, got 9.5"),
        ({"layout": "zig"}, "one of scan, unroll, got 'zig'"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"dtypes": "float32"}, r"a list, as \['float32'\]"),
        ({"dtypes": []}, "at least one dtype"),
    ],
)
def test_what_cannot_be_checked_is_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        decoder_check.check(TINY, {}, **how)
    with pytest.raises(BadInput, match="no next token"):
        decoder_check.check(replace(TINY, max_len=1), {})


@pytest.mark.parametrize(
    ("call", "failing"),
    [
        slow("plain", "logits, of the ids alone"),
        ("cached", "logits, decoded from the cache"),
    ],
)
def test_the_other_calls_are_made_too(
    call: str, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits sevenfold without positions; another second row from the cache."""
    if call == "plain":
        right = runs.logits_of_ids
        monkeypatch.setattr(runs, "logits_of_ids", lambda model, ids: 7 * right(model, ids))
    else:
        decode = runs.decode_jax

        def wrong(*args: Any, **how: Any) -> np.ndarray:
            out = np.array(decode(*args, **how))
            out[1:] *= 5
            return out

        monkeypatch.setattr(runs, "decode_jax", wrong)
    weights = bridge.from_state(torch_model(TINY).state_dict())
    found = decoder_check.check(
        TINY, weights, dtypes=["float64"], tokens=8, diagnose=False, layout="unroll"
    )
    assert [c.name for c in found.checks if not c.ok] == [failing]


def test_gradients_are_on_whatever_the_caller_has_turned_off() -> None:
    weights = bridge.from_state(torch_model(TINY).state_dict())
    with torch.inference_mode():
        found = decoder_check.check(TINY, weights, dtypes=["float64"], tokens=8, layout="unroll")
    assert found.equal


def test_nothing_compared_is_not_equal() -> None:
    assert not Report().equal
    assert results.verdict(Report()) == "NOTHING WAS COMPARED"


def test_inputs_reach_far_and_wide() -> None:
    given = check_inputs(TINY, 300)
    assert given.ids.shape == (2, TINY.max_len)
    assert given.ids.min() == 0
    assert given.ids.max() == TINY.vocab - 1
    starts = np.flatnonzero(np.diff(given.segments[1])) + 1
    # Padding, two documents, padding.
    assert given.segments[1, [0, *starts]].tolist() == [0, 1, 2, 0]
    assert given.positions[1, starts].tolist() == [0, 0, 0]
    assert given.ids[1, starts[2] - 2 : starts[2]].tolist() == [TINY.vocab - 1, 0]  # rare, and seen
    assert not given.counted[1, starts - 1].any()  # no document's last token predicts the next one
    assert not given.counted[1, : starts[0]].any()  # nor is padding a target
    assert not given.counted[1, starts[2] :].any()
    assert given.counted[0].all()


def test_unknown_dtype_is_named() -> None:
    with pytest.raises(BadInput, match="float63"):
        decoder_check.check(TINY, {}, dtypes=["float63"])


@pytest.mark.parametrize(
    ("dtypes", "wrong", "redraw"),
    [
        slow(["float32"], None, True),
        (["float64", "float32"], None, True),
        slow(["float64", "float32"], FAULTS["rope-base"], False),
    ],
)
def test_roundings_are_drawn_anew_unless_float64_fails(
    dtypes: list[str], wrong: Any, redraw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check in float32 alone once failed for one unlucky draw."""
    redraws: list[bool] = []

    def checks(self: WorkingDtype, *args: Any) -> list[Check]:
        redraws.append(self.redraw)
        return []

    monkeypatch.setattr(WorkingDtype, "checks", checks)
    weights = bridge.from_state(torch_model(TINY).state_dict())
    decoder_check.check(
        TINY, weights, dtypes=dtypes, tokens=8, injected=wrong, diagnose=False, layout="unroll"
    )
    assert redraws == [redraw]


@pytest.fixture(scope="module")
def checked() -> Report:
    weights = bridge.from_state(torch_model(TINY).float().state_dict())
    return decoder_check.check(TINY, weights, dtypes=("float64", "float32", "bfloat16"), tokens=64)


def test_equal_models_are_equal_in_every_dtype(checked: Report) -> None:
    assert checked.equal, [c for c in checked.checks if not c.ok]
    assert {c.dtype for c in checked.checks} == {"as stored", "float64", "float32", "bfloat16"}
    grads = [c for c in checked.checks if c.kind == "gradient"]
    assert len(grads) == 3 * len(torch_model(TINY).state_dict())


def test_json_is_as_documented(checked: Report) -> None:
    data = json.loads(json.dumps(checked.to_json(), allow_nan=False))
    assert data["equal"] is True
    keys = {"name", "kind", "place", "label", "dtype", "error", "budget", "ok"}
    assert all(set(c) == keys for c in data["checks"])
    environment = {
        "python", "machine", "versions", "jax_devices", "jax_matmul_precision",
        "torch_matmul_precision", "torch_threads", "layout", "input_shape", "input_sha256",
        "stored_dtypes", "parameters", "layers", "settings",
    }  # fmt: skip
    assert set(data["environment"]) == environment
    odd = Report([Check("logits", "float32", math.inf, math.nan)]).to_json()["checks"][0]
    assert (odd["error"], odd["budget"], odd["ok"]) == ("inf", "nan", False)


def test_console_shows_what_fails(checked: Report) -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console_report.show(checked, console)
    text = console.export_text()
    assert f"EQUAL: all {len(checked.checks)} comparisons hold" in text
    assert "that hold with more room (--all shows them)" in text
    bad = Report(
        [Check("gradient", "float32", 3e-6, 1e-6, "layers.1.attn.q.weight"), *checked.checks]
    )
    console_report.show(bad, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    text = " ".join(text.split())
    assert "NOT EQUAL: 1 of" in text
    assert "'grad layers.1.attn.q.weight' in float32: 3.00e-06 where 1.00e-06" in text


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"PyTorch, which is not installed: pip install 'jaxtwin"):
        jaxtwin.check("smollm2-tiny")
