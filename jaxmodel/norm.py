"""Norms over the last axes: the model width, or that of a head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtwin.configs import own_parts
from jaxtwin.configs import spec as specs
from jaxtwin.configs.spec import LN, RMS
from jaxtwin.jaxmodel.axes import Maker, gathered
from jaxtwin.jaxmodel.bias import Bias
from jaxtwin.jaxmodel.skip import Skip


def unit_offset(w: Array) -> Array:
    """The scale of a norm that stores it less one."""
    return 1 + w


def as_stored(w: Array) -> Array:
    return w


def over(letters: str) -> tuple[int, ...]:
    """The last axes, as many as there are letters."""
    return tuple(range(-len(letters.split()), 0))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale (arXiv 1910.07467).

    For float16 and bfloat16 the square, mean and rsqrt run in float32. With cast "before" the
    result is cast back before the scale multiplies it, as Llama does; "after" the scale too is
    applied in float32, as Gemma does. The one gives other bits than the other.
    """

    def __init__(self, spec: RMS, make: Maker, letters: str = "d"):
        self.eps = spec.eps
        self.weight = make.full(letters, 0.0 if spec.offset else 1.0)
        self.axes = over(letters)
        self.scale = unit_offset if spec.offset else as_stored
        self.cast_before_scale = spec.cast == "before"

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        kept = x.dtype if self.cast_before_scale else wide.dtype
        mean = jnp.mean(jnp.square(wide), axis=self.axes, keepdims=True)
        unit = (wide * jax.lax.rsqrt(mean + self.eps)).astype(kept)
        scale = self.scale(gathered(self.weight).astype(kept))
        # The product is taken wide and cast: the same bits forward, but the scale's gradient is
        # then summed over all tokens in float32. XLA would sum it in bfloat16, three times as far
        # off as torch.
        return (unit.astype(wide.dtype) * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / std * scale + bias (arXiv 1607.06450), in float32 at least, cast at the end."""

    def __init__(self, spec: LN, make: Maker, letters: str = "d"):
        self.eps = spec.eps
        self.weight = make.full(letters, 1.0)
        self.bias = Bias(make, letters) if spec.bias else Skip()
        self.axes = over(letters)

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - jnp.mean(wide, axis=self.axes, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=self.axes, keepdims=True)
        unit = centred * jax.lax.rsqrt(variance + self.eps)
        return self.bias(unit * gathered(self.weight).astype(wide.dtype)).astype(x.dtype)


class OwnNorm(nnx.Module):
    """A norm that a person registered (configs/own_parts.py)."""

    def __init__(self, spec: specs.OwnNorm, make: Maker, letters: str = "d"):
        self.eps = spec.eps
        self.weight = make.full(letters, 1.0)
        self.bias = Bias(make, letters) if spec.bias else Skip()
        self.axes = over(letters)
        self.function = own_parts.NORMS[spec.name].jax

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        # The function sees one row at a time, with a weight for each: XLA would sum the weight's
        # gradient over all rows in x's dtype, and here that is done in float32, as torch has it.
        weight = gathered(self.weight).reshape(-1).astype(x.dtype)
        rows = x.reshape(-1, weight.size)
        wide = weight.astype(jnp.promote_types(x.dtype, jnp.float32))
        each = jnp.broadcast_to(wide, rows.shape).astype(x.dtype)
        out = jax.vmap(lambda row, w: self.function(row, w, self.eps))(rows, each)
        return self.bias(out.reshape(x.shape))


NORMS = {RMS: RMSNorm, LN: LayerNorm, specs.OwnNorm: OwnNorm, type(None): Skip}
