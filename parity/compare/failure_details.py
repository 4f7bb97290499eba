"""The details of what failed: the first divergence, the logits and the gradients that are off."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxtwin.parity.compare import curves
from jaxtwin.parity.report import details
from jaxtwin.parity.report.details import Detail
from jaxtwin.parity.report.results import Check, Divergence, Point, Report
from jaxtwin.parity.sides.outcome import Outcome, Trace
from jaxtwin.parity.table import axis_ops
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import moves

MOST = 8  # details in one report
FIRST = 4  # of them at most of parts alone
NAMES = {"forward": "{}", "backward": "cotangent {}", "parameter": "grad {}"}
# The checks that say that these are off; the first are a decoder's, the others anybody's.
LOGITS = ("logits", "logits, worst token", "KL in nats, worst token", "loss, per target")
OUTPUT = ("output", "output, worst row")
Axes = Mapping[str, tuple[str, Mapping[str, int]]]  # torch's name: its own axes, merged ones too


def axes(rows: Iterable[Row]) -> Axes:
    """The axes of everything that the rows have there."""
    table = moves(rows)
    return {name: (axis_ops.sides(m.pattern)[0], m.sizes) for m in table for name in m.src}


def add(
    report: Report,
    checks: Sequence[Check],
    dtype: str,
    truth: Outcome,
    free: Outcome | None,
    forced: Trace | None,
    known: Axes,
) -> None:
    """Adds to the report the details of what failed in that dtype, MOST in all.

    `checks` are the comparisons between `free` and `truth`, `forced` a run in which every part was
    fed the reference's own input; None for either where it is not asked for.
    """
    room = MOST - len(report.details)
    found = _all(report, checks, dtype, truth, free, forced, known)
    report.details += [detail for _, detail in zip(range(room), found, strict=False)]


def _all(
    report: Report,
    checks: Sequence[Check],
    dtype: str,
    truth: Outcome,
    free: Outcome | None,
    forced: Trace | None,
    known: Axes,
) -> Iterator[Detail]:
    """One after another, for each costs a while."""
    if forced is not None:
        for point in chosen(report, dtype)[:FIRST]:
            yield from _alone(point, forced, truth, known)
    bad = [check for check in checks if not check.ok and check.dtype == dtype]
    if free is None:
        return
    if any(check.name in LOGITS for check in bad):
        yield from _one("logits", free.logits, truth.logits, (details.LOGITS, {}), dtype)
    if any(check.name in OUTPUT for check in bad):
        yield from _one("output", free.logits, truth.logits, None, dtype)
    grads = [check for check in bad if check.name.startswith("grad ")]
    for check in sorted(grads, key=_margin, reverse=True):
        name = check.name.removeprefix("grad ")
        if name in free.grads:
            yield from _one(check.name, free.grads[name], truth.grads[name], known.get(name), dtype)


def _margin(check: Check) -> float:
    return float("inf") if np.isnan(check.error) else check.margin


def _alone(point: Point, forced: Trace, truth: Outcome, known: Axes) -> Iterator[Detail]:
    got, want = (getattr(t, curves.PICK[point.direction]) for t in (forced, truth))
    if point.probe in got:
        name = NAMES[point.direction].format(point.probe)
        held = (got[point.probe], want[point.probe], known.get(point.probe))
        yield from _one(name, *held, point.dtype, alone=True)


def _one(
    name: str,
    got: np.ndarray,
    want: np.ndarray,
    of: tuple[str, Mapping[str, int]] | None,
    dtype: str,
    alone: bool = False,
) -> Iterator[Detail]:
    """Merged axes are split. Nothing where the shapes differ, which the checks have said."""
    if np.shape(got) != np.shape(want) or not np.size(want):
        return
    pattern, sizes = of or (" ".join(f"axis{i}" for i in range(np.ndim(want))), {})
    if "(" in pattern:
        apart = " ".join(re.findall(r"\w+", pattern))
        got, want = (axis_ops.rearrange(x, f"{pattern} -> {apart}", sizes) for x in (got, want))
        pattern = apart
    yield details.detail(name, got, want, pattern, dtype, alone)


def chosen(report: Report, dtype: str = "float64") -> list[Point]:
    """The first point over its band in that dtype, and the first of each suspect."""
    over = list(_over(report.points, dtype))
    picked = over[:1]
    for divergence in report.divergences:
        near = [p for p in over if p.layer in (divergence.layers or (None,))]
        near = [p for p in near if divergence.direction in ("given", p.direction)]
        picked += [p for p in near if _of(divergence, p)][:1]
    return list(dict.fromkeys(picked))


def _over(points: Sequence[Point], dtype: str) -> Iterator[Point]:
    """Those over their band, in the order of computation."""
    for direction in curves.BANDS:
        same = [p for p in points if (p.dtype, p.direction) == (dtype, direction)]
        yield from (p for p in (same[::-1] if direction == "backward" else same) if not p.ok)


def _of(divergence: Divergence, point: Point) -> bool:
    """Whether the suspect's part means the point: attn means attn.q, ffn.down.weight means ffn."""
    one, other = f"{divergence.part}.", f"{point.part}."
    return one.startswith(other) or other.startswith(one)
