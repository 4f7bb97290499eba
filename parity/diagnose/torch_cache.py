"""Decoding from a cache, in torch: what jaxmodel's cache must equal, and what is got wrong in one.

torchref has no cache. This is one, plain, over torchref's own parts, so that a slip in the JAX
side's cache can be made here too, and named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheHypothesis:
    """A mistake of a cache: what it does, and what to change."""

    about: str = ""
    advice: str = ""
    early: int = 0  # slots before the right one that a step writes to
    restart: bool = False  # positions counted anew in every call
    unmasked: bool = False  # slots that are still empty are seen


CACHE_HYPOTHESES = {
    "cache-offset": CacheHypothesis(
        "writes a step's keys and values one slot early, over the token before",
        "write at the number of tokens already in the cache",
        early=1,
    ),
    "cache-late": CacheHypothesis(
        "writes a step's keys and values one slot late",
        "write at the number of tokens already in the cache",
        early=-1,
    ),
    "cache-positions": CacheHypothesis(
        "counts positions anew in every call, so that each step's angle is that of position 0",
        "positions go on from the number of tokens already in the cache",
        restart=True,
    ),
    "cache-mask": CacheHypothesis(
        "lets a step see the slots that are still empty",
        "mask by the number of tokens in the cache",
        unmasked=True,
    ),
}


@torch.no_grad()
def decode(
    model: Any, ids: np.ndarray, prefill: int, hypothesis: CacheHypothesis | None = None
) -> np.ndarray:
    """Logits (b v) after the last id: a prefill of that many tokens, then one at a time."""
    hypothesis = hypothesis or CacheHypothesis()
    slots = ids.shape[1]
    tokens = torch.from_numpy(ids)
    kept: list[list[Tensor]] = [[] for _ in model.layers]
    x = tokens
    for start, end in [(0, prefill), *((i, i + 1) for i in range(prefill, slots))]:
        t = end - start
        at = (torch.arange(t) + (0 if hypothesis.restart else start)).expand(len(ids), t)
        mask = torch.arange(slots)[None, :] <= start + torch.arange(t)[:, None]
        if hypothesis.unmasked and start:
            mask = torch.ones_like(mask)
        write = min(max(start - hypothesis.early, 0), slots - t) if start else 0
        x = model.embed_tokens(tokens[:, start:end], at)
        for layer, kv in zip(model.layers, kept, strict=True):
            with _cached(layer.attn, kv, write, slots):
                x, _ = layer(x, at, mask.expand(len(ids), t, slots))
    return model.unembed(model.norm(x[:, -1:]))[:, 0].double().numpy()


@contextlib.contextmanager
def _cached(m: Any, kv: list[Tensor], write: int, slots: int) -> Iterator[None]:
    """While open, one layer's attention reads and writes its cache `kv`."""
    window = m.window

    def attend(x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        q, k, v = m.project(x, at)
        if not kv:
            kv.extend(y.new_zeros(len(x), slots, *y.shape[2:]) for y in (k, v))
        for cached, new in zip(kv, (k, v), strict=True):
            cached[:, write : write + x.shape[1]] = new
        keys = torch.arange(slots).expand(len(x), slots)
        # torchref's window takes the queries for the last tokens, which here they are not.
        near = at[:, :, None] - keys[:, None, :] < getattr(window, "size", slots)
        m.__dict__["window"] = lambda mask: mask & near
        try:
            return m.mix(q, *kv, at, keys, mask)
        finally:
            del m.__dict__["window"]

    m.__dict__["forward"] = attend
    try:
        yield
    finally:
        del m.__dict__["forward"]
