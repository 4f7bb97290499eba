"""Positions: how attention learns where a token stands."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from configs.spec import Rope


def split_adjacent(x: Array) -> tuple[Array, Array]:
    return x[..., 0::2], x[..., 1::2]


def join_adjacent(x: Array, y: Array) -> Array:
    return jnp.stack((x, y), axis=-1).reshape(*x.shape[:-1], -1)


def split_half(x: Array) -> tuple[Array, Array]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def join_half(x: Array, y: Array) -> Array:
    return jnp.concatenate((x, y), axis=-1)


PAIRS = {"adjacent": (split_adjacent, join_adjacent), "half": (split_half, join_half)}


class Rotary(nnx.Module):
    """Turns each coordinate pair p by position * base^(-2p/h) (arXiv 2104.09864, eq. 15).

    Frequencies and angles stay in float32 (float64 for float64 input) and only cos and sin are
    cast: a bfloat16 position is already wrong at 257.
    """

    def __init__(self, spec: Rope, width: int):
        self.split, self.join = PAIRS[spec.pairs]
        self.frequency = tuple(float(spec.base) ** (-np.arange(0, width, 2) / width))

    def __call__(
        self, x: Float[Array, "b t n h"], positions: Int[Array, "b t"]
    ) -> Float[Array, "b t n h"]:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        angle = positions[..., None].astype(wide) * jnp.array(self.frequency, wide)
        cos = jnp.cos(angle).astype(x.dtype)[:, :, None, :]
        sin = jnp.sin(angle).astype(x.dtype)[:, :, None, :]
        first, second = self.split(x)
        return self.join(first * cos - second * sin, first * sin + second * cos)


class NoPosition(nnx.Module):
    """A layer without positions (NoPE)."""

    def __init__(self, spec: None, width: int):
        pass

    def __call__(
        self, x: Float[Array, "b t n h"], positions: Int[Array, "b t"]
    ) -> Float[Array, "b t n h"]:
        return x


POSITIONS = {Rope: Rotary, type(None): NoPosition}
