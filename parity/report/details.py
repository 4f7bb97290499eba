"""All that the metrics say of one tensor, as plain data, and what can be read from it."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.metrics import Array, At

LOGITS = "b t v"
# What a detail is of, and the name that people read.
TENSORS = {
    "value": "{place}",
    "cotangent": "cotangent {place}",
    "gradient": "grad {place}",
    "logits": "logits",
    "output": "output",
}
# What one index of an axis is called.
WORDS = {
    "b": "sequence", "t": "token", "s": "key token", "d": "channel", "n": "head",
    "k": "key/value head", "h": "head channel", "f": "hidden channel", "e": "expert",
    "v": "vocabulary entry", "l": "layer", "m": "position", "r": "bucket of distances",
}  # fmt: skip
FAR = 100.0  # how many times smaller an explanation must make the error
# What sorted values may be off and still be the same: those of a wrong but random tensor come as
# near as 1e-3 when there are enough of them.
SAME = 1e-5
LEANING = 0.5  # |mean| / rms of errors that have a direction: z / sqrt(n)
SMALL = 0.1  # relative L2. Whatever is put in the place of a value, its error leans away from it.
SURE = 8.0  # and their z: by chance about once in 1e15

Where = dict[str, int]  # axis -> index


@dataclass(frozen=True)
class Worst:
    """The slice along one axis with the largest relative L2, and the largest of all others."""

    index: int
    relative_l2: float
    others: float  # 0 where there is one slice alone


@dataclass(frozen=True)
class Ulp:
    """The largest error in units in the last place (see `metrics.ulp`)."""

    max: float
    at: Where


@dataclass(frozen=True)
class Bias:
    """z values of the mean error (see `metrics.bias`)."""

    signed: float
    outward: float  # away from zero


@dataclass(frozen=True)
class NonFinite:
    """Counts of NaN and Inf (see `metrics.NonFinite`), and the first that one side has alone."""

    got: int
    want: int
    unlike: int
    alike: int
    at: Where | None


@dataclass(frozen=True)
class Largest:
    """The largest absolute error, and both values there."""

    error: float
    at: Where
    got: float
    want: float


@dataclass(frozen=True)
class Logits:
    """What a difference in logits does to the prediction."""

    kl: float  # the worst position's, in nats
    kl_at: Where
    flips: int  # positions with another top token
    positions: int
    margin: float  # the clearest flip's, in logits (see `metrics.Flips`)
    margin_at: Where | None


@dataclass(frozen=True)
class Detail:
    """One tensor: `got` against `want`, the reference."""

    kind: str  # one of TENSORS
    place: str  # a probe or a parameter, by torchref's name; "" for "logits" and "output"
    axes: str
    shape: tuple[int, ...]
    dtype: str
    relative_l2: float
    worst: dict[str, Worst]  # by axis
    scale: float  # c of the c * want nearest to `got`
    residual: float  # and the relative L2 that it leaves
    ulp: Ulp
    bias: Bias
    nonfinite: NonFinite
    sorted_l2: float  # of the sorted values
    reordered: tuple[str, ...]  # axes along each of which sorting alone brings the two together
    largest: Largest
    logits: Logits | None  # for axes "b t v"
    local: bool = False  # of a part fed the reference's own input, and not from end to end

    @property
    def name(self) -> str:
        """What people read: "layers.3.attn.q", "cotangent layers.3.attn.q", "logits"."""
        return TENSORS[self.kind].format(place=self.place)


def detail(
    kind: str, place: str, got: Array, want: Array, axes: str, dtype: str, local: bool = False
) -> Detail:
    """Everything about one tensor. `dtype` is the one that was computed in: its ULP is the unit.

    `axes` are names, one for each axis and none twice: "b t n h" (letters of configs.LEGEND are put
    into words). A merged axis is split first (ops.rearrange). ValueError: shapes that differ or do
    not fit the axes, and tensors without elements.
    """
    name = TENSORS[kind].format(place=place)
    letters = tuple(axes.split())
    shape = tuple(np.shape(want))
    if np.shape(got) != shape:
        raise ValueError(f"{name}: shapes differ: {np.shape(got)} and {shape}")
    if len(letters) != len(shape) or len(set(letters)) != len(letters) or "(" in axes:
        raise ValueError(f"{name}: {axes!r} does not name the axes of {shape}, each once")
    if 0 in shape:
        raise ValueError(f"{name}: shape {shape} has no elements to compare")
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)

    def where(at: At) -> Where:
        return dict(zip(letters, at, strict=True))

    error = metrics.relative_l2(got, want)
    ordered = metrics.sorted_l2(got, want)
    along = enumerate(letters) if _same(ordered, error, dtype) else ()
    off = metrics.nonfinite(got, want)
    most = metrics.largest(got, want)
    ulp, ulp_at = metrics.ulp(got, want, np.dtype(dtype))
    return Detail(
        kind=kind,
        place=place,
        axes=axes,
        shape=shape,
        dtype=dtype,
        relative_l2=error,
        worst={letter: _worst(got, want, axis) for axis, letter in enumerate(letters)},
        **dict(zip(("scale", "residual"), metrics.best_fit(got, want), strict=True)),
        ulp=Ulp(ulp, where(ulp_at)),
        bias=Bias(*metrics.bias(got, want)),
        nonfinite=NonFinite(
            off.got, off.want, off.unlike, off.alike, None if off.at is None else where(off.at)
        ),
        sorted_l2=ordered,
        reordered=tuple(
            letter
            for axis, letter in along
            if _same(metrics.sorted_l2(got, want, axis), error, dtype)
        ),
        largest=Largest(most.error, where(most.at), most.got, most.want),
        logits=_logits(got, want) if axes == LOGITS else None,
        local=local,
    )


def _worst(got: Array, want: Array, axis: int) -> Worst:
    slices = metrics.relative_l2_along(got, want, axis)
    index = int(np.argmax(slices))
    others = np.delete(slices, index).max(initial=0.0)
    return Worst(index, float(slices[index]), float(others))


def _logits(got: Array, want: Array) -> Logits:
    kl, flips = metrics.kl(got, want), metrics.flips(got, want)

    def where(at: At) -> Where:
        return dict(zip("bt", at, strict=True))

    margin_at = None if flips.at is None else where(flips.at)
    return Logits(
        float(kl.max()),
        where(metrics.first(kl)),
        flips.count,
        flips.positions,
        flips.margin,
        margin_at,
    )


# ---- in words -----------------------------------------------------------------------------------


def reading(detail: Detail) -> str:
    """What the numbers clearly say, in one short sentence; "" where they do not."""
    for rule in (_nonfinite, _nothing, _order, _scaled, _added, _one_slice, _leaning):
        if sentence := rule(detail):
            return sentence
    return ""


def _nonfinite(detail: Detail) -> str:
    off = detail.nonfinite
    if off.at is None:
        return ""
    count, first = off.got + off.want + off.unlike, _place(off.at)
    if count == off.got:
        return f"{count} not finite where the reference is, the first at {first}"
    if count == off.want:
        return f"{count} finite where the reference is not, the first at {first}"
    return f"{count} do not agree with the reference on NaN and Inf, the first at {first}"


def _nothing(detail: Detail) -> str:
    if detail.relative_l2 > 0 and detail.scale == detail.residual == 0:
        return "all zero where the reference is not"
    if np.isinf(detail.relative_l2) and detail.scale == 0:
        return "not zero where the reference is all zero"
    return ""


def _order(detail: Detail) -> str:
    if not _same(detail.sorted_l2, detail.relative_l2, detail.dtype):
        return ""
    along = f" along {detail.reordered[0]}" if len(detail.reordered) == 1 else ""
    place = _one_slice(detail)
    return f"the same values in another order{along}" + (place and f", {place}")


def _scaled(detail: Detail) -> str:
    if not _explained(detail.residual, detail.relative_l2, detail.dtype):
        return ""
    return f"the values times {detail.scale:.6g}, to {detail.residual:.0e}"


def _added(detail: Detail) -> str:
    # The errors' spread is under 1 / FAR of their mean.
    if not _over(detail, detail.bias.signed, 1 - 0.5 / FAR**2):
        return ""
    if detail.relative_l2 < _rounding(detail.dtype):
        return ""
    added = detail.largest.got - detail.largest.want
    return f"the values {'plus' if added > 0 else 'minus'} {abs(added):.2g}"


def _one_slice(detail: Detail) -> str:
    sizes = dict(zip(detail.axes.split(), detail.shape, strict=True))
    found = [
        f"{WORDS.get(letter, letter)} {worst.index}"
        for letter, worst in detail.worst.items()
        if sizes[letter] > 1 and _explained(worst.others, worst.relative_l2, detail.dtype)
    ]
    return f"all of it in {', '.join(found)}" if found else ""


def _leaning(detail: Detail) -> str:
    signed, outward = detail.bias.signed, detail.bias.outward
    if not detail.relative_l2 < SMALL:
        return ""
    if _over(detail, outward, LEANING) and abs(outward) >= abs(signed):
        if outward > 0:
            return f"the errors lean away from zero (z = {outward:.0f})"
        like = ", as those of truncation do" if detail.ulp.max <= 1 else ""
        return f"the errors lean toward zero (z = {outward:.0f}){like}"
    if _over(detail, signed, LEANING):
        return f"the errors lean {'up' if signed > 0 else 'down'} (z = {signed:.0f})"
    return ""


def _over(detail: Detail, z: float, share: float) -> bool:
    """Whether the errors lean by that much: z is `share` of the most that it could be."""
    return bool(abs(z) >= max(SURE, share * np.sqrt(np.prod(detail.shape, dtype=float))))


def _explained(rest: float, error: float, dtype: str) -> bool:
    """Whether an error beyond rounding comes down to rounding, and to FAR less than it was."""
    return rest <= _rounding(dtype) <= error and error >= FAR * rest


def _same(ordered: float, error: float, dtype: str) -> bool:
    return ordered <= SAME and _explained(ordered, error, dtype)


def _rounding(dtype: str) -> float:
    """Relative L2 that a whole model's rounding stays below, roughly: only to choose words by."""
    return max(1e-12, min(64 * float(ml_dtypes.finfo(np.dtype(dtype)).eps), 1e-2))


def _place(at: Where) -> str:
    return ", ".join(f"{letter} {index}" for letter, index in at.items())
