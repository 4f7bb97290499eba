"""Norms over the model width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from configs.spec import RMS
from jaxmodel.axes import Maker, used


class RMSNorm(nnx.Module):
    """x / rms(x) * scale (arXiv 1910.07467).

    For float16 and bfloat16 the square, mean and rsqrt run in float32; the result is cast back
    *before* the scale multiplies it, as Llama does. Scaling first gives other bits.
    """

    def __init__(self, spec: RMS, make: Maker):
        self.eps = spec.eps
        self.weight = make.ones("d")

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        unit = (wide * jax.lax.rsqrt(mean + self.eps)).astype(x.dtype)
        # The product is taken wide and cast: the same bits forward, but the scale's gradient is
        # then summed over all tokens in float32. XLA would sum it in bfloat16, three times as far
        # off as torch.
        return (unit.astype(wide.dtype) * used(self.weight).astype(x.dtype)).astype(x.dtype)


class NoNorm(nnx.Module):
    """An absent norm."""

    def __init__(self, spec: None, make: Maker):
        pass

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        return x


NORMS = {RMS: RMSNorm, type(None): NoNorm}
