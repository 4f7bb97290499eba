"""The details of what failed: the first divergence, the logits and the gradients that are off."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtwin.parity.compare import curves
from jaxtwin.parity.compare.tolerances import BANDS
from jaxtwin.parity.report import details
from jaxtwin.parity.report.details import Detail
from jaxtwin.parity.report.results import Check, Divergence, Point, Report, worst_first
from jaxtwin.parity.sides.outcome import Outcome, Trace
from jaxtwin.parity.table import axis_ops
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import moves

MOST = 8  # details in one report
FIRST = 4  # of them at most of parts alone
KINDS = {"forward": "value", "backward": "cotangent", "parameter": "gradient"}
# The checks that say that these are off; the first are a decoder's, the others any model's.
LOGITS = {"logits", "worst_token", "kl", "loss"}
OUTPUT = {"output", "worst_row"}
Axes = Mapping[str, tuple[str, Mapping[str, int]]]  # torch's name: its own axes, merged ones too


def axes(rows: Iterable[Row]) -> Axes:
    """The axes of everything that the rows have on the torch side."""
    table = moves(rows)
    return {name: (axis_ops.sides(m.pattern)[0], m.sizes) for m in table for name in m.src}


@dataclass(frozen=True)
class Runs:
    """Runs in one dtype, to read the details off; None for either where it is not asked for."""

    reference: Outcome  # in float64
    end_to_end: Outcome | None  # the JAX side's
    patched: Trace | None  # the JAX side's, every part fed the reference's own input


def add(report: Report, checks: Sequence[Check], dtype: str, runs: Runs, axes_of: Axes) -> None:
    """Adds to the report the details of what failed in that dtype, MOST in all.

    `checks` are the comparisons of `end_to_end` with `reference`.
    """
    room = MOST - len(report.details)
    found = _all(report, checks, dtype, runs, axes_of)
    report.details += [detail for _, detail in zip(range(room), found, strict=False)]


def _all(
    report: Report, checks: Sequence[Check], dtype: str, runs: Runs, axes_of: Axes
) -> Iterator[Detail]:
    """One after another, for each costs a while."""
    if runs.patched is not None:
        for point in chosen(report, dtype)[:FIRST]:
            yield from _local(point, runs.patched, runs.reference, axes_of)
    got, want = runs.end_to_end, runs.reference
    if got is None:
        return
    bad = [check for check in checks if not check.ok and check.dtype == dtype and not check.label]
    kinds = {check.kind for check in bad}
    if kinds & LOGITS:
        yield from _one("logits", "", got.logits, want.logits, (details.LOGITS, {}), dtype)
    if kinds & OUTPUT:
        yield from _one("output", "", got.logits, want.logits, None, dtype)
    grads = [check for check in bad if check.kind == "gradient"]
    for check in sorted(grads, key=worst_first, reverse=True):
        name = check.place
        if name in got.grads:
            both = got.grads[name], want.grads[name]
            yield from _one("gradient", name, *both, axes_of.get(name), dtype)


def _local(point: Point, patched: Trace, reference: Outcome, axes_of: Axes) -> Iterator[Detail]:
    got, want = (getattr(t, curves.PICK[point.direction]) for t in (patched, reference))
    name = point.probe
    if name in got:
        both = got[name], want[name]
        kind = KINDS[point.direction]
        yield from _one(kind, name, *both, axes_of.get(name), point.dtype, local=True)


def _one(
    kind: str,
    place: str,
    got: np.ndarray,
    want: np.ndarray,
    of: tuple[str, Mapping[str, int]] | None,
    dtype: str,
    local: bool = False,
) -> Iterator[Detail]:
    """Merged axes are split. Nothing where the shapes differ: a check of its own says so."""
    if np.shape(got) != np.shape(want) or not np.size(want):
        return
    pattern, sizes = of or (" ".join(f"axis{i}" for i in range(np.ndim(want))), {})
    if "(" in pattern:
        split = " ".join(re.findall(r"\w+", pattern))
        got, want = (axis_ops.rearrange(x, f"{pattern} -> {split}", sizes) for x in (got, want))
        pattern = split
    yield details.detail(kind, place, got, want, pattern, dtype, local)


def chosen(report: Report, dtype: str = "float64") -> list[Point]:
    """The first point over its band in that dtype, and the first of each divergence."""
    over = list(_over(report.points, dtype))
    picked = over[:1]
    for divergence in report.divergences:
        near = [p for p in over if p.layer in (divergence.layers or (None,))]
        near = [p for p in near if divergence.direction in ("preflight", p.direction)]
        picked += [p for p in near if _is_of(divergence, p)][:1]
    return list(dict.fromkeys(picked))


def _over(points: Sequence[Point], dtype: str) -> Iterator[Point]:
    """Those over their band, in the order of computation."""
    for direction in BANDS:
        same = [p for p in points if (p.dtype, p.direction) == (dtype, direction)]
        yield from (p for p in (same[::-1] if direction == "backward" else same) if not p.ok)


def _is_of(divergence: Divergence, point: Point) -> bool:
    """Whether its part means the point: attn means attn.q, ffn.down.weight means ffn."""
    one, other = f"{divergence.part}.", f"{point.part}."
    return one.startswith(other) or other.startswith(one)
