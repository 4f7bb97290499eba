"""Mistakes inside attention: heads, scores, masks, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jaxtwin.parity.diagnose.hypotheses.base import Forward, add, calling, setting
from jaxtwin.torchref.attention import SinkSoftmax, Softmax, Window
from jaxtwin.torchref.cap import Cap
from jaxtwin.torchref.position import Rotary
from jaxtwin.torchref.skip import Skip


def softmax(scores: Tensor) -> Tensor:
    """Over the last axis, every step rounded to the dtype of the scores, as XLA has it.

    torch's own is computed in float32 for a narrower dtype and rounded once, so it loses less.
    """
    grown = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return grown / grown.sum(-1, keepdim=True)


def _normalizing_in(dtype: torch.dtype) -> Callable[[nn.Module, Any], None]:
    return setting(normalize=lambda m, v: lambda x: softmax(x.to(dtype)).to(x.dtype))


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


WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 31, 32, 33, 48, 64, 96, 127, 128, 129, 256)


def _windowed(values: Callable[[int], Sequence[Any]]) -> Callable[[Any], Sequence[Any]]:
    return lambda m: values(m.window.size) if isinstance(m.window, Window) else ()


def _capped_late(f: Forward, m: Any, value: Any, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
    """As if the mask were a large negative number that is capped with the rest."""
    cap, window = m.cap, m.window(mask)
    saved = dict(m.__dict__)
    hide = m.hide
    m.__dict__.update(
        cap=lambda scores: cap(hide(scores, window)), hide=lambda scores, mask: scores
    )
    try:
        return f(x, at, mask)
    finally:
        m.__dict__.clear()
        m.__dict__.update(saved)


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
    setting(repeat=lambda m, v: lambda x: x.repeat(1, 1, m.heads // m.kv, 1)),
    values=_grouped,
)
add(
    "scale-missing",
    "does not divide the scores by sqrt(head width)",
    "multiply the scores by head width ** -0.5",
    MIXED,
    "attn",
    setting(scale=lambda m, v: 1.0),
    values=lambda m: () if m.scale == 1 else (None,),
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
    "remove the sliding window",
    MIXED,
    "attn",
    _masked(_near),
    values=lambda m: () if isinstance(m.window, Window) else WINDOWS,
)
add(
    "window-missing",
    "sees all tokens, and not the last ones alone",
    "mask with query - key < window in these layers",
    MIXED,
    "attn",
    setting(window=lambda m, v: Skip()),
    values=_windowed(lambda size: (None,)),
)
add(
    "window-size",
    "sees the last {} tokens",
    "take the window from the configuration; it counts the query itself: query - key < window",
    MIXED,
    "attn",
    setting(window=lambda m, v: Window(v)),
    values=_windowed(lambda size: [x for x in (size + 1, size - 1, size // 2, 2 * size) if x > 0]),
)
add(
    "soft-cap-missing",
    "does not cap the scores",
    "cap * tanh(scores / cap), before the mask",
    MIXED,
    "attn",
    setting(cap=lambda m, v: Skip()),
    values=lambda m: (None,) if isinstance(m.cap, Cap) else (),
)
add(
    "soft-cap-after-mask",
    "caps the scores after the mask, so that what is hidden is seen",
    "cap the scores, then mask them",
    MIXED,
    "attn",
    calling(_capped_late),
    values=lambda m: (None,) if isinstance(m.cap, Cap) else (),
)
add(
    "relative-missing",
    "adds no bias of distance to the scores (ALiBi, T5)",
    "add it after the scale and before the mask",
    MIXED,
    "attn",
    setting(relative=lambda m, v: Skip()),
    values=lambda m: () if isinstance(m.relative, Skip) else (None,),
)
add(
    "sinks-missing",
    "leaves the attention sinks out of the softmax",
    "let each head's sink join the softmax, and drop its share",
    MIXED,
    "attn",
    setting(softmax=lambda m, v: Softmax()),
    values=lambda m: (None,) if isinstance(m.softmax, SinkSoftmax) else (),
)
for _probe in ("attn.q", "attn.k"):
    add(
        "bias-missing",
        "leaves the bias out",
        "add the stored bias",
        _probe,
        _probe,
        calling(lambda f, m, v, x: F.linear(x, m.weight)),
        values=lambda m: (None,) if m.bias is not None else (),
    )
add(
    "rope-on-values",
    "rotates the values too",
    "rotate q and k, never v",
    ("attn.v",),
    "attn",
    calling(_turning_values),
    values=lambda m: (None,) if isinstance(m.rotate, Rotary) else (),
)
add(
    "softmax-float32",
    "computes the softmax in float32",
    "keep scores and softmax in float64 where the input is",
    MIXED,
    "attn.softmax",
    _normalizing_in(torch.float32),
    rounds="float32",
)
add(
    "softmax-bfloat16",
    "computes the softmax in bfloat16",
    "compute scores and softmax in float32 at least",
    MIXED,
    "attn.softmax",
    _normalizing_in(torch.bfloat16),
    rounds="bfloat16",
)
add(
    "scale-off",
    "multiplies the scores by {}",
    "multiply the scores by head width ** -0.5, or by the scale in the configuration",
    MIXED,
    "attn",
    setting(scale=lambda m, v: v),
    values=lambda m: [m.scale * 2.0**e for e in range(-5, 6)],
    fits=True,
)
add(
    "soft-cap",
    "caps the scores at {} by a tanh",
    "remove the soft-cap of the scores",
    MIXED,
    "attn",
    setting(cap=lambda m, v: Cap(v)),
    values=lambda m: [2.0**e for e in range(-3, 9)],
    fits=True,
)
add(
    "bias-missing",
    "leaves the bias of the output out",
    "add the stored bias",
    "attn",
    "attn.o",
    calling(lambda f, m, v, x: F.linear(x, m.weight)),
    values=lambda m: (None,) if m.bias is not None else (),
)
