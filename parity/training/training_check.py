"""Training in a check: both sides side by side, the optimizer's steps alone, and its mistakes.

The trajectory is the accumulated error (trajectory.py), the steps alone are the injected one
(single_step.py), and a step that is wrong is explained by the mistake that makes the same
(adam_hypotheses.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtwin.configs import BadInput, Model, runs
from jaxtwin.configs.runs import AdamW
from jaxtwin.parity.report.results import Cause, Check, Divergence, Point, Report
from jaxtwin.parity.table.tensors import Tensors
from jaxtwin.parity.training import adam
from jaxtwin.parity.training.adam import ObservedStep
from jaxtwin.parity.training.adam_hypotheses import Divergence as Steps
from jaxtwin.parity.training.adam_hypotheses import explain
from jaxtwin.parity.training.single_step import differences, local_error
from jaxtwin.parity.training.trajectory import DTYPES, Build, Gaps, optimizer, trajectory

KINDS = ("update", "mu", "nu")
HELD = 2 << 30  # bytes of steps that are held to be judged alone
PER_PARAMETER = 9 * 8  # bytes of one step: a state, gradients and what was made, on both sides


@dataclass(frozen=True)
class Plan:
    """How long, and with what. `build` makes the JAX side's optimizer, `train`'s by default."""

    steps: int
    config: AdamW
    accumulate: int = 1
    rows: int = 4
    length: int = 32
    build: Build | None = None


def plan(steps: int | None, run: str | os.PathLike[str] | None = None) -> Plan:
    """AdamW as it is commonly set, or the optimizer and the accumulation of a run file.

    The schedule ends at the last step. BadInput where the file cannot be read, or where its warm-up
    is no shorter than the steps.
    """
    if steps is None:
        raise BadInput("say how many steps are to be trained on both sides: --steps 20")
    if run is None:
        config = AdamW(
            peak=1e-3,
            warmup=min(2, steps - 1),
            schedule="cosine",
            b1=0.9,
            b2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            clip=1.0,
        )
        return Plan(steps, config, accumulate=2)
    file = runs.read(run)
    if file.optimizer.warmup >= steps:
        raise BadInput(
            f"{run}: optimizer.warmup={file.optimizer.warmup} leaves no step of --steps {steps}"
        )
    rows = max(file.accumulate, 4 // file.accumulate * file.accumulate)
    return Plan(steps, file.optimizer, file.accumulate, rows)


def train(
    report: Report,
    spec: Model,
    tensors: Tensors,
    plan: Plan,
    *,
    theirs: tuple[Model, Tensors] | None = None,
    dtypes: Sequence[str] = DTYPES,
    layout: str = "scan",
    seed: int = 0,
    progress: Callable[[str], None] = lambda step: None,
) -> None:
    """Trains both sides and adds to the report what was seen.

    `theirs` is what the JAX side starts from, where that is something else.
    """
    from jaxtwin.parity.training.torch_training import random_batches

    length = min(plan.length, spec.max_len)
    batches = random_batches(spec, plan.steps, rows=plan.rows, length=length, seed=seed)
    final_gaps: Gaps = {}
    for dtype in [d for d in DTYPES if d in dtypes]:
        progress(f"{dtype}: {plan.steps} steps of training on both sides")
        found = trajectory(
            spec,
            tensors,
            plan.config,
            steps=plan.steps,
            batches=batches,
            accumulate=plan.accumulate,
            dtype=dtype,
            layout=layout,
            build=plan.build,
            theirs=theirs,
        )
        report.checks += found.checks
        report.trajectory = report.trajectory or found.steps
        final_gaps = final_gaps or found.final_gaps
    clip = plan.config.clip
    if clip is not None and all(step["clip_torch"] == 1 for step in report.trajectory):
        report.blind.append(f"the clip at {clip:g}: no gradient's norm reached it in training")
    left = [d for d in dtypes if d not in DTYPES]
    if left:
        report.notes.append(
            f"training was compared in {' and '.join(DTYPES)}, not in {', '.join(left)}"
        )
    size = PER_PARAMETER * sum(math.prod(t.shape) for t in tensors.values())
    many = min(plan.steps, HELD // size)
    if not many:
        report.notes.append(
            f"no step of the optimizer was judged alone: one is {size / 2**30:.1f} GiB to hold"
        )
        return
    progress(f"float64: {many} steps of the optimizer, each alone")
    _local_errors(report, spec, tensors, plan, batches[:many], layout, final_gaps)


def _local_errors(
    report: Report,
    spec: Model,
    tensors: Tensors,
    plan: Plan,
    batches: Sequence[object],
    layout: str,
    final_gaps: Gaps,
) -> None:
    """Each step from the reference's state and gradients: points, a check a kind, and a cause."""
    import jax

    from jaxtwin.jaxmodel import abstract, axes
    from jaxtwin.parity.training.torch_training import observe

    options = {"steps": plan.steps, "batches": batches, "accumulate": plan.accumulate}
    observed = observe(spec, tensors, plan.config, **options)  # type: ignore[arg-type]
    with jax.enable_x64(True):
        letters = axes.letters(abstract(spec, layout=layout))
        results = local_error(
            spec,
            (plan.build or optimizer)(plan.config, plan.steps, letters),
            observed,
            layout=layout,
        )
    points = _points(final_gaps, results, observed)
    report.points += points
    for kind in KINDS:
        worst = max((p for p in points if p.direction == kind), key=_over)
        report.checks.append(
            Check(f"optimizer_{kind}", "float64", worst.local_error, worst.band, worst.probe)
        )
    wrong = [p for p in points if not p.ok]
    if wrong:
        setting = adam.Setting.of(spec, plan.config, plan.steps, layout)
        causes = explain(Steps(setting, tuple(results)))
        report.divergences.append(_divergence(wrong, causes))


def _points(
    final_gaps: Gaps, results: Sequence[ObservedStep], observed: Sequence[ObservedStep]
) -> list[Point]:
    """For each parameter its update and both moments: the step that uses most of its band."""
    from jaxtwin.parity.sides import probes

    worst: dict[tuple[str, str], tuple[float, float]] = {}
    for got, want in zip(results, observed, strict=True):
        for kind, errors in differences(got, want).items():
            for name, (error, band) in errors.items():
                old = worst.get((kind, name))
                if old is None or _rank(error, band) > _rank(*old):
                    worst[kind, name] = (error, band)
    return [
        Point(
            name,
            probes.layer(name),
            probes.part(name),
            kind,
            "float64",
            final_gaps["parameters" if kind == "update" else kind][name],
            error,
            0.0,
            band,
        )
        for kind in KINDS
        for (which, name), (error, band) in worst.items()
        if which == kind
    ]


def _rank(error: float, band: float) -> float:
    return math.inf if math.isnan(error) else error / band


def _over(point: Point) -> float:
    return _rank(point.local_error, point.band)


def _divergence(wrong: Sequence[Point], causes: Sequence[Cause]) -> Divergence:
    """The optimizer; a cause only where one mistake alone makes the same steps."""
    worst = max(map(_over, wrong))
    cause = causes[0] if causes else None
    return Divergence("optimizer", (), wrong[0].direction, worst, cause)
