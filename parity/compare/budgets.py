"""A working dtype: errors from the float64 result, against budgets that torch's own errors set.

No budget is set by hand. JAX may be off the float64 result by at most twice what torch, in the same
dtype, is off it, plus what rounding that result costs. Where one draw of roundings leaves a doubt,
more are drawn (draws.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.parity.compare import failure_details
from jaxtwin.parity.compare.curves import NUMPY
from jaxtwin.parity.compare.tolerances import BANDS, HOLLOW, K_OF_KL, K
from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.results import Check, Point, Report, worst_first
from jaxtwin.parity.sides import probes, terms
from jaxtwin.parity.sides.inputs import Inputs
from jaxtwin.parity.sides.outcome import Outcome
from jaxtwin.parity.table import decoder_table

Measure = tuple[str, str]  # a check's kind and place
Errors = Mapping[Measure, float]


@dataclass(frozen=True)
class Tokens:
    """Which tokens are compared: of the logits (b t), and of the counted targets, one by one."""

    of_logits: np.ndarray
    of_losses: np.ndarray


def finite_tokens(got: np.ndarray, want: np.ndarray, counted: np.ndarray) -> Tokens | None:
    """The tokens whose logits (b t v) are finite in `got`, or are not even so in `want`.

    None where all are or none is. `counted` (b t-1) marks the targets.
    """
    seen = np.isfinite(got).all(axis=-1)
    if not seen.all():
        seen |= ~np.isfinite(want).all(axis=-1)
    if seen.all() or not seen.any():
        return None
    return Tokens(seen, seen[:, :-1][counted])


def errors(got: Outcome, reference: Outcome, tokens: Tokens | None = None) -> dict[Measure, float]:
    """How far a run is off the float64 result, by every measure that is budgeted."""
    logits, losses = (got.logits, reference.logits), (got.nll, reference.nll)
    if tokens is not None:
        logits = logits[0][tokens.of_logits], logits[1][tokens.of_logits]
        losses = losses[0][tokens.of_losses], losses[1][tokens.of_losses]
    return {
        ("logits", ""): metrics.relative_l2(*logits),
        ("worst_token", ""): metrics.worst_row(*logits),
        ("kl", ""): metrics.worst_kl(*logits),
        ("loss", ""): metrics.relative_l2(*losses),
        **{("gradient", n): reference.off(n, got.grads[n]) for n in reference.grads},
    }


def rounding(reference: Outcome, dtype: str, tokens: Tokens | None = None) -> dict[Measure, float]:
    """What it costs to round the float64 result to the dtype: nobody can be nearer than that."""
    near = [x.astype(NUMPY[dtype]) for x in (reference.logits, reference.nll)]
    out = errors(Outcome(near[0], near[1], {}), replace(reference, grads={}), tokens)
    for name, grad in reference.grads.items():
        of = reference.terms.get(name)
        out["gradient", name] = terms.rounding(grad, NUMPY[dtype], of)
    return out


def budgeted(
    draws: Sequence[Errors], torch: Sequence[Errors], noise: Errors, dtype: str, label: str = ""
) -> list[Check]:
    """Every error against its budget; `draws` and `torch` hold the errors of one or more draws.

    The budget is K times the largest error of torch's draws, and the rounding noise. The error is
    the smallest of the draws: a fault is in every one of them, bad luck is not.
    """
    out = []
    for measure, least in noise.items():
        kind, place = measure
        factor = K_OF_KL if kind == "kl" else K
        budget = factor * _largest([draw[measure] for draw in torch]) + least
        error = _smallest([draw[measure] for draw in draws])
        out.append(Check(kind, dtype, error, budget, place, label))
    return out


def _largest(values: Sequence[float]) -> float:
    return float(np.max(values))  # unlike max, NaN whatever its place


def _smallest(values: Sequence[float]) -> float:
    return float(np.min(values))


def hollow(checks: Sequence[Check], dtype: str) -> list[str]:
    """In words: the comparisons whose measured budget lets anything pass."""
    loose = [c.name for c in checks if c.kind != "kl" and c.budget >= HOLLOW]
    if not loose:
        return []
    more = f" and {len(loose) - 1} more" if loose[1:] else ""
    return [f"{loose[0]}{more} in {dtype}: torch's own rounding leaves nothing to compare"]


def axes(spec: Model, inputs: Inputs) -> failure_details.Axes:
    """The axes of every probe and parameter of a decoder, by torch's names."""
    found = probes.rows(spec, "unroll", inputs.ids.shape)
    return failure_details.axes([*found, *decoder_table.rows(spec, "unroll")])


def parts(report: Report, dtype: str) -> Iterator[Check]:
    """Of the parts alone, the one that uses most of its band, for each direction."""
    for direction in BANDS:
        points = [p for p in report.points if (p.dtype, p.direction) == (dtype, direction)]
        yield max(map(part, points), key=worst_first)


def part(point: Point) -> Check:
    """A part alone, against its band."""
    kind = f"part_{point.direction}"
    return Check(kind, point.dtype, point.local_error, point.band, point.probe)
