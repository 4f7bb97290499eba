"""Biases: one value for each output."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Bias(nn.Module):
    """x + bias, over the last axis."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Float[Tensor, ...]) -> Float[Tensor, ...]:
        return x + self.weight.to(x.dtype)
