"""Arithmetic on a spec: parameters and bytes, written out by hand.

It knows nothing of the conversion table or of either mirror, so that a test can hold all three
against each other. Bytes are exact; GiB is 2**30.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtwin.configs.spec import (
    GQA,
    LN,
    Block,
    Glu,
    Learned,
    Mlp,
    Model,
    Norm,
    OwnNorm,
    PostBlock,
    T5Bias,
)


@dataclass(frozen=True)
class Count:
    """Unique parameters; `decayed` are the matrices and the embedding, a tied weight once."""

    decayed: int
    not_decayed: int

    @property
    def total(self) -> int:
        return self.decayed + self.not_decayed

    def __add__(self, other: Count) -> Count:
        return Count(self.decayed + other.decayed, self.not_decayed + other.not_decayed)


NONE = Count(0, 0)


def norm(n: Norm, size: int) -> Count:
    """A scale of that size, a bias where there is one, or nothing where the norm is absent."""
    if n is None:
        return NONE
    return Count(0, 2 * size if isinstance(n, LN | OwnNorm) and n.bias else size)


def attention(a: GQA, d: int) -> Count:
    """Q and O read and write n heads, K and V only k: 2 d n h + 2 d k h.

    Biases, norms of Q and K, a sink for each head and a learned bias of the scores (buckets times
    heads) come on top.
    """
    queries, keys = a.heads * a.width, a.kv * a.width
    total = Count(2 * d * queries + 2 * d * keys, 0)
    total += Count(0, queries + 2 * keys if a.bias else 0) + Count(0, d if a.out_bias else 0)
    if a.sinks:
        total += Count(0, a.heads)
    if isinstance(a.relative, T5Bias):
        total += Count(a.relative.buckets * a.heads, 0)
    if a.qk_norm is not None:
        over_projection = a.qk_norm.over == "projection"
        total += norm(a.qk_norm.norm, queries if over_projection else a.width)
        total += norm(a.qk_norm.norm, keys if over_projection else a.width)
    return total


def ffn(f: Glu | Mlp, d: int) -> Count:
    """Up and down, 2 d f, and a gate: 3 d f. Each has a bias, or none has."""
    gated = isinstance(f, Glu)
    bias = (2 if gated else 1) * f.hidden + d if f.bias else 0
    return Count((3 if gated else 2) * d * f.hidden, bias)


def layer(b: Block | PostBlock, d: int) -> Count:
    """Attention, feed-forward and the norms around them."""
    norms = norm(b.post_attn, d) + norm(b.post_ffn, d)
    if isinstance(b, Block):
        norms += norm(b.pre_attn, d) + norm(b.pre_ffn, d)
    return attention(b.attn, d) + ffn(b.ffn, d) + norms


def parameters(m: Model) -> Count:
    """Every unique parameter of the model."""
    total = Count(m.vocab * m.d * (1 if m.tied else 2), 0)
    if isinstance(m.position, Learned):
        total += Count(m.max_len * m.d, 0)
    for run in m.runs:
        for block in run.blocks:
            one = layer(block, m.d)
            total += Count(one.decayed * run.repeats, one.not_decayed * run.repeats)
    return total + norm(m.embed_norm, m.d) + norm(m.norm, m.d)


def kv_cache_bytes(
    m: Model, batch: int, length: int, itemsize: int, *, rolling: bool = False
) -> int:
    """Keys and values of every layer: 2 b s (k h) bytes a layer; K/V heads, never query heads.

    jaxmodel's cache keeps all tokens; a `rolling` one lets go of those that a window leaves behind.
    """

    def kept(a: GQA) -> int:
        return min(length, a.window) if rolling and a.window is not None else length

    tokens = sum(2 * block.attn.kv * block.attn.width * kept(block.attn) for block in m.layers)
    return batch * tokens * itemsize


def weight_bytes(m: Model, itemsize: int) -> int:
    """The weights alone: no gradients, moments, master copy or activations."""
    return parameters(m).total * itemsize
