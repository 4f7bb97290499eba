"""Mistakes of norms, of feed-forward, of any part, and of torch's own modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jaxtwin.configs.dataflow import NORM_PARTS
from jaxtwin.parity.diagnose.hypotheses.base import (
    ANY,
    Forward,
    add,
    calling,
    changing,
    only_in,
    setting,
)
from jaxtwin.torchref.aux import NO_AUX
from jaxtwin.torchref.bias import Bias
from jaxtwin.torchref.cap import Cap
from jaxtwin.torchref.ffn import ACTIVATIONS, GatedFFN
from jaxtwin.torchref.model import Scale
from jaxtwin.torchref.norm import LayerNorm, RMSNorm, unit_offset
from jaxtwin.torchref.position import LearnedPositions, SinusoidalPositions

BOTH = (RMSNorm, LayerNorm)
NORMS = (*NORM_PARTS, "embed_norm", "norm")

# ---- norms --------------------------------------------------------------------------------------


def _unit(m: Any, x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _centred(m: Any, x: Tensor, eps: float) -> Tensor:
    return _unit(m, x - x.mean(-1, keepdim=True), eps)


def _right(m: Any, x: Tensor, eps: float) -> Tensor:
    """The norm as it is, but for the eps."""
    if isinstance(m, LayerNorm):
        return m.bias(_centred(m, x, eps) * m.weight)
    return _unit(m, x, eps) * m.scale(m.weight)


def _offset(m: Any) -> bool:
    return isinstance(m, RMSNorm) and m.scale is unit_offset


def _norm(
    name: str, about: str, advice: str, call: Any, of: tuple[type, ...] = (RMSNorm,), **how: Any
) -> None:
    values = how.pop("values", lambda m: (None,))
    # Of the model width, and of a head's queries and keys.
    for parts, module in ((NORMS, "{part}"), (("attn.q", "attn.k"), "{part}_norm.norm")):
        add(
            name,
            about,
            advice,
            parts,
            module,
            calling(lambda f, m, v, x: call(m, v, x)),
            values=lambda m: values(m) if isinstance(m, of) else (),
            **how,
        )


_norm(
    "layer-norm",
    "subtracts the mean (LayerNorm where RMSNorm belongs)",
    "use RMSNorm: no mean is subtracted",
    lambda m, v, x: _unit(m, x - x.mean(-1, keepdim=True), m.eps) * m.scale(m.weight),
)
_norm(
    "norm-plus-one",
    "scales by 1 + w where w is stored",
    "scale by the stored weight (the unit offset is Gemma's)",
    lambda m, v, x: _unit(m, x, m.eps) * (1 + m.weight),
    values=lambda m: () if _offset(m) else (None,),
)
_norm(
    "norm-offset-missing",
    "scales by w where 1 + w belongs",
    "add 1 to the stored weight (Gemma stores the scale so)",
    lambda m, v, x: _unit(m, x, m.eps) * m.weight,
    values=lambda m: (None,) if _offset(m) else (),
)
_norm(
    "mean-kept",
    "does not subtract the mean (RMSNorm where LayerNorm belongs)",
    "subtract the mean over the width before the variance is taken",
    lambda m, v, x: m.bias(_unit(m, x, m.eps) * m.weight),
    of=(LayerNorm,),
)
_norm(
    "norm-bias-missing",
    "leaves the norm's bias out",
    "add the stored bias after the scale",
    lambda m, v, x: _centred(m, x, m.eps) * m.weight,
    of=(LayerNorm,),
    values=lambda m: (None,) if isinstance(m.bias, Bias) else (),
)
_norm(
    "variance-unbiased",
    "divides the variance by d - 1",
    "take the mean of the squares: divide by d",
    lambda m, v, x: m.bias(
        (x - x.mean(-1, keepdim=True))
        * torch.rsqrt(x.var(-1, keepdim=True, unbiased=True) + m.eps)
        * m.weight
    ),
    of=(LayerNorm,),
)
_norm(
    "norm-scale-missing",
    "does not apply the norm's scale",
    "multiply by the stored weight",
    lambda m, v, x: _unit(m, x, m.eps),
)
_norm(
    "norm-missing",
    "leaves the norm out",
    "apply the norm here",
    lambda m, v, x: x,
    of=BOTH,
)
_norm(
    "norm-eps-outside",
    "adds eps to the root and not under it",
    "x * rsqrt(mean(x^2) + eps)",
    lambda m, v, x: x / (x.square().mean(-1, keepdim=True).sqrt() + m.eps) * m.scale(m.weight),
)
_norm(
    "norm-sum",
    "divides by the root of the sum of squares and not of their mean",
    "take the mean over the width",
    lambda m, v, x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + m.eps) * m.scale(m.weight),
)
_norm(
    "norm-float32",
    "computes the norm in float32",
    "keep float64 where the input is",
    lambda m, v, x: _right(m, x.float(), m.eps).float().to(x.dtype),
    of=BOTH,
    rounds="float32",
)
_norm(
    "norm-eps",
    "uses the norm eps {}",
    "read the eps from the checkpoint's own configuration",
    lambda m, v, x: _right(m, x, v),
    of=BOTH,
    values=lambda m: [10.0**e for e in range(-12, 1)],
    fits=True,
)

# ---- feed-forward -------------------------------------------------------------------------------

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "none": lambda x: x,
}
add(
    "activation",
    "uses the activation {}",
    "use the activation that the configuration names",
    "ffn",
    "ffn",
    setting(act=lambda m, v: ACTS[v]),
    values=lambda m: [name for name, act in ACTS.items() if act is not m.act],
)
add(
    "activation-on-up",
    "activates up where gate belongs (the two matrices exchanged)",
    "down(act(gate x) * up x): exchange gate and up",
    "ffn",
    "ffn",
    calling(lambda f, m, v, x: (m.down(m.gate(x) * m.act(m.up(x))), NO_AUX)),
    values=only_in(GatedFFN),
)
add(
    "gate-missing",
    "leaves the gate out",
    "down(act(gate x) * up x)",
    "ffn",
    "ffn",
    calling(lambda f, m, v, x: (m.down(m.act(m.up(x))), NO_AUX)),
    values=only_in(GatedFFN),
)

for _matrix in ("gate", "up", "down"):
    add(
        "bias-missing",
        f"leaves the bias of {_matrix} out",
        "add the stored bias",
        "ffn",
        f"ffn.{_matrix}",
        calling(lambda f, m, v, x: F.linear(x, m.weight)),
        values=lambda m: (None,) if m.bias is not None else (),
    )

# ---- any part -----------------------------------------------------------------------------------


def _plus_input(f: Forward, m: Any, v: Any, x: Tensor, *more: Any) -> Any:
    out = f(x, *more)
    return (out[0] + x, *out[1:]) if isinstance(out, tuple) else out + x


add(
    "input-added",
    "adds what the part was given to what it returns (the residual stream twice)",
    "add the residual once, outside the part",
    ("attn", "ffn"),
    "{part}",
    calling(_plus_input),
)
add(
    "dropped",
    "returns zeros: the part is left out",
    "call the part and add what it returns",
    ("embed", "attn", "ffn", "head"),
    "{part}",
    changing(lambda m, v, y: 0 * y),
)
add(
    "output-float32",
    "computes in float32",
    "keep float64 where the input is",
    ("attn", "ffn", "head", "embed"),
    "{part}",
    changing(lambda m, v, y: y.float().to(y.dtype)),
    rounds="float32",
)
add(
    "scaled",
    "multiplies what the part returns by {}",
    "remove the factor (an embedding scale, a logit temperature, a residual multiplier), or give "
    "it to the reference too",
    ("embed", "attn", "ffn", "head", *NORMS, ANY),
    "{part}",
    changing(lambda m, v, y: v * y),
    values=lambda m: [
        -(2.0**3),
        -2.0,
        -0.5,
        0.03,
        0.125,
        0.5,
        0.9,
        1.1,
        2.0,
        4.0,
        8.0,
        32.0,
        128.0,
    ],
    fits=True,
)
add(
    "logit-soft-cap",
    "caps the logits at {} by a tanh",
    "remove the cap of the logits",
    "head",
    "cap",
    calling(lambda f, m, v, x: v * torch.tanh(x / v)),
    values=lambda m: [2.0**e for e in range(-3, 9)],
    fits=True,
)

add(
    "logit-soft-cap-missing",
    "does not cap the logits",
    "cap * tanh(logits / cap)",
    "head",
    "cap",
    calling(lambda f, m, v, x: x),
    values=only_in(Cap),
)

# ---- the embedding ------------------------------------------------------------------------------

add(
    "embed-scale-missing",
    "does not scale the embedding",
    "multiply it by the embedding scale, before positions are added",
    "embed",
    "scale",
    calling(lambda f, m, v, x: x),
    values=only_in(Scale),
)
add(
    "position-missing",
    "adds no positions to the embedding",
    "add the position's vector after the embedding is scaled",
    "embed",
    "position",
    calling(lambda f, m, v, x, at: x),
    values=only_in(LearnedPositions, SinusoidalPositions),
)
add(
    "position-offset",
    "adds the vectors of positions that are {} places off",
    "count positions from 0, in every segment",
    "embed",
    "position",
    calling(lambda f, m, v, x, at: f(x, (at + v).clamp(min=0, max=_last_row(m)))),
    values=lambda m: (1, -1, 2, -2) if only_in(LearnedPositions, SinusoidalPositions)(m) else (),
)
add(
    "positions-ignored",
    "adds the vectors of slots, whatever positions it is given",
    "take the vectors from the positions argument: padding and packing start again at 0",
    "embed",
    "position",
    calling(lambda f, m, v, x, at: f(x, torch.arange(at.shape[1]).expand_as(at))),
    values=only_in(LearnedPositions, SinusoidalPositions),
)
add(
    "embed-norm-missing",
    "leaves the embedding's norm out",
    "norm the embedding before the first layer",
    "embed",
    "embed_norm",
    calling(lambda f, m, v, x: x),
    values=only_in(RMSNorm, LayerNorm),
)


def _last_row(m: Any) -> int | None:
    return m.weight.shape[0] - 1 if hasattr(m, "weight") else None
