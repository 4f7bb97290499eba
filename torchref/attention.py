"""Attention."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from configs import spec as specs
from configs.spec import GQA
from torchref.position import POSITIONS


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245): K/V head j serves query heads j n/k ...

    The plain way: every K/V head is repeated for its query heads. Softmax is at least float32.
    """

    def __init__(self, spec: GQA, model: specs.Model):
        super().__init__()
        self.q = nn.Linear(model.d, spec.heads * spec.width, bias=False)
        self.k = nn.Linear(model.d, spec.kv * spec.width, bias=False)
        self.v = nn.Linear(model.d, spec.kv * spec.width, bias=False)
        self.o = nn.Linear(spec.heads * spec.width, model.d, bias=False)
        self.rotate = POSITIONS[type(spec.rope)](spec.rope, spec.width)
        self.heads, self.kv, self.width = spec.heads, spec.kv, spec.width

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        positions: Int[Tensor, "b t"],
        mask: Bool[Tensor, "b t s"],
    ) -> Float[Tensor, "b t d"]:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.heads, self.width)
        k = self.k(x).view(b, t, self.kv, self.width)
        v = self.v(x).view(b, t, self.kv, self.width)
        q = self.rotate(q, positions)
        k = self.rotate(k, positions)
        k = k.repeat_interleave(self.heads // self.kv, dim=2)
        v = v.repeat_interleave(self.heads // self.kv, dim=2)
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = torch.einsum("btnh,bsnh->bnts", q, k).to(wide) * self.width**-0.5
        scores = scores.masked_fill(~mask[:, None], torch.finfo(wide).min)
        weights = scores.softmax(dim=-1).to(x.dtype)
        mixed = torch.einsum("bnts,bsnh->btnh", weights, v)
        return self.o(mixed.reshape(b, t, self.heads * self.width))


ATTENTIONS = {GQA: Attention}
