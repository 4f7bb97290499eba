"""Positions: how the model learns where a token stands."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from jaxtwin.configs import spec as specs
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
from jaxtwin.torchref.skip import Skip

# ---- added to the embedding ---------------------------------------------------------------------


class LearnedPositions(nn.Module):
    """x + a row of the table for each position."""

    def __init__(self, spec: Learned, model: specs.Model):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.max_len, model.d))

    def forward(
        self, x: Float[Tensor, "b t d"], positions: Int[Tensor, "b t"]
    ) -> Float[Tensor, "b t d"]:
        return x + self.weight[positions]


class SinusoidalPositions(nn.Module):
    """x + sin and cos, in turn, of position * 10000^(-2i/d) (arXiv 1706.03762, section 3.5)."""

    def __init__(self, spec: Sinusoidal, model: specs.Model):
        super().__init__()
        self.frequency = [10_000.0 ** (-i / model.d) for i in range(0, model.d, 2)]

    def forward(
        self, x: Float[Tensor, "b t d"], positions: Int[Tensor, "b t"]
    ) -> Float[Tensor, "b t d"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        frequency = torch.tensor(self.frequency, dtype=wide, device=x.device)
        angle = positions[..., None].to(wide) * frequency
        return x + join_adjacent(angle.sin(), angle.cos()).to(x.dtype)


POSITIONS = {
    Learned: LearnedPositions,
    Sinusoidal: SinusoidalPositions,
    type(None): Skip,
}

# ---- turning queries and keys -------------------------------------------------------------------


def split_adjacent(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 0::2], x[..., 1::2]


def join_adjacent(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack((x, y), dim=-1).flatten(-2)


def split_half(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def join_half(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((x, y), dim=-1)


PAIRS = {"adjacent": (split_adjacent, join_adjacent), "half": (split_half, join_half)}


def unscaled(spec: None, base: float, plain: list[float], length: int) -> list[float]:
    """The frequency of every pair: base^(-2p/h).

    A scaling makes others of them. `length` is that of the text so far: its largest position + 1.
    """
    return plain


def linear(spec: Linear, base: float, plain: list[float], length: int) -> list[float]:
    return [f / spec.factor for f in plain]


def dynamic_ntk(spec: DynamicNTK, base: float, plain: list[float], length: int) -> list[float]:
    width = 2 * len(plain)
    length = max(length, spec.original)
    grown = spec.factor * length / spec.original - (spec.factor - 1)
    base = base * grown ** (width / (width - 2))
    return [base ** (-i / width) for i in range(0, width, 2)]


def yarn(spec: Yarn, base: float, plain: list[float], length: int) -> list[float]:
    pairs = len(plain)

    def pair(turns: float) -> float:
        """The pair, as a fraction, that turns so often in the original length."""
        return pairs * math.log(spec.original / (turns * 2 * math.pi)) / math.log(base)

    low, high = pair(spec.fast), pair(spec.slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high += 0.001 if low == high else 0
    slow = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(pairs)]
    return [f / spec.factor * s + f * (1 - s) for f, s in zip(plain, slow, strict=True)]


def llama3(spec: Llama3, base: float, plain: list[float], length: int) -> list[float]:
    def one(f: float) -> float:
        turns = spec.original * f / (2 * math.pi)  # in the original length
        if turns < spec.low:
            return f / spec.factor
        if turns > spec.high:
            return f
        kept = (turns - spec.low) / (spec.high - spec.low)
        return (1 - kept) * f / spec.factor + kept * f

    return [one(f) for f in plain]


def longrope(spec: LongRope, base: float, plain: list[float], length: int) -> list[float]:
    factors = spec.long if length > spec.original else spec.short
    return [f / factor for f, factor in zip(plain, factors, strict=True)]


SCALINGS: dict[type, Callable[[Any, float, list[float], int], list[float]]] = {
    Linear: linear,
    DynamicNTK: dynamic_ntk,
    Yarn: yarn,
    Llama3: llama3,
    LongRope: longrope,
    type(None): unscaled,
}


class Rotary(nn.Module):
    """Turns each coordinate pair p by position * base^(-2p/h) (arXiv 2104.09864, eq. 15).

    Frequencies and angles stay in float32 (float64 for float64 input) and only cos and sin are
    cast: a bfloat16 position is already wrong at 257.
    """

    def __init__(self, spec: Rope, width: int):
        super().__init__()
        self.width = spec.width or width
        self.split, self.join = PAIRS[spec.pairs]
        plain = [spec.base ** (-i / self.width) for i in range(0, self.width, 2)]
        scale = SCALINGS[type(spec.scaling)]
        self.frequency = functools.partial(scale, spec.scaling, spec.base, plain)
        self.magnitude = getattr(spec.scaling, "magnitude", 1.0)

    def forward(
        self, x: Float[Tensor, "b t n h"], positions: Int[Tensor, "b t"]
    ) -> Float[Tensor, "b t n h"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        length = int(positions.max()) + 1
        frequency = torch.tensor(self.frequency(length), dtype=wide, device=x.device)
        angle = positions[..., None].to(wide) * frequency
        cos = (angle.cos() * self.magnitude).to(x.dtype)[:, :, None, :]
        sin = (angle.sin() * self.magnitude).to(x.dtype)[:, :, None, :]
        first, second = self.split(x[..., : self.width])
        turned = self.join(first * cos - second * sin, first * sin + second * cos)
        return torch.cat((turned, x[..., self.width :]), dim=-1)


ROTARIES = {Rope: Rotary, type(None): Skip}

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


class AlibiBias(nn.Module):
    """scores - slope * distance (arXiv 2108.12409)."""

    def __init__(self, spec: Alibi, heads: int):
        super().__init__()
        self.slopes = slopes(heads)

    def forward(
        self,
        scores: Float[Tensor, "b n t s"],
        positions: Int[Tensor, "b t"],
        keys: Int[Tensor, "b s"],
    ) -> Float[Tensor, "b n t s"]:
        slope = torch.tensor(self.slopes, dtype=scores.dtype, device=scores.device)
        distance = (positions[:, None, :, None] - keys[:, None, None, :]).to(scores.dtype)
        return scores - slope[:, None, None] * distance


class BucketBias(nn.Module):
    """scores + a learned number for each head and bucket of distances (arXiv 1910.10683)."""

    def __init__(self, spec: T5Bias, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.buckets, heads))
        self.bucket = buckets(spec)

    def forward(
        self,
        scores: Float[Tensor, "b n t s"],
        positions: Int[Tensor, "b t"],
        keys: Int[Tensor, "b s"],
    ) -> Float[Tensor, "b n t s"]:
        bucket = torch.tensor(self.bucket, device=scores.device)
        distance = (positions[:, :, None] - keys[:, None, :]).clamp(0, len(self.bucket) - 1)
        return scores + self.weight[bucket[distance]].permute(0, 3, 1, 2).to(scores.dtype)


RELATIVES = {Alibi: AlibiBias, T5Bias: BucketBias, type(None): Skip}
