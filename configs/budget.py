"""Arithmetic on a spec: parameters and bytes, written out by hand.

It knows nothing of the conversion table or of either mirror, so that a test can hold all three
against each other. Bytes are exact; GiB is 2**30.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.spec import GQA, LN, RMS, Glu, Model


@dataclass(frozen=True)
class Count:
    """Unique parameters; `decayed` are the matrices and the embedding, a tied weight once."""

    decayed: int
    not_decayed: int

    @property
    def total(self) -> int:
        return self.decayed + self.not_decayed


def attention(a: GQA, d: int) -> int:
    """Q and O read and write n heads, K and V only k: 2 d n h + 2 d k h."""
    return 2 * d * a.heads * a.width + 2 * d * a.kv * a.width


def ffn(f: Glu, d: int) -> int:
    """Gate, up and down: 3 d f."""
    return 3 * d * f.hidden


def norm(n: RMS | LN | None, d: int) -> int:
    """A scale of d, a bias of d where there is one, or nothing where the norm is absent."""
    if n is None:
        return 0
    return 2 * d if isinstance(n, LN) and n.bias else d


def parameters(m: Model) -> Count:
    """Every unique parameter of the model."""
    matrices = m.vocab * m.d * (1 if m.tied else 2)
    scales = norm(m.norm, m.d)
    for block in m.layers:
        matrices += attention(block.attn, m.d) + ffn(block.ffn, m.d)
        slots = (block.pre_attn, block.post_attn, block.pre_ffn, block.post_ffn)
        scales += sum(norm(slot, m.d) for slot in slots)
    return Count(decayed=matrices, not_decayed=scales)


def kv_cache_bytes(m: Model, batch: int, length: int, itemsize: int) -> int:
    """Keys and values of every layer: 2 b s (k h) bytes a layer; K/V heads, never query heads."""
    per_token = sum(2 * block.attn.kv * block.attn.width for block in m.layers)
    return batch * length * per_token * itemsize


def weight_bytes(m: Model, itemsize: int) -> int:
    """The weights alone: no gradients, moments, master copy or activations."""
    return parameters(m).total * itemsize
