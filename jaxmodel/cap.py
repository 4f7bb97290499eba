"""Soft caps: what keeps scores and logits within bounds."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Cap(nnx.Module):
    """cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2)."""

    def __init__(self, cap: float):
        self.cap = cap

    def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
        return jnp.tanh(x / self.cap) * self.cap
