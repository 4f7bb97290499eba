"""Errors along a run: end to end, and of each part alone, in float64 and in working dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from jaxtwin.parity.compare.tolerances import BANDS, FORWARD, LOSS, K
from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.results import Point
from jaxtwin.parity.sides import probes, terms
from jaxtwin.parity.sides.outcome import Trace

PICK = {"forward": "values", "backward": "cotangents", "parameter": "grads"}
NUMPY = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def error(got: np.ndarray, want: np.ndarray, of: terms.Terms | None = None) -> float:
    """Relative L2; shapes that differ are as wrong as can be. `of`: a bias's terms (terms.py).

    What is NaN, or the same infinity, on both sides agrees: so a part that was handed a NaN and
    hands it on is not at fault.
    """
    if np.shape(got) != np.shape(want):
        return float("inf")
    if np.isfinite(want).all():
        return terms.relative(got, want, of)
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    alike = (np.isnan(got) & np.isnan(want)) | (np.isinf(want) & (got == want))
    return metrics.relative_l2(got[~alike], want[~alike])


def errors(got: Trace, want: Trace, direction: str) -> dict[str, float]:
    """Relative L2 by name, in the order of computation; a missing name is infinitely off."""
    a, b = getattr(got, PICK[direction]), getattr(want, PICK[direction])
    of = want.terms if direction == "parameter" else {}
    return {
        name: error(a[name], b[name], of.get(name)) if name in a else float("inf") for name in b
    }


def rounding(reference: Trace, direction: str, name: str, dtype: str) -> float:
    """What rounding the float64 result to the dtype costs at that place."""
    of = reference.terms.get(name) if direction == "parameter" else None
    return terms.rounding(getattr(reference, PICK[direction])[name], NUMPY[dtype], of)


def lossy(
    exact: Trace, lost: Trace, direction: str, dtype: str, pooled: bool = False
) -> dict[str, float]:
    """What may be off where the reference loses digits to the dtype, by name.

    float64's band and LOSS times what the reference loses; where it loses any, also one rounding.
    `pooled`: the largest loss counts for all that lose. Each is one draw of the same roundings,
    where nothing is handed on from one part to the next.
    """
    allowed = dict.fromkeys(getattr(exact, PICK[direction]), BANDS[direction])
    if lost is exact:
        return allowed
    loss = errors(lost, exact, direction)
    loss = {name: e for name, e in loss.items() if e > BANDS[direction]}
    most = max(loss.values(), default=0.0)
    for name, e in loss.items():
        allowed[name] += LOSS * (most if pooled else e)
        allowed[name] += rounding(exact, direction, name, dtype)
    return allowed


def final(got: Trace, want: Trace, lost: Trace | None = None, dtype: str = "") -> float:
    """The largest error end to end, logits and every gradient, in units of what is allowed.

    That is float64's own rounding and, where the reference was made to lose digits (`lost` is its
    run with that, `want` without), what that costs (see `lossy`).
    """
    lost = lost or want
    allowed = lossy(want, lost, "parameter", dtype)
    off = errors(got, want, "parameter")
    output = FORWARD
    if (loss := error(lost.logits, want.logits)) > FORWARD:
        cost = error(metrics.rounded(want.logits, NUMPY[dtype]), want.logits)
        output += LOSS * loss + cost
    worst = [off[name] / allowed[name] for name in allowed]
    return float(np.max([*worst, error(got.logits, want.logits) / output]))


Errors = dict[str, dict[str, float]]  # by direction, then by name


def measure(got: Trace, reference: Trace) -> Errors:
    """Every error of a run that a curve is drawn of."""
    return {direction: errors(got, reference, direction) for direction in BANDS}


def local_errors(run: Callable[..., Trace], reference: Trace) -> Errors:
    """Every error of the parts alone: a half at a time, for two traces and a half are too many."""
    half = run(reference, "forward")
    forward = {"forward": errors(half, reference, "forward")}
    del half
    half = run(reference, "backward")
    return forward | {at: errors(half, reference, at) for at in BANDS if at != "forward"}


def points(
    accumulated: Errors,
    local: Sequence[Errors],
    reference: Trace,
    dtype: str,
    noise: Sequence[Errors] = (),
    kind: Callable[[str], str] = probes.part,
) -> list[Point]:
    """The two curves: end to end, and each part alone in one run or more.

    `noise` are the reference's own local errors in that dtype; without any it is exact. The band of
    a part is what float64 may be off or, in a working dtype, K times what the reference's own part
    is off on the same input, plus what rounding the float64 result to the dtype costs. A part's
    error is one draw of roundings. So the reference's largest counts, of all the parts of one
    `kind` (the same part in all layers) and all runs; and of the JAX side's runs the smallest, for
    a fault is in every one of them.
    """
    out = []
    for direction, strict in BANDS.items():
        most: dict[str, float] = {}
        for name, e in itertools.chain.from_iterable(draw[direction].items() for draw in noise):
            most[kind(name)] = float(np.max([most.get(kind(name), 0.0), e]))
        for name in getattr(reference, PICK[direction]):
            band = strict
            if noise:
                band = K * most[kind(name)] + rounding(reference, direction, name, dtype)
            out.append(
                Point(
                    name,
                    probes.layer(name),
                    probes.part(name),
                    direction,
                    dtype,
                    accumulated[direction][name],
                    float(np.min([draw[direction][name] for draw in local])),
                    most.get(kind(name), 0.0),
                    band,
                )
            )
    return out


def heat(got: Trace, reference: Trace, layers: int) -> list[list[float]]:
    """The relative error of each layer's output by position: the worst of the rows."""
    out = []
    for i in range(layers):
        x, want = (t.values[f"layers.{i}.out"].astype(np.float64) for t in (got, reference))
        gap, size = np.linalg.norm(x - want, axis=-1), np.linalg.norm(want, axis=-1)
        out.append([float(e) for e in (gap / np.maximum(size, 1e-300)).max(axis=0)])
    return out
