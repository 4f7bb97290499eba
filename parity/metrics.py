"""Numbers that cannot hide a fault. Everything is computed in float64 on the host."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def relative_l2(got: Array, want: Array) -> float:
    """|got - want| / |want|. 0 when both are all zero, inf when only `want` is, NaN if any is."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: {got.shape} and {want.shape}")
    gap, size = np.linalg.norm(got - want), np.linalg.norm(want)
    if size == 0:
        return 0.0 if gap == 0 else float("nan" if np.isnan(gap) else "inf")
    return float(gap / size)


def worst_row(got: Array, want: Array) -> float:
    """The largest relative L2 error of one row (the last axis): one bad token does not average."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    gap = np.linalg.norm(got - want, axis=-1)
    size = np.linalg.norm(want, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        rows = np.where((gap == 0) & (size == 0), 0.0, gap / size)
    return float(rows.max())  # NumPy's max keeps a NaN


def worst_kl(got: Array, want: Array) -> float:
    """The largest KL(want || got) of one position, in nats, summed over the vocabulary.

    Never divided by the vocabulary: that makes a model with scrambled heads look 1e-5 off.
    """
    p, q = log_softmax(want), log_softmax(got)
    # p - q - (1 - e^(q-p)) is the same sum, but of terms that are all >= 0: nothing cancels.
    gap = q - p
    return float((np.exp(p) * (np.expm1(gap) - gap)).sum(axis=-1).max())


def best_fit(got: Array, want: Array) -> tuple[float, float]:
    """The scale c that brings c * want nearest to `got`, and the relative L2 that is left."""
    got, want = (np.asarray(x, np.float64).ravel() for x in (got, want))
    size = float(want @ want)
    scale = float(got @ want) / size if size else 0.0
    return scale, relative_l2(got, scale * want)


def log_softmax(logits: Array) -> Array:
    x = np.asarray(logits, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def rounded(x: Array, dtype: np.dtype) -> Array:
    """x as it is after one rounding to the dtype, back in float64."""
    return np.asarray(x).astype(dtype).astype(np.float64)
