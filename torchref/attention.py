"""Attention."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jaxtwin.configs import spec as specs
from jaxtwin.configs.spec import GQA, QKNorm
from jaxtwin.torchref.cap import Cap
from jaxtwin.torchref.norm import NORMS
from jaxtwin.torchref.position import RELATIVES, ROTARIES
from jaxtwin.torchref.skip import Skip


class NormedHeads(nn.Module):
    """A norm of every head by itself, or of the whole projection, before it is split into heads."""

    def __init__(self, spec: QKNorm, heads: int, width: int):
        super().__init__()
        self.size = {"head": width, "projection": heads * width}[spec.over]
        self.norm = NORMS[type(spec.norm)](spec.norm, self.size)

    def forward(self, x: Float[Tensor, "b t n h"]) -> Float[Tensor, "b t n h"]:
        b, t, _, _ = x.shape
        return self.norm(x.reshape(b, t, -1, self.size)).view(x.shape)


QK_NORMS = {QKNorm: NormedHeads, type(None): Skip}


class Window(nn.Module):
    """Sliding window: query t sees keys t - size + 1 ... t."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, mask: Bool[Tensor, "b t s"]) -> Bool[Tensor, "b t s"]:
        t, s = mask.shape[1:]
        keys = torch.arange(s, device=mask.device)
        queries = keys[s - t :]  # the last t of the s tokens
        return mask & (queries[:, None] - keys < self.size)


class Softmax(nn.Module):
    """Attention weights from scores, over the keys."""

    def forward(self, scores: Float[Tensor, "b n t s"]) -> Float[Tensor, "b n t s"]:
        return self.normalize(scores)

    def normalize(self, scores: Float[Tensor, "b n t s"]) -> Float[Tensor, "b n t s"]:
        return scores.softmax(dim=-1)


class SinkSoftmax(Softmax):
    """Attention sinks: a learned logit for each head joins the softmax, and its share is dropped.

    So a head may attend to nothing (gpt-oss, arXiv 2508.10925; Xiao et al. 2023, arXiv 2309.17453).
    """

    def __init__(self, heads: int):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, scores: Float[Tensor, "b n t s"]) -> Float[Tensor, "b n t s"]:
        b, n, t, _ = scores.shape
        sinks = self.sinks.to(scores.dtype).view(1, n, 1, 1).expand(b, n, t, 1)
        return self.normalize(torch.cat((scores, sinks), dim=-1))[..., :-1]


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
        self.q_norm = QK_NORMS[type(spec.qk_norm)](spec.qk_norm, spec.heads, spec.width)
        self.k_norm = QK_NORMS[type(spec.qk_norm)](spec.qk_norm, spec.kv, spec.width)
        self.rotate = ROTARIES[type(spec.rope)](spec.rope, spec.width)
        self.relative = RELATIVES[type(spec.relative)](spec.relative, spec.heads)
        self.cap = Skip() if spec.cap is None else Cap(spec.cap)
        self.window = Skip() if spec.window is None else Window(spec.window)
        self.softmax = SinkSoftmax(spec.heads) if spec.sinks else Softmax()
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
        """What the queries find; `positions` are theirs, `keys` those of the keys."""
        b, t, _, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.einsum("btnh,bsnh->bnts", q, self.repeat(k)).to(wide) * self.scale
        scores = self.relative(self.cap(scores), positions, keys)
        weights = self.softmax(self.hide(scores, self.window(mask))).to(q.dtype)
        mixed = torch.einsum("bnts,bsnh->btnh", weights, self.repeat(v))
        return self.o(mixed.reshape(b, t, self.heads * self.width))

    def repeat(self, x: Float[Tensor, "b s k h"]) -> Float[Tensor, "b s n h"]:
        """Each K/V head once for every query head that it serves: 0 0 1 1."""
        return x.repeat_interleave(self.heads // self.kv, dim=2)

    def hide(
        self, scores: Float[Tensor, "b n t s"], mask: Bool[Tensor, "b t s"]
    ) -> Float[Tensor, "b n t s"]:
        """The scores, and the lowest number where the mask is off."""
        return scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min)


ATTENTIONS = {GQA: Attention}
