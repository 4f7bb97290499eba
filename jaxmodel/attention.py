"""Attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxtwin.configs.spec import GQA, QKNorm
from jaxtwin.jaxmodel.axes import Maker, constrain, gathered, matmul_flat
from jaxtwin.jaxmodel.bias import BIASES
from jaxtwin.jaxmodel.cache import KV, AttentionContext, extend, query_key_distance
from jaxtwin.jaxmodel.cap import CAPS
from jaxtwin.jaxmodel.norm import NORMS
from jaxtwin.jaxmodel.position import RELATIVES, ROTARIES
from jaxtwin.jaxmodel.probe import probe


class NormedHeads(nnx.Module):
    """A norm of every head by itself, or of the whole projection, before it is split into heads."""

    def __init__(self, spec: QKNorm, make: Maker, heads: str):
        letters = {"head": "h", "projection": f"{heads} h"}[spec.over]
        self.norm = NORMS[type(spec.norm)](spec.norm, make, letters)

    def __call__(self, x: Float[Array, "b t n h"]) -> Float[Array, "b t n h"]:
        return self.norm(x)


class PlainHeads(nnx.Module):
    """x."""

    def __init__(self, spec: None, make: Maker, heads: str):
        pass

    def __call__(self, x: Float[Array, "b t n h"]) -> Float[Array, "b t n h"]:
        return x


HEADS = {QKNorm: NormedHeads, type(None): PlainHeads}


class Window(nnx.Module):
    """Only the last `size` tokens, the one that looks among them."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, context: AttentionContext) -> Bool[Array, "b t s"]:
        _, time, slots = context.mask.shape
        return context.mask & (query_key_distance(time, slots, context.offset) < self.size)


class NoWindow(nnx.Module):
    """All that the mask lets through."""

    def __init__(self, size: None):
        pass

    def __call__(self, context: AttentionContext) -> Bool[Array, "b t s"]:
        return context.mask


WINDOWS = {int: Window, type(None): NoWindow}


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
        self.q_bias = BIASES[spec.bias](make, "n h")
        self.k_bias = BIASES[spec.bias](make, "k h")
        self.v_bias = BIASES[spec.bias](make, "k h")
        self.o_bias = BIASES[spec.out_bias](make, "d")
        self.q_norm = HEADS[type(spec.qk_norm)](spec.qk_norm, make, "n")
        self.k_norm = HEADS[type(spec.qk_norm)](spec.qk_norm, make, "k")
        self.rotate = ROTARIES[type(spec.rope)](spec.rope, spec.width)
        self.relative = RELATIVES[type(spec.relative)](spec.relative, make, spec.heads)
        self.cap = CAPS[type(spec.cap)](spec.cap)
        self.window = WINDOWS[type(spec.window)](spec.window)
        self.groups = (spec.kv, spec.heads // spec.kv)
        self.scale = spec.scale or spec.width**-0.5

    def __call__(
        self, x: Float[Array, "b t d"], context: AttentionContext, kv: KV | None
    ) -> tuple[Float[Array, "b t d"], KV | None]:
        q = self.q_norm(self.q_bias(matmul_flat(x, gathered(self.q))))
        k = self.k_norm(self.k_bias(matmul_flat(x, gathered(self.k))))
        v = self.v_bias(matmul_flat(x, gathered(self.v)))
        q, k, v = constrain(q, "b t n h"), constrain(k, "b t k h"), constrain(v, "b t k h")
        q = probe(self.rotate(q, context.positions, context.longest), "attn/q")
        k = probe(self.rotate(k, context.positions, context.longest), "attn/k")
        k, v, kv = extend(kv, k, probe(v, "attn/v"), context.offset)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        grouped = q.reshape(*q.shape[:2], *self.groups, q.shape[3])
        scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=wide)
        scores = self.relative(self.cap(scores * self.scale), context)
        scores = jnp.where(self.window(context)[:, None, None], scores, jnp.finfo(wide).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)
        mixed = probe(constrain(mixed, "b t n h"), "attn/mixed")
        joined = mixed.reshape(*mixed.shape[:2], -1)
        return self.o_bias(matmul_flat(joined, gathered(self.o).reshape(-1, x.shape[-1]))), kv


ATTENTIONS = {GQA: Attention}
