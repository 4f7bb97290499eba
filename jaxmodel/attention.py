"""Attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxtwin.configs.spec import GQA, QKNorm
from jaxtwin.jaxmodel.axes import Maker, constrain, gathered, matmul_flat
from jaxtwin.jaxmodel.bias import Bias
from jaxtwin.jaxmodel.cache import KV, AttentionContext, extend, query_key_distance
from jaxtwin.jaxmodel.cap import Cap
from jaxtwin.jaxmodel.norm import NORMS
from jaxtwin.jaxmodel.position import RELATIVES, ROTARIES
from jaxtwin.jaxmodel.probe import probe
from jaxtwin.jaxmodel.skip import Skip


class NormedHeads(nnx.Module):
    """A norm of every head by itself, or of the whole projection, before it is split into heads."""

    def __init__(self, spec: QKNorm, make: Maker, heads: str):
        letters = {"head": "h", "projection": f"{heads} h"}[spec.over]
        self.norm = NORMS[type(spec.norm)](spec.norm, make, letters)

    def __call__(self, x: Float[Array, "b t n h"]) -> Float[Array, "b t n h"]:
        return self.norm(x)


QK_NORMS = {QKNorm: NormedHeads, type(None): Skip}


class Window(nnx.Module):
    """Sliding window: query t sees keys t - size + 1 ... t."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, mask: Bool[Array, "b t s"], offset: Array) -> Bool[Array, "b t s"]:
        _, time, slots = mask.shape
        return mask & (query_key_distance(time, slots, offset) < self.size)


class Softmax(nnx.Module):
    """Attention weights from scores, over the keys."""

    def __call__(self, scores: Float[Array, "b k g t s"]) -> Float[Array, "b k g t s"]:
        return self.normalize(scores)

    def normalize(self, scores: Float[Array, "b k g t s"]) -> Float[Array, "b k g t s"]:
        return jax.nn.softmax(scores, axis=-1)


class SinkSoftmax(Softmax):
    """Attention sinks: a learned logit for each head joins the softmax, and its share is dropped.

    So a head may attend to nothing (gpt-oss, arXiv 2508.10925; Xiao et al. 2023, arXiv 2309.17453).
    """

    def __init__(self, make: Maker):
        self.sinks = make.full("n", 0.0)

    def __call__(self, scores: Float[Array, "b k g t s"]) -> Float[Array, "b k g t s"]:
        sinks = gathered(self.sinks).astype(scores.dtype).reshape(*scores.shape[1:3], 1, 1)
        sinks = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
        return self.normalize(jnp.concatenate((scores, sinks), axis=-1))[..., :-1]


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245): K/V head j serves query heads j n/k ...

    No head is repeated: queries are viewed as (k, n/k) and meet their own key head. Scores and
    softmax are at least float32.
    """

    def __init__(self, spec: GQA, make: Maker):
        make = make.child("attn", n=spec.heads, k=spec.kv, h=spec.width)
        self.q = make.matrix("q", "d n h")
        self.k = make.matrix("k", "d k h")
        self.v = make.matrix("v", "d k h")
        self.o = make.matrix("o", "n h d", std=make.residual_std)
        self.q_bias = Bias(make, "n h") if spec.bias else Skip()
        self.k_bias = Bias(make, "k h") if spec.bias else Skip()
        self.v_bias = Bias(make, "k h") if spec.bias else Skip()
        self.o_bias = Bias(make, "d") if spec.out_bias else Skip()
        self.q_norm = QK_NORMS[type(spec.qk_norm)](spec.qk_norm, make, "n")
        self.k_norm = QK_NORMS[type(spec.qk_norm)](spec.qk_norm, make, "k")
        self.rotate = ROTARIES[type(spec.rope)](spec.rope, spec.width)
        self.relative = RELATIVES[type(spec.relative)](spec.relative, make, spec.heads)
        self.cap = Skip() if spec.cap is None else Cap(spec.cap)
        self.window = Skip() if spec.window is None else Window(spec.window)
        self.softmax = SinkSoftmax(make) if spec.sinks else Softmax()
        self.groups = (spec.kv, spec.heads // spec.kv)
        self.scale = spec.scale or spec.width**-0.5

    def __call__(
        self, x: Float[Array, "b t d"], context: AttentionContext, kv: KV | None
    ) -> tuple[Float[Array, "b t d"], KV | None]:
        q = self.q_norm(self.q_bias(matmul_flat(x, gathered(self.q))))
        k = self.k_norm(self.k_bias(matmul_flat(x, gathered(self.k))))
        v = self.v_bias(matmul_flat(x, gathered(self.v)))
        q, k, v = constrain(q, "b t n h"), constrain(k, "b t k h"), constrain(v, "b t k h")
        q = probe(self.rotate(q, context.positions, context.length), "attn/q")
        k = probe(self.rotate(k, context.positions, context.length), "attn/k")
        k, v, kv = extend(kv, k, probe(v, "attn/v"), context.offset)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scores = jnp.einsum("btkgh,bskh->bkgts", self.group(q), k, preferred_element_type=wide)
        scores = self.relative(self.cap(scores * self.scale), context)
        mask = self.window(probe(context.mask, "attn/mask"), context.offset)
        scores = jnp.where(mask[:, None, None], scores, jnp.finfo(wide).min)
        weights = self.softmax(scores).astype(x.dtype)
        mixed = self.ungroup(jnp.einsum("bkgts,bskh->btkgh", weights, v))
        mixed = probe(constrain(mixed, "b t n h"), "attn/mixed")
        joined = mixed.reshape(*mixed.shape[:2], -1)
        return self.o_bias(matmul_flat(joined, gathered(self.o).reshape(-1, x.shape[-1]))), kv

    def group(self, q: Float[Array, "b t n h"]) -> Float[Array, "b t k g h"]:
        """The query heads that each K/V head serves, side by side."""
        return q.reshape(*q.shape[:2], *self.groups, q.shape[3])

    def ungroup(self, mixed: Float[Array, "b t k g h"]) -> Float[Array, "b t n h"]:
        return mixed.reshape(*mixed.shape[:2], -1, mixed.shape[-1])


ATTENTIONS = {GQA: Attention}
