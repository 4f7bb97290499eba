"""Training as a part of a check: what is added to the report, and a wrong optimizer named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from typer.testing import CliRunner

from jaxtwin.cli.main import app
from jaxtwin.configs import BadInput
from jaxtwin.parity.check import source_check
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.report.html import page
from jaxtwin.parity.report.results import Report, verdict
from jaxtwin.parity.selftest.optimizer_faults import CONFIG, changed, lively, tiny
from jaxtwin.parity.training import training_check
from jaxtwin.parity.training.training_check import Plan
from jaxtwin.tests.helpers.levels import slow

CALM = replace(CONFIG, peak=1e-2)
PLAN = Plan(6, CALM, accumulate=2, length=8)
KINDS = ["start", "rate", "clip", "loss", "parameters", "mu", "nu"]


def kinds(report: Report, start: str) -> list[str]:
    return [c.kind.removeprefix(start) for c in report.checks if c.kind.startswith(start)]


def trained_with(plan: Plan, **how: object) -> Report:
    report = Report()
    spec = tiny()
    training_check.train(
        report, spec, lively(spec), plan, dtypes=["float64"], layout="unroll", **how
    )  # type: ignore[arg-type]
    return report


def test_the_right_optimizer_is_equal_along_the_run_and_alone() -> None:
    report = trained_with(PLAN)
    assert report.equal, [c for c in report.checks if not c.ok]
    assert kinds(report, "training_") == KINDS
    assert kinds(report, "optimizer_") == ["update", "mu", "nu"]
    assert [step["step"] for step in report.trajectory] == [1, 2, 3, 4, 5, 6]
    names = set(lively(tiny()))
    for kind in training_check.KINDS:
        points = [p for p in report.points if p.direction == kind]
        assert {p.probe for p in points} == names
        assert all(p.ok and p.accumulated_error <= 1e-9 for p in points)
    assert any(p.accumulated_error > 0 for p in report.points)
    assert report.divergences == []


@pytest.mark.parametrize(
    ("new", "cause", "failing"),
    [
        ({"eps": 1e-8}, "eps", {"update"}),
        slow({"b2": 0.999}, "b2", {"update", "nu"}),
        slow({"clip": 0.5}, "clip", {"update", "mu", "nu"}),
    ],
)
def test_a_wrong_optimizer_is_named(new: dict[str, float], cause: str, failing: set[str]) -> None:
    report = trained_with(replace(PLAN, build=changed(**new)))
    bad = [c for c in report.checks if not c.ok]
    kinds_bad = {c.kind for c in bad}
    assert kinds_bad & {f"optimizer_{k}" for k in ("update", "mu", "nu")} == {
        f"optimizer_{k}" for k in failing
    }
    assert "training_parameters" in kinds_bad
    (divergence,) = report.divergences
    assert divergence.part == "optimizer"
    assert divergence.worst > 1
    assert divergence.cause is not None
    assert (divergence.cause.name, divergence.cause.proven) == (cause, True)
    said = verdict(report)
    assert said.startswith("NOT EQUAL: first divergence at optimizer (")
    assert f"'{cause}' (proven)" in said
    html = page(report, "tiny")
    assert "Trained side by side" in html
    assert "updates, each step alone" in html
    assert divergence.cause.advice.split("'")[0] in html


def test_an_optimizer_that_starts_with_moments_is_seen() -> None:
    """Its state is filled by name for every comparison: this one looks at what it fills itself."""

    def build(config: Any, steps: int, letters: Any) -> Any:
        good = changed()(config, steps, letters)

        def init(params: Any) -> Any:
            ones = jax.tree.map(jax.numpy.ones_like, params)
            return optax.tree.set(good.init(params), mu=ones)

        return optax.GradientTransformationExtraArgs(init, good.update)

    report = trained_with(replace(PLAN, steps=3, build=build))
    bad = [c for c in report.checks if not c.ok]
    assert [(c.name, c.error) for c in bad] == [("trained: the optimizer's fresh state", 1.0)]


@pytest.mark.parametrize(("clip", "said"), [(1e9, True), (1e-3, False), (None, False)])
def test_a_clip_that_is_never_reached_is_said(clip: float | None, said: bool) -> None:
    report = trained_with(replace(PLAN, steps=3, config=replace(CALM, clip=clip)))
    assert ["the clip at 1e+09" in line for line in report.blind] == [True] * said


@pytest.mark.slow
def test_models_that_differ_are_not_trained() -> None:
    how = {"dtypes": ["float64"], "tokens": 8, "layout": "unroll", "witness": False}
    plan = replace(PLAN, steps=3)
    report = source_check.check("reference-tiny", training=plan, **how)  # type: ignore[arg-type]
    assert report.equal
    assert len(report.trajectory) == 3
    # Weights of another seed: the models differ before the first step.
    other = open_source("reference-tiny", seed=1)
    report = source_check.check("reference-tiny", training=plan, against=other, **how)  # type: ignore[arg-type]
    assert not report.equal
    assert report.trajectory == []
    assert any("training was not compared" in note for note in report.notes)


def test_what_the_jax_side_starts_from_may_be_something_else() -> None:
    spec, tensors = tiny(), lively(tiny())
    other = (spec, lively(spec, seed=1))
    report = Report()
    training_check.train(
        report, spec, tensors, PLAN, theirs=other, dtypes=["float64"], layout="unroll"
    )
    bad = {c.kind for c in report.checks if not c.ok}
    assert {"training_loss", "training_parameters"} <= bad


def test_steps_that_are_too_large_to_hold_are_not_judged_alone_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_check, "HELD", 0)
    report = trained_with(replace(PLAN, steps=3))
    assert kinds(report, "optimizer_") == []
    assert [note.split(":")[0] for note in report.notes] == [
        "no step of the optimizer was judged alone"
    ]


def test_the_plan_of_a_run_file(tmp_path: Path) -> None:
    run = Path("configs/runs/train-reference-tiny.toml")
    plan = training_check.plan(50, run)
    assert (plan.steps, plan.config.warmup, plan.accumulate, plan.rows) == (50, 20, 2, 4)
    assert training_check.plan(1).config.warmup == 0
    with pytest.raises(BadInput, match=r"warmup=20 leaves no step of --steps 20"):
        training_check.plan(20, run)
    with pytest.raises(BadInput, match="--steps 20"):
        training_check.plan(None, run)


def test_the_verb_refuses_a_run_without_steps() -> None:
    run = "configs/runs/train-reference-tiny.toml"
    answer = CliRunner().invoke(app, ["check", "reference-tiny", "--run", run])
    assert answer.exit_code == 2
    assert "--steps 20" in answer.output
