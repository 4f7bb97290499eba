"""Positions: how attention learns where a token stands."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from configs.spec import Rope


def split_adjacent(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 0::2], x[..., 1::2]


def join_adjacent(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack((x, y), dim=-1).flatten(-2)


def split_half(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def join_half(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((x, y), dim=-1)


PAIRS = {"adjacent": (split_adjacent, join_adjacent), "half": (split_half, join_half)}


class Rotary(nn.Module):
    """Turns each coordinate pair p by position * base^(-2p/h) (arXiv 2104.09864, eq. 15).

    Frequencies and angles stay in float32 (float64 for float64 input) and only cos and sin are
    cast: a bfloat16 position is already wrong at 257.
    """

    def __init__(self, spec: Rope, width: int):
        super().__init__()
        self.split, self.join = PAIRS[spec.pairs]
        self.frequency = [spec.base ** (-i / width) for i in range(0, width, 2)]

    def forward(
        self, x: Float[Tensor, "b t n h"], positions: Int[Tensor, "b t"]
    ) -> Float[Tensor, "b t n h"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        frequency = torch.tensor(self.frequency, dtype=wide, device=x.device)
        angle = positions[..., None].to(wide) * frequency
        cos = angle.cos().to(x.dtype)[:, :, None, :]
        sin = angle.sin().to(x.dtype)[:, :, None, :]
        first, second = self.split(x)
        return self.join(first * cos - second * sin, first * sin + second * cos)


class NoPosition(nn.Module):
    """A layer without positions (NoPE)."""

    def __init__(self, spec: None, width: int):
        super().__init__()

    def forward(
        self, x: Float[Tensor, "b t n h"], positions: Int[Tensor, "b t"]
    ) -> Float[Tensor, "b t n h"]:
        return x


POSITIONS = {Rope: Rotary, type(None): NoPosition}
