"""Norms over the last axis: the model width, or that of a head."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jaxtwin.configs import own_parts
from jaxtwin.configs import spec as specs
from jaxtwin.configs.spec import LN, RMS
from jaxtwin.torchref.bias import Bias
from jaxtwin.torchref.skip import Skip


def unit_offset(w: Tensor) -> Tensor:
    """The scale of a norm that stores it less one."""
    return 1 + w


def as_stored(w: Tensor) -> Tensor:
    return w


class RMSNorm(nn.Module):
    """x / rms(x) * scale (arXiv 1910.07467).

    For float16 and bfloat16 the square, mean and rsqrt run in float32. With cast "before" the
    result is cast back before the scale multiplies it, as Llama does; "after" the scale too is
    applied in float32, as Gemma does. The one gives other bits than the other.
    """

    def __init__(self, spec: RMS, size: int):
        super().__init__()
        self.eps = spec.eps
        self.weight = nn.Parameter(torch.full((size,), 0.0 if spec.offset else 1.0))
        self.scale = unit_offset if spec.offset else as_stored
        self.cast_before_scale = spec.cast == "before"

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        kept = x.dtype if self.cast_before_scale else wide.dtype
        mean = wide.square().mean(dim=-1, keepdim=True)
        unit = (wide * torch.rsqrt(mean + self.eps)).to(kept)
        return (unit * self.scale(self.weight.to(kept))).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / std * scale + bias (arXiv 1607.06450), in float32 at least, cast at the end."""

    def __init__(self, spec: LN, size: int):
        super().__init__()
        self.eps = spec.eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = Bias(size) if spec.bias else Skip()

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        unit = centred * torch.rsqrt(variance + self.eps)
        return self.bias(unit * self.weight.to(wide.dtype)).to(x.dtype)


class OwnNorm(nn.Module):
    """A norm that a person registered (configs/own_parts.py)."""

    def __init__(self, spec: specs.OwnNorm, size: int):
        super().__init__()
        self.eps = spec.eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = Bias(size) if spec.bias else Skip()
        self.function = own_parts.NORMS[spec.name].torch

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return self.bias(self.function(x, self.weight, self.eps))


NORMS = {RMS: RMSNorm, LN: LayerNorm, specs.OwnNorm: OwnNorm, type(None): Skip}
