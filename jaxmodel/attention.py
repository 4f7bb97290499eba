"""Attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from configs.spec import GQA
from jaxmodel.axes import Maker, constrain, used
from jaxmodel.cache import KV, Seen, extend
from jaxmodel.position import POSITIONS
from jaxmodel.probe import probe


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245): K/V head j serves query heads j n/k ...

    No head is repeated: queries are viewed as (k, n/k) and meet their own key head. Scores and
    softmax are at least float32.
    """

    def __init__(self, spec: GQA, make: Maker):
        make = make.within("attn", n=spec.heads, k=spec.kv, h=spec.width)
        self.q = make.matrix("q", "d n h")
        self.k = make.matrix("k", "d k h")
        self.v = make.matrix("v", "d k h")
        self.o = make.matrix("o", "n h d", std=make.residual_std)
        self.rotate = POSITIONS[type(spec.rope)](spec.rope, spec.width)
        self.groups = (spec.kv, spec.heads // spec.kv)
        self.scale = spec.width**-0.5

    def __call__(
        self, x: Float[Array, "b t d"], seen: Seen, kv: KV | None
    ) -> tuple[Float[Array, "b t d"], KV | None]:
        q = constrain(jnp.einsum("btd,dnh->btnh", x, used(self.q)), "b t n h")
        k = constrain(jnp.einsum("btd,dkh->btkh", x, used(self.k)), "b t k h")
        v = constrain(jnp.einsum("btd,dkh->btkh", x, used(self.v)), "b t k h")
        q = probe(self.rotate(q, seen.positions), "attn/q")
        k = probe(self.rotate(k, seen.positions), "attn/k")
        v = probe(v, "attn/v")
        k, v, kv = extend(kv, k, v, seen.offset)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        grouped = q.reshape(*q.shape[:2], *self.groups, q.shape[3])
        scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=wide)
        scores = jnp.where(seen.mask[:, None, None], scores * self.scale, jnp.finfo(wide).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)
        mixed = probe(constrain(mixed, "b t n h"), "attn/mixed")
        return jnp.einsum("btnh,nhd->btd", mixed, used(self.o)), kv


ATTENTIONS = {GQA: Attention}
