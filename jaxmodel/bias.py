"""Biases: one value for each output."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtwin.jaxmodel.axes import Maker, gathered


class Bias(nnx.Module):
    """x + bias, over the last axes, which `letters` names."""

    def __init__(self, make: Maker, letters: str):
        self.weight = make.full(letters, 0.0)

    def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
        # Added wide and cast: the same bits forward, but the gradient is then summed over all
        # tokens in float32, as torch's is. XLA would round the sum to bfloat16 after each.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        bias = gathered(self.weight).astype(x.dtype).astype(wide)
        return (x.astype(wide) + bias).astype(x.dtype)
