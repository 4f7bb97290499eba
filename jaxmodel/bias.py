"""Biases: one value for each output."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from jaxtwin.jaxmodel.axes import Maker, gathered


class Bias(nnx.Module):
    """x + bias, over the last axes, which `letters` names."""

    def __init__(self, make: Maker, letters: str):
        self.weight = make.full(letters, 0.0)

    def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
        return x + gathered(self.weight).astype(x.dtype)
