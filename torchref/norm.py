"""Norms over the model width."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from configs import spec as specs
from configs.spec import RMS


class RMSNorm(nn.Module):
    """x / rms(x) * scale (arXiv 1910.07467).

    For float16 and bfloat16 the square, mean and rsqrt run in float32; the result is cast back
    *before* the scale multiplies it, as Llama does. Scaling first gives other bits.
    """

    def __init__(self, spec: RMS, model: specs.Model):
        super().__init__()
        self.eps = spec.eps
        self.weight = nn.Parameter(torch.ones(model.d))

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.square().mean(dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight.to(x.dtype)


class NoNorm(nn.Module):
    """An absent norm."""

    def __init__(self, spec: None, model: specs.Model):
        super().__init__()

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return x


NORMS = {RMS: RMSNorm, type(None): NoNorm}
