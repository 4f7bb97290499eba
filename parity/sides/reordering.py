"""The same model with its axes in another order: the same function, other roundings.

Floating-point sums depend on their order. Reordering the model width d and the hidden width f, in
every tensor alike, changes nothing but that order, so it draws a framework's rounding error anew.
One draw alone says little about a trained model: where a few huge activations carry most of the
error, two draws of the same framework were seen to differ by five times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.parity.sides.outcome import Trace
from jaxtwin.parity.table import axis_ops, decoder_table
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, Tensors, moves

REORDERED = ("d", "f")  # the axes that only sums run over; heads and their width have an order


class Reordering:
    """An order of d and f, drawn from a seed; seed 0 leaves everything as it is."""

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
