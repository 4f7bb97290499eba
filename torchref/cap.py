"""Soft caps: what keeps scores and logits within bounds."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Cap(nn.Module):
    """cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2)."""

    def __init__(self, cap: float):
        super().__init__()
        self.cap = cap

    def forward(self, x: Float[Tensor, ...]) -> Float[Tensor, ...]:
        return torch.tanh(x / self.cap) * self.cap
