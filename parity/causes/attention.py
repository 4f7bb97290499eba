"""Mistakes inside attention: heads, scores, masks, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.causes.base import Forward, add, calling


def attend(
    m: Any,
    x: Tensor,
    at: Tensor,
    mask: Tensor,
    *,
    scale: float | None = None,
    tile: bool = False,
    cap: float | None = None,
    narrow: torch.dtype | None = None,
) -> Tensor:
    """torchref's attention, with what may be wrong in it laid open."""
    b, t, _ = x.shape
    q = m.q(x).view(b, t, m.heads, m.width)
    k = m.k(x).view(b, t, m.kv, m.width)
    v = m.v(x).view(b, t, m.kv, m.width)
    q, k = m.rotate(q, at), m.rotate(k, at)
    groups = m.heads // m.kv
    if tile:
        k, v = k.repeat(1, 1, groups, 1), v.repeat(1, 1, groups, 1)
    else:
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * (m.width**-0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min)
    weights = scores.to(narrow or scores.dtype).softmax(-1).to(x.dtype)
    mixed = torch.einsum("bnts,bsnh->btnh", weights, v)
    return m.o(mixed.reshape(b, t, -1))


def _attending(**how: Any) -> Callable[[nn.Module, Any], None]:
    def call(f: Forward, m: Any, value: Any, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        chosen = {k: make(m, value) if callable(make) else make for k, make in how.items()}
        return attend(m, x, at, mask, **chosen)

    return calling(call)


def _masked(change: Callable[[Tensor, Any], Tensor]) -> Callable[[nn.Module, Any], None]:
    return calling(lambda f, m, v, x, at, mask: f(x, at, change(mask, v)))


def _grouped(m: Any) -> Sequence[Any]:
    return (None,) if m.heads > m.kv > 1 else ()


def _causal(mask: Tensor) -> Tensor:
    return torch.ones_like(mask).tril()


def _later(mask: Tensor) -> Tensor:
    return mask | F.pad(mask[:, :, :-1], (1, 0))


def _near(mask: Tensor, window: int) -> Tensor:
    return mask & torch.ones_like(mask).triu(1 - window)


def _windows(m: Any) -> Sequence[int]:
    return (1, 2, 3, 4, 6, 8, 12, 16, 24, 31, 32, 33, 48, 64, 96, 127, 128, 129, 256)


def _turning_values(f: Forward, m: Any, value: Any, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
    """The values rotated where they are made."""
    inner = m.v.forward

    def turned(x: Tensor) -> Tensor:
        v = inner(x).view(*x.shape[:2], m.kv, m.width)
        return type(m.rotate).forward(m.rotate, v, at).flatten(-2)

    m.v.__dict__["forward"] = turned
    try:
        return f(x, at, mask)
    finally:
        m.v.__dict__["forward"] = inner


MIXED = "attn.mixed"
add(
    "tile-not-repeat",
    "tiles the key/value heads (0 1 0 1) instead of repeating each (0 0 1 1)",
    "let K/V head j serve the query heads j n/k ... (j+1) n/k - 1: repeat, not tile",
    MIXED,
    "attn",
    _attending(tile=True),
    values=_grouped,
)
add(
    "scale-missing",
    "does not divide the scores by sqrt(head width)",
    "multiply the scores by head width ** -0.5",
    MIXED,
    "attn",
    _attending(scale=1.0),
)
add(
    "causal-corner",
    "lets each token see the one after it",
    "mask with key position <= query position: the diagonal is the last one seen",
    MIXED,
    "attn",
    _masked(lambda mask, v: _later(mask)),
)
add(
    "not-causal",
    "lets every token see the whole sequence",
    "apply the causal mask",
    MIXED,
    "attn",
    _masked(lambda mask, v: torch.ones_like(mask)),
)
add(
    "diagonal-hidden",
    "hides each token from itself",
    "mask with key position <= query position, not <",
    MIXED,
    "attn",
    _masked(lambda mask, v: mask & torch.ones_like(mask).tril(-1)),
)
add(
    "documents-leak",
    "lets packed documents (and padding) see each other",
    "mask by segment as well: positions that start again do not block attention",
    MIXED,
    "attn",
    _masked(lambda mask, v: _causal(mask)),
)
add(
    "window",
    "sees only the last {} tokens",
    "remove the sliding window (or count the query itself in it: W keys in all)",
    MIXED,
    "attn",
    _masked(_near),
    values=_windows,
)
add(
    "rope-on-values",
    "rotates the values too",
    "rotate q and k, never v",
    ("attn.v",),
    "attn",
    calling(_turning_values),
    values=lambda m: (None,) if type(m.rotate).__name__ == "Rotary" else (),
)
add(
    "softmax-float32",
    "computes the softmax in float32",
    "keep scores and softmax in float64 where the input is",
    MIXED,
    "attn",
    _attending(narrow=torch.float32),
    rounds="float32",
)
add(
    "softmax-bfloat16",
    "computes the softmax in bfloat16",
    "compute scores and softmax in float32 at least",
    MIXED,
    "attn",
    _attending(narrow=torch.bfloat16),
    rounds="bfloat16",
)
add(
    "scale-off",
    "multiplies the scores by {}",
    "multiply the scores by head width ** -0.5 (or by the scale in the configuration)",
    MIXED,
    "attn",
    _attending(scale=lambda m, v: v),
    values=lambda m: [m.width**-0.5 * 2.0**e for e in range(-5, 6)],
    fits=True,
)
add(
    "soft-cap",
    "caps the scores at {} by a tanh",
    "remove the soft-cap of the scores",
    MIXED,
    "attn",
    _attending(cap=lambda m, v: v),
    values=lambda m: [2.0**e for e in range(-3, 9)],
    fits=True,
)
