"""Drawing a framework's rounding error anew: one draw alone says little about a trained model.

Floating-point sums depend on their order. Reordering the model width d and the hidden width f, in
every tensor alike, changes nothing but that order: the same function, other roundings. Where a few
huge activations carry most of the error, two draws of one framework were seen to differ by five
times.

A narrow dtype's products are summed in float32 and rounded once, so that another order gives nearly
the same bits. There the weights move to their neighbours in the dtype: a function beside the first,
whose results are measured from a float64 run of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np

from jaxtwin.configs import Model
from jaxtwin.parity.sides.outcome import Trace
from jaxtwin.parity.table import axis_ops, decoder_table
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, Tensors, moves

REORDERED = ("d", "f")  # the axes that only sums run over; heads and their width have an order
NARROW = ("bfloat16", "float16")


def redraw(
    spec: Model, dtype: str, seed: int, probes: Sequence[Row] = ()
) -> Reordering | Neighbours:
    """What draws the roundings of that dtype anew; seed 0 leaves everything as it is."""
    return Neighbours(dtype, seed) if dtype in NARROW else Reordering(spec, seed, probes)


class Reordering:
    """An order of d and f, drawn from a seed; seed 0 leaves everything as it is."""

    same_function = True

    def __init__(self, spec: Model, seed: int, probes: Sequence[Row] = ()):
        self.seed = seed
        self.axes: dict[str, list[np.ndarray | None]] = {}
        for move in [*moves(decoder_table.rows(spec, "unroll")), *moves(probes)]:
            groups = axis_ops.axes(axis_ops.sides(move.pattern)[0])
            order = [self._order(g, move.sizes[g]) if g in REORDERED else None for g in groups]
            self.axes[move.src[0]] = order

    def _order(self, letter: str, size: int) -> np.ndarray:
        return np.random.default_rng((self.seed, ord(letter), size)).permutation(size)

    def apply(self, tensors: Tensors) -> Tensors:
        """The tensors, by torchref's names, in this order (not yet read)."""

        def one(name: str, tensor: Tensor) -> Tensor:
            return Tensor(tensor.shape, tensor.dtype, lambda: self._take(name, tensor.read()))

        if not self.seed:
            return tensors
        return {name: one(name, tensor) for name, tensor in tensors.items()}

    def trace(self, reference: Trace) -> Trace:
        """A run's values, cotangents and gradients in this order (`probes` are its rows)."""
        if not self.seed:
            return reference
        sides = (reference.grads, reference.values, reference.cotangents)
        grads, values, back = ({n: self._take(n, x) for n, x in side.items()} for side in sides)
        return replace(reference, grads=grads, values=values, cotangents=back)

    def undo(self, grads: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Gradients of the reordered tensors, back in the order they came in."""
        if not self.seed:
            return dict(grads)
        return {name: self._take(name, x, back=True) for name, x in grads.items()}

    def _take(self, name: str, x: np.ndarray, back: bool = False) -> np.ndarray:
        for axis, order in enumerate(self.axes[name]):
            if order is not None:
                x = np.take(x, np.argsort(order) if back else order, axis=axis)
        return x


class Neighbours:
    """Every weight at the next number of a narrow dtype, up or down as a seed draws it.

    A zero stays. Seed 0 leaves everything as it is, values that the dtype does not have too.
    """

    def __init__(self, dtype: str, seed: int):
        self.dtype, self.seed = np.dtype(getattr(ml_dtypes, dtype, dtype)), seed
        self.same_function = seed == 0

    def apply(self, tensors: Tensors) -> Tensors:
        """The tensors, moved (not yet read)."""

        def one(name: str, tensor: Tensor) -> Tensor:
            return Tensor(tensor.shape, self.dtype, lambda: self._moved(name, tensor.read()))

        if not self.seed:
            return tensors
        return {name: one(name, tensor) for name, tensor in tensors.items()}

    def trace(self, reference: Trace) -> Trace:
        """A run as it is: nothing stands elsewhere."""
        return reference

    def undo(self, grads: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Gradients as they are."""
        return dict(grads)

    def _moved(self, name: str, x: np.ndarray) -> np.ndarray:
        near = np.ascontiguousarray(x.astype(self.dtype))
        rng = np.random.default_rng((self.seed, zlib.crc32(name.encode())))
        step = rng.integers(0, 2, near.shape, np.int8) * 2 - 1
        # Neighbours of one sign are integers that follow one another; zero has none of its sign.
        moved = (near.view(np.int16) + step).astype(np.int16).view(self.dtype)
        stays = (near == 0) | (moved == 0) | ~np.isfinite(moved)
        return np.where(stays, near, moved)
