"""Attention."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jaxtwin.configs import spec as specs
from jaxtwin.configs.spec import GQA, QKNorm
from jaxtwin.torchref.cap import CAPS
from jaxtwin.torchref.norm import NORMS
from jaxtwin.torchref.position import RELATIVES, ROTARIES


class NormedHeads(nn.Module):
    """A norm of every head by itself, or of the whole projection, before it is split into heads."""

    def __init__(self, spec: QKNorm, heads: int, width: int):
        super().__init__()
        self.size = {"head": width, "projection": heads * width}[spec.over]
        self.norm = NORMS[type(spec.norm)](spec.norm, self.size)

    def forward(self, x: Float[Tensor, "b t n h"]) -> Float[Tensor, "b t n h"]:
        b, t, _, _ = x.shape
        return self.norm(x.reshape(b, t, -1, self.size)).view(x.shape)


class PlainHeads(nn.Module):
    """x."""

    def __init__(self, spec: None, heads: int, width: int):
        super().__init__()

    def forward(self, x: Float[Tensor, "b t n h"]) -> Float[Tensor, "b t n h"]:
        return x


HEADS = {QKNorm: NormedHeads, type(None): PlainHeads}


class Window(nn.Module):
    """Only the last `size` tokens, the one that looks among them."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, mask: Bool[Tensor, "b t s"]) -> Bool[Tensor, "b t s"]:
        t, s = mask.shape[1:]
        # Tokens that look are the last t of the s there are.
        distance = torch.arange(s - t, s, device=mask.device)[:, None] - torch.arange(
            s, device=mask.device
        )
        return mask & (distance < self.size)


class NoWindow(nn.Module):
    """All that the mask lets through."""

    def __init__(self, size: None):
        super().__init__()

    def forward(self, mask: Bool[Tensor, "b t s"]) -> Bool[Tensor, "b t s"]:
        return mask


WINDOWS = {int: Window, type(None): NoWindow}


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245): K/V head j serves query heads j n/k ...

    The plain way: every K/V head is repeated for its query heads. Softmax is at least float32.
    """

    def __init__(self, spec: GQA, model: specs.Model):
        super().__init__()
        self.q = nn.Linear(model.d, spec.heads * spec.width, bias=spec.bias)
        self.k = nn.Linear(model.d, spec.kv * spec.width, bias=spec.bias)
        self.v = nn.Linear(model.d, spec.kv * spec.width, bias=spec.bias)
        self.o = nn.Linear(spec.heads * spec.width, model.d, bias=spec.out_bias)
        self.q_norm = HEADS[type(spec.qk_norm)](spec.qk_norm, spec.heads, spec.width)
        self.k_norm = HEADS[type(spec.qk_norm)](spec.qk_norm, spec.kv, spec.width)
        self.rotate = ROTARIES[type(spec.rope)](spec.rope, spec.width)
        self.relative = RELATIVES[type(spec.relative)](spec.relative, spec.heads)
        self.cap = CAPS[type(spec.cap)](spec.cap)
        self.window = WINDOWS[type(spec.window)](spec.window)
        self.heads, self.kv, self.width = spec.heads, spec.kv, spec.width
        self.scale = spec.scale or spec.width**-0.5

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        positions: Int[Tensor, "b t"],
        mask: Bool[Tensor, "b t s"],
    ) -> Float[Tensor, "b t d"]:
        q, k, v = self.project(x, positions)
        return self.mix(q, k, v, positions, positions, mask)

    def project(
        self, x: Float[Tensor, "b t d"], positions: Int[Tensor, "b t"]
    ) -> tuple[Float[Tensor, "b t n h"], Float[Tensor, "b t k h"], Float[Tensor, "b t k h"]]:
        """Queries, keys and values."""
        b, t, _ = x.shape
        q = self.q_norm(self.q(x).view(b, t, self.heads, self.width))
        k = self.k_norm(self.k(x).view(b, t, self.kv, self.width))
        v = self.v(x).view(b, t, self.kv, self.width)
        return self.rotate(q, positions), self.rotate(k, positions), v

    def mix(
        self,
        q: Float[Tensor, "b t n h"],
        k: Float[Tensor, "b s k h"],
        v: Float[Tensor, "b s k h"],
        positions: Int[Tensor, "b t"],
        keys: Int[Tensor, "b s"],
        mask: Bool[Tensor, "b t s"],
    ) -> Float[Tensor, "b t d"]:
        """What the queries find; `positions` are theirs, and `keys` those of what they look at."""
        b, t, _, _ = q.shape
        k = k.repeat_interleave(self.heads // self.kv, dim=2)
        v = v.repeat_interleave(self.heads // self.kv, dim=2)
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = self.cap(torch.einsum("btnh,bsnh->bnts", q, k).to(wide) * self.scale)
        scores = self.relative(scores, positions, keys)
        scores = scores.masked_fill(~self.window(mask)[:, None], torch.finfo(wide).min)
        weights = scores.softmax(dim=-1).to(q.dtype)
        mixed = torch.einsum("bnts,bsnh->btnh", weights, v)
        return self.o(mixed.reshape(b, t, self.heads * self.width))


ATTENTIONS = {GQA: Attention}
