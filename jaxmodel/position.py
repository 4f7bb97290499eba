"""Positions: how the model learns where a token stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtwin.configs.spec import (
    Alibi,
    DynamicNTK,
    Learned,
    Linear,
    Llama3,
    LongRope,
    Rope,
    Sinusoidal,
    T5Bias,
    Yarn,
)
from jaxtwin.jaxmodel.axes import Maker, gathered
from jaxtwin.jaxmodel.cache import AttentionContext
from jaxtwin.jaxmodel.probe import probe
from jaxtwin.jaxmodel.skip import Skip

# ---- added to the embedding ---------------------------------------------------------------------


class LearnedPositions(nnx.Module):
    """x + a row of the table for each position."""

    def __init__(self, spec: Learned, make: Maker):
        self.weight = make.matrix("position", "m d")

    def __call__(
        self, x: Float[Array, "b t d"], positions: Int[Array, "b t"]
    ) -> Float[Array, "b t d"]:
        return x + gathered(self.weight)[positions]


class SinusoidalPositions(nnx.Module):
    """x + sin and cos, in turn, of position * 10000^(-2i/d) (arXiv 1706.03762, section 3.5)."""

    def __init__(self, spec: Sinusoidal, make: Maker):
        width = make.sizes["d"]
        self.frequency = tuple(10_000.0 ** (-np.arange(0, width, 2) / width))

    def __call__(
        self, x: Float[Array, "b t d"], positions: Int[Array, "b t"]
    ) -> Float[Array, "b t d"]:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        angle = positions[..., None].astype(wide) * jnp.array(self.frequency, wide)
        return x + join_adjacent(jnp.sin(angle), jnp.cos(angle)).astype(x.dtype)


POSITIONS = {
    Learned: LearnedPositions,
    Sinusoidal: SinusoidalPositions,
    type(None): Skip,
}

# ---- turning queries and keys -------------------------------------------------------------------


def split_adjacent(x: Array) -> tuple[Array, Array]:
    return x[..., 0::2], x[..., 1::2]


def join_adjacent(x: Array, y: Array) -> Array:
    return jnp.stack((x, y), axis=-1).reshape(*x.shape[:-1], -1)


def split_half(x: Array) -> tuple[Array, Array]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def join_half(x: Array, y: Array) -> Array:
    return jnp.concatenate((x, y), axis=-1)


PAIRS = {"adjacent": (split_adjacent, join_adjacent), "half": (split_half, join_half)}


def unscaled(spec: None, base: float, plain: np.ndarray) -> np.ndarray:
    """The frequency of every pair: base^(-2p/h). A scaling makes others of them."""
    return plain


def linear(spec: Linear, base: float, plain: np.ndarray) -> np.ndarray:
    return plain / spec.factor


def dynamic_ntk(spec: DynamicNTK, base: float, plain: np.ndarray) -> np.ndarray:
    """What the frequencies are at the original length."""
    return plain


def yarn(spec: Yarn, base: float, plain: np.ndarray) -> np.ndarray:
    pairs = len(plain)
    # The pairs, as fractions, that turn `fast` and `slow` times in the original length.
    turns = np.array([spec.fast, spec.slow])
    low, high = pairs * np.log(spec.original / (turns * 2 * np.pi)) / np.log(base)
    if spec.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high += 0.001 if low == high else 0
    slow = np.clip((np.arange(pairs) - low) / (high - low), 0, 1)
    return plain / spec.factor * slow + plain * (1 - slow)


def llama3(spec: Llama3, base: float, plain: np.ndarray) -> np.ndarray:
    turns = spec.original * plain / (2 * np.pi)  # in the original length
    kept = np.clip((turns - spec.low) / (spec.high - spec.low), 0, 1)
    return (1 - kept) * plain / spec.factor + kept * plain


def longrope(spec: LongRope, base: float, plain: np.ndarray) -> np.ndarray:
    """What the frequencies are up to the original length."""
    return plain / np.array(spec.short)


SCALINGS: dict[type, Callable[[Any, float, np.ndarray], np.ndarray]] = {
    Linear: linear,
    DynamicNTK: dynamic_ntk,
    Yarn: yarn,
    Llama3: llama3,
    LongRope: longrope,
    type(None): unscaled,
}


class Rotary(nnx.Module):
    """Turns each coordinate pair p by position * base^(-2p/h) (arXiv 2104.09864, eq. 15).

    Frequencies and angles stay in float32 (float64 for float64 input) and only cos and sin are
    cast: a bfloat16 position is already wrong at 257.
    """

    def __init__(self, spec: Rope, width: int):
        self.width = spec.width or width
        self.split, self.join = PAIRS[spec.pairs]
        plain = float(spec.base) ** (-np.arange(0, self.width, 2) / self.width)
        self.frequency = tuple(SCALINGS[type(spec.scaling)](spec.scaling, spec.base, plain))
        self.magnitude = getattr(spec.scaling, "magnitude", 1.0)

    def __call__(
        self, x: Float[Array, "b t n h"], positions: Int[Array, "b t"], length: Int[Array, ""]
    ) -> Float[Array, "b t n h"]:
        # Queries and keys turn alike: the first of the two calls shows the positions of both.
        positions = probe(positions, "attn/positions", repeats=True)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        angle = positions[..., None].astype(wide) * self.frequencies(length, wide)
        cos = (jnp.cos(angle) * self.magnitude).astype(x.dtype)[:, :, None, :]
        sin = (jnp.sin(angle) * self.magnitude).astype(x.dtype)[:, :, None, :]
        first, second = self.split(x[..., : self.width])
        turned = self.join(first * cos - second * sin, first * sin + second * cos)
        return jnp.concatenate((turned, x[..., self.width :]), axis=-1)

    def frequencies(self, length: Int[Array, ""], wide: Any) -> Float[Array, " c"]:
        """One for each pair; `length` is that of the text so far: its largest position + 1."""
        return jnp.array(self.frequency, wide)


class DynamicRotary(Rotary):
    """The base grows with the length (configs.DynamicNTK)."""

    def __init__(self, spec: Rope, width: int):
        super().__init__(spec, width)
        scaling: Any = spec.scaling
        self.factor, self.original = scaling.factor, scaling.original

    def frequencies(self, length: Int[Array, ""], wide: Any) -> Float[Array, " c"]:
        beyond = jnp.maximum(length - self.original, 0).astype(wide)
        grown = jnp.log1p(beyond * self.factor / self.original)
        pairs = np.arange(0, self.width, 2) / (self.width - 2)
        return jnp.array(self.frequency, wide) * jnp.exp(-jnp.array(pairs, wide) * grown)


class LongRotary(Rotary):
    """One list of divisors for short texts and another for long ones (configs.LongRope)."""

    def __init__(self, spec: Rope, width: int):
        super().__init__(spec, width)
        scaling: Any = spec.scaling
        self.original = scaling.original
        short, long = np.array(scaling.short), np.array(scaling.long)
        self.late = tuple(np.array(self.frequency) * short / long)

    def frequencies(self, length: Int[Array, ""], wide: Any) -> Float[Array, " c"]:
        early, late = jnp.array(self.frequency, wide), jnp.array(self.late, wide)
        return jnp.where(length > self.original, late, early)


# Those whose frequencies depend on how long the text is. A key's angle, and so all that follows
# from it, is then another as the text grows, and nothing can be kept in a cache.
GROWING = {DynamicNTK: DynamicRotary, LongRope: LongRotary}


def max_cacheable_len(ropes: Iterable[Rope | None]) -> int:
    """The length up to which no frequency depends on the length."""
    scalings: list[Any] = [rope.scaling for rope in ropes if rope is not None]
    return min((x.original for x in scalings if type(x) in GROWING), default=2**31)


def rotary(spec: Rope, width: int) -> Rotary:
    return GROWING.get(type(spec.scaling), Rotary)(spec, width)


ROTARIES: dict[type, Callable[..., Any]] = {Rope: rotary, type(None): Skip}

# ---- added to the scores ------------------------------------------------------------------------


def slopes(heads: int) -> list[float]:
    """ALiBi's slope of each head (arXiv 2108.12409, section 3, and its authors' code).

    2^(-8/n), 2^(-16/n), ... for a power of two; else those of the power of two below, and every
    other one of the power above.
    """
    below = 2 ** math.floor(math.log2(heads))
    out = [2.0 ** (-8 * i / below) for i in range(1, below + 1)]
    out += [2.0 ** (-4 * i / below) for i in range(1, 2 * (heads - below), 2)]
    return out


def buckets(spec: T5Bias) -> list[int]:
    """The bucket of each distance from 0 to the longest, whose bucket all beyond share.

    Past the first half, bucket number half + k begins at half * (longest / half)^(k / rest). In
    whole numbers, because a logarithm's rounding would put some distances one bucket too low.
    """
    half = spec.buckets // 2
    rest = spec.buckets - half

    def grown(n: int) -> int:
        return sum(n**rest * half**k >= half**rest * spec.longest**k for k in range(1, rest))

    return [n if n < half else half + grown(n) for n in range(spec.longest + 1)]


class AlibiBias(nnx.Module):
    """scores - slope * distance (arXiv 2108.12409)."""

    def __init__(self, spec: Alibi, make: Maker, heads: int):
        self.slopes = tuple(slopes(heads))

    def __call__(
        self, scores: Float[Array, "b k g t s"], context: AttentionContext
    ) -> Float[Array, "b k g t s"]:
        slope = jnp.array(self.slopes, scores.dtype).reshape(*scores.shape[1:3], 1, 1)
        distance = context.positions[:, :, None] - context.key_positions[:, None, :]
        return scores - slope * distance[:, None, None].astype(scores.dtype)


class BucketBias(nnx.Module):
    """scores + a learned number for each head and bucket of distances (arXiv 1910.10683)."""

    def __init__(self, spec: T5Bias, make: Maker, heads: int):
        self.weight = make.child("relative", r=spec.buckets).matrix("weight", "r n")
        self.bucket = tuple(buckets(spec))

    def __call__(
        self, scores: Float[Array, "b k g t s"], context: AttentionContext
    ) -> Float[Array, "b k g t s"]:
        distance = context.positions[:, :, None] - context.key_positions[:, None, :]
        bucket = jnp.array(self.bucket)[jnp.clip(distance, 0, len(self.bucket) - 1)]
        bias = jnp.moveaxis(gathered(self.weight)[bucket], -1, 1)
        return scores + bias.reshape(-1, *scores.shape[1:]).astype(scores.dtype)


RELATIVES = {Alibi: AlibiBias, T5Bias: BucketBias, type(None): Skip}
