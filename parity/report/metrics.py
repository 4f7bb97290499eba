"""Numbers that cannot hide a fault. Everything is computed in float64 on the host.

A NaN, and an Inf that makes one, comes out as NaN: no measure skips it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

Array = np.ndarray
At = tuple[int, ...]  # the coordinate of one element, or of one position


# ---- relative L2 --------------------------------------------------------------------------------


def relative_l2(got: Array, want: Array) -> float:
    """|got - want| / |want|. 0 when both are all zero, inf when only `want` is, NaN if any is.

    ValueError on shapes that differ and on complex values, of which float64 would keep a half.
    """
    if np.iscomplexobj(got) or np.iscomplexobj(want):
        raise ValueError("complex values are not compared")
    size = norm(np.asarray(want))
    if 1e-140 < size < 1e140:
        return distance(got, want) / size
    got, want = _pair(got, want)
    return float(_relative(got, want, tuple(range(want.ndim))))


def distance(got: Array, want: Array) -> float:
    """|got - want|, in float64. ValueError on shapes that differ."""
    with np.errstate(all="ignore"):
        return float(np.linalg.norm([np.linalg.norm(a - b) for a, b in _pieces(got, want)]))


def norm(x: Array) -> float:
    """|x|, in float64."""
    with np.errstate(all="ignore"):
        return float(np.linalg.norm([np.linalg.norm(a) for a, _ in _pieces(x, x)]))


def relative_l2_along(got: Array, want: Array, axis: int) -> Array:
    """The relative L2 of every slice along that axis, each over all the other axes: (axis,).

    A slice that is all zero on both sides has 0, one that is so in `want` alone has inf.
    """
    got, want = _pair(got, want)
    axis = range(want.ndim)[axis]
    return _relative(got, want, tuple(i for i in range(want.ndim) if i != axis))


def worst_row(got: Array, want: Array) -> float:
    """The largest relative L2 error of one row (the last axis): one bad token does not average.

    Inf where the shapes differ.
    """
    if np.shape(got) != np.shape(want):
        return float("inf")
    return _worst(_relative(*piece, (-1,)).max() for piece in _rows(got, want))


def sorted_l2(got: Array, want: Array, axis: int | None = None) -> float:
    """The relative L2 of the sorted values; with an axis, of those sorted along it.

    Where it is far below the elementwise error, the values are right and stand in wrong places.
    """
    got, want = _pair(got, want)
    if axis is None:
        got, want = got.ravel(), want.ravel()
        axis = 0
    return relative_l2(np.sort(got, axis), np.sort(want, axis))


def best_fit(got: Array, want: Array) -> tuple[float, float]:
    """The scale c that brings c * want nearest to `got`, and the relative L2 that is left."""
    got, want = (np.asarray(x, np.float64).ravel() for x in (got, want))
    size = float(want @ want)
    scale = float(got @ want) / size if size else 0.0
    with np.errstate(invalid="ignore"):
        return scale, relative_l2(got, scale * want)


def _relative(got: Array, want: Array, axes: tuple[int, ...]) -> Array:
    """Relative L2 over those axes, in units in which no square vanishes or overflows."""
    with np.errstate(all="ignore"):
        size, other = (np.abs(x).max(axis=axes, keepdims=True, initial=0) for x in (want, got))
        unit = _binade(np.where(size == 0, other, size))
        got, want = got / unit, want / unit
        gap, size = (np.sqrt(np.square(x).sum(axis=axes)) for x in (got - want, want))
        return np.where((gap == 0) & (size == 0), 0.0, gap / size)


def _binade(x: Array) -> Array:
    """The power of two at or below x: to divide by it is exact. 1 for zero, NaN and Inf."""
    plain = np.isfinite(x) & (x > 0)
    return np.where(plain, np.ldexp(1.0, np.frexp(np.where(plain, x, 1.0))[1] - 1), 1.0)


# ---- single elements ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Largest:
    """The element with the largest absolute error, and both values there."""

    error: float
    at: At
    got: float
    want: float


def largest(got: Array, want: Array) -> Largest:
    """The first NaN, where there is one."""
    got, want = _pair(got, want)
    with np.errstate(all="ignore"):
        error = np.abs(got - want)
    at = first(error)
    return Largest(float(error[at]), at, float(got[at]), float(want[at]))


def ulp(got: Array, want: Array, dtype: np.dtype) -> tuple[float, At]:
    """The largest error in units in the last place of the dtype, and its coordinate.

    The unit at an element is the dtype's spacing at |want| or at the RMS of `want`'s finite values,
    whichever is larger. An element that is near zero by cancellation keeps the rounding errors of
    the large terms that it came from; in units of its own it would be billions off. What is wrong
    in small elements alone shows in the relative L2 of their slice.
    """
    got, want = _pair(got, want)
    info = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        size = np.abs(want)
        floor = _rms(want[np.isfinite(want)])
        normal = np.maximum(np.maximum(size, floor), 2.0 ** int(info.minexp))
        spacing = np.ldexp(1.0, np.frexp(normal)[1] - 1 - int(info.nmant))
        units = np.abs(got - want) / spacing
    at = first(units)
    return float(units[at]), at


@dataclass(frozen=True)
class NonFinite:
    """Counts of elements that are NaN or Inf, and the first on which the two sides disagree."""

    got: int  # in `got` alone
    want: int  # in `want` alone
    unlike: int  # in both, but not the same: NaN against Inf, Inf against -Inf
    alike: int  # in both, and the same
    at: At | None

    @property
    def agrees(self) -> bool:
        return self.got == self.want == self.unlike == 0


def nonfinite(got: Array, want: Array) -> NonFinite:
    """Where the two are not finite."""
    got, want = _pair(got, want)
    bad_got, bad_want = ~np.isfinite(got), ~np.isfinite(want)
    both = bad_got & bad_want
    same = both & ((got == want) | (np.isnan(got) & np.isnan(want)))
    odd = (bad_got | bad_want) & ~same
    return NonFinite(
        got=int((bad_got & ~bad_want).sum()),
        want=int((bad_want & ~bad_got).sum()),
        unlike=int((both & ~same).sum()),
        alike=int(same.sum()),
        at=first(odd) if odd.any() else None,
    )


def bias(got: Array, want: Array) -> tuple[float, float]:
    """z values of the mean error: signed, and counted away from zero (e * sign(want)).

    z = mean(e) / rms(e) * sqrt(n), for n elements. Errors that round to nearest have no preferred
    sign: then z is about as large as a standard normal value, whatever n. An error that is the same
    everywhere has |z| = sqrt(n), and a single wrong element has 1. The first tells an added
    constant, and rounding up or down. Truncation goes toward zero: on values of both signs the
    first cancels, and the second is far below 0. Both are 0 where there is no error.
    """
    got, want = _pair(got, want)
    with np.errstate(all="ignore"):
        error = got - want
        error = error / _binade(np.abs(error).max(initial=0))
        size = np.sqrt(np.square(error).sum())
        if size == 0:
            return 0.0, 0.0
        return float(error.sum() / size), float((error * np.sign(want)).sum() / size)


# ---- logits -------------------------------------------------------------------------------------


def kl(got: Array, want: Array) -> Array:
    """KL(want || got) of every position, (... v) -> (...), in nats, summed over the vocabulary.

    Never divided by the vocabulary: that makes a model with scrambled heads look 1e-5 off. A token
    at -Inf on both sides adds nothing; one at -Inf in `got` alone makes it inf.
    """
    p, q = (log_softmax(x) for x in _pair(want, got))
    with np.errstate(all="ignore"):
        # p - q - (1 - e^(q-p)) is the same sum, but of terms that are all >= 0: nothing cancels.
        gap = q - p
        near = np.exp(p) * (np.expm1(gap) - gap)
        far = np.exp(q) - np.exp(p) * (1 + gap)  # where e^gap may be beyond float64
        terms = np.where(gap > 1, far, near)
        return np.where(np.isneginf(p), np.exp(q), terms).sum(axis=-1)


def worst_kl(got: Array, want: Array) -> float:
    """The largest `kl` of one position, in nats."""
    return _worst(kl(*piece).max() for piece in _rows(got, want))


@dataclass(frozen=True)
class Flips:
    """Positions with another top token, and the one that `want` decides most clearly.

    `margin` is `want`'s logit of its own top token over that of `got`'s there. A tiny one is a near
    tie that rounding turns; a large one is a fault. NaN where a flipped position holds a NaN.
    """

    count: int
    positions: int
    margin: float
    at: At | None


def flips(got: Array, want: Array) -> Flips:
    """Top-1 flips of logits (... v). A position with a NaN on either side counts as one."""
    margin = np.concatenate([_margins(*piece) for piece in _rows(got, want)])
    margin = margin.reshape(np.shape(want)[:-1])
    count = int((margin != -1).sum())  # NaN too
    if not count:
        return Flips(0, margin.size, 0.0, None)
    at = first(margin)
    return Flips(count, margin.size, float(margin[at]), at)


def _margins(got: Array, want: Array) -> Array:
    """By row: how far `want` has its own top token over that of `got`; -1 where they are one."""
    ours, theirs = (x.argmax(axis=-1)[..., None] for x in (got, want))
    broken = np.isnan(got).any(axis=-1) | np.isnan(want).any(axis=-1)
    with np.errstate(all="ignore"):
        top, other = (np.take_along_axis(want, i, axis=-1)[..., 0] for i in (theirs, ours))
        return np.where(broken, np.nan, np.where((ours != theirs)[..., 0], top - other, -1.0))


def log_softmax(logits: Array) -> Array:
    x = np.asarray(logits, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        x = x - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


# ---- shared -------------------------------------------------------------------------------------


def rounded(x: Array, dtype: np.dtype) -> Array:
    """x as it is after one rounding to the dtype, back in float64."""
    return np.asarray(x).astype(dtype).astype(np.float64)


PIECE = 2**22  # elements at once: float64 copies of everything would be larger than a model


def _pieces(got: Array, want: Array) -> Iterator[tuple[Array, Array]]:
    """Both in float64, some entries of the first axis at a time. ValueError on unlike shapes."""
    got, want = np.atleast_1d(got), np.atleast_1d(want)
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: {got.shape} and {want.shape}")
    at_once = max(1, PIECE * len(want) // max(want.size, 1))
    for i in range(0, len(want), at_once):
        yield _pair(got[i : i + at_once], want[i : i + at_once])


def _rows(got: Array, want: Array) -> Iterator[tuple[Array, Array]]:
    """The rows (n v) of both in float64, some at a time. ValueError on unlike shapes."""
    if np.shape(got) != np.shape(want):
        raise ValueError(f"shapes differ: {np.shape(got)} and {np.shape(want)}")
    return _pieces(*(np.reshape(x, (-1, np.shape(x)[-1])) for x in (got, want)))


def _worst(values: Iterable[float]) -> float:
    return float(np.max(list(values)))  # unlike max, NaN whatever its place


def _pair(got: Array, want: Array) -> tuple[Array, Array]:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: {got.shape} and {want.shape}")
    return got, want


def first(x: Array) -> At:
    """The coordinate of the first NaN or else of the largest."""
    return tuple(int(i) for i in np.unravel_index(np.argmax(x), x.shape))


def _rms(x: Array) -> float:
    unit = _binade(np.abs(x).max(initial=0))
    return float(unit * np.sqrt(np.square(x / unit).sum() / max(x.size, 1)))
