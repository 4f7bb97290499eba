"""Decoding from a cache, in torch: what jaxmodel's cache must equal, and what is got wrong in one.

torchref has no cache. This is one, plain, over torchref's own parts, so that a slip in the JAX
side's cache can be made here too, and named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Slip:
    """A mistake of a cache: what it does, and what to change."""

    about: str = ""
    advice: str = ""
    early: int = 0  # slots before the right one that a step writes to
    restart: bool = False  # positions counted anew in every call
    unmasked: bool = False  # slots that are still empty are seen


SLIPS = {
    "cache-offset": Slip(
        "writes a step's keys and values one slot early, over the token before",
        "write at the number of tokens already in the cache",
        early=1,
    ),
    "cache-late": Slip(
        "writes a step's keys and values one slot late",
        "write at the number of tokens already in the cache",
        early=-1,
    ),
    "cache-positions": Slip(
        "counts positions anew in every call, so that each step's angle is that of position 0",
        "positions go on from the number of tokens already in the cache",
        restart=True,
    ),
    "cache-mask": Slip(
        "lets a step see the slots that are still empty",
        "mask by the number of tokens in the cache",
        unmasked=True,
    ),
}


@torch.no_grad()
def decode(model: Any, ids: np.ndarray, prefill: int, slip: Slip | None = None) -> np.ndarray:
    """Logits (b v) after the last id: a prefill of that many tokens, then one at a time."""
    slip = slip or Slip()
    slots = ids.shape[1]
    tokens = torch.from_numpy(ids)
    kept: list[list[Tensor]] = [[] for _ in model.layers]
    x = tokens
    for start, end in [(0, prefill), *((i, i + 1) for i in range(prefill, slots))]:
        t = end - start
        at = (torch.arange(t) + (0 if slip.restart else start)).expand(len(ids), t)
        seen = torch.arange(slots)[None, :] <= start + torch.arange(t)[:, None]
        if slip.unmasked and start:
            seen = torch.ones_like(seen)
        write = min(max(start - slip.early, 0), slots - t) if start else 0
        x = model.embed(tokens[:, start:end])
        for layer, kv in zip(model.layers, kept, strict=True):
            attend = _attention(layer.attn, at, seen, kv, write, slots)
            x = x + layer.post_attn(attend(layer.pre_attn(x)))
            x = x + layer.post_ffn(layer.ffn(layer.pre_ffn(x)))
    return model.head(model.norm(x[:, -1:]), model.embed)[:, 0].double().numpy()


def _attention(
    m: Any, at: Tensor, seen: Tensor, kv: list[Tensor], write: int, slots: int
) -> Callable[[Tensor], Tensor]:
    """One layer's attention over its cache `kv`, which it writes to."""

    def attend(x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = m.rotate(m.q(x).view(b, t, m.heads, m.width), at)
        k = m.rotate(m.k(x).view(b, t, m.kv, m.width), at)
        v = m.v(x).view(b, t, m.kv, m.width)
        if not kv:
            kv.extend(y.new_zeros(b, slots, *y.shape[2:]) for y in (k, v))
        for whole, new in zip(kv, (k, v), strict=True):
            whole[:, write : write + t] = new
        keys, values = (y.repeat_interleave(m.heads // m.kv, 2) for y in kv)
        scores = torch.einsum("btnh,bsnh->bnts", q, keys) * m.width**-0.5
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return m.o(torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), values).reshape(b, t, -1))

    return attend
