"""Mistakes of rotary positions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jaxtwin.parity.diagnose.hypotheses.base import add, calling, setting
from jaxtwin.torchref.position import PAIRS, SCALINGS, Rotary, split_adjacent

ROTATED = ("attn.q", "attn.k")
Frequency = Callable[[int], list[float]]


def _rotary(*values: Any) -> Callable[[nn.Module], Sequence[Any]]:
    return lambda m: values if isinstance(m, Rotary) else ()


def _other_pairs(module: Any, value: Any, at: int) -> Any:
    other = "half" if module.split is split_adjacent else "adjacent"
    return PAIRS[other][at]


def _based(module: Any, base: float) -> Frequency:
    """The frequencies of another base, scaled as they are."""
    scaling = module.frequency.args[0]
    plain = [base ** (-i / module.width) for i in range(0, module.width, 2)]
    return functools.partial(module.frequency.func, scaling, base, plain)


def _times(module: Any, factor: float) -> Frequency:
    right = module.frequency
    return lambda length: [factor * f for f in right(length)]


def _scaled(module: Any, other: Any) -> Frequency:
    """The frequencies as another scaling, or none, makes them."""
    _, base, plain = module.frequency.args
    return functools.partial(SCALINGS[type(other)], other, base, plain)


def _scaling(module: Any) -> Any:
    return module.frequency.args[0] if isinstance(module, Rotary) else None


add(
    "rope-pairing",
    "turns the other coordinate pairs (adjacent where half-split belongs, or the reverse)",
    "use the pairing that the weights were stored for, or permute the rows of q and k",
    ROTATED,
    "attn.rotate",
    setting(split=lambda m, v: _other_pairs(m, v, 0), join=lambda m, v: _other_pairs(m, v, 1)),
    values=_rotary(None),
)
add(
    "rope-missing",
    "does not rotate q and k",
    "apply rotary positions to q and k in these layers",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: x),
    values=_rotary(None),
)
add(
    "rope-backwards",
    "turns q and k the wrong way (the sign of the angle)",
    "check the sign of sin: first * cos - second * sin, first * sin + second * cos",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: f(x, -at)),
    values=_rotary(None),
)
add(
    "position-offset",
    "takes angles from positions that are {} places off",
    "count positions from 0, in every segment",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: f(x, at + v)),
    values=_rotary(1, -1, 2, -2),
)
add(
    "position-off-by-one",
    "counts every position after the first one place too far",
    "count positions from 0 without a gap",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: f(x, at + (at > 0))),
    values=_rotary(None),
)
add(
    "positions-ignored",
    "counts positions by slot, whatever positions it is given",
    "take the angles from the positions argument: padding and packing start again at 0",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: f(x, torch.arange(at.shape[1]).expand_as(at))),
    values=_rotary(None),
)
add(
    "rope-float32",
    "computes the rotation in float32",
    "keep angles, cos and sin in the input's dtype where that is float64",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: f(x.float(), at).to(x.dtype)),
    values=_rotary(None),
    rounds="float32",
)


def _narrow(module: Any, width: int, x: Tensor, at: Tensor) -> Tensor:
    """The first coordinates alone, turned as a head of that width would be."""
    base = module.frequency.args[1]
    angle = at[..., None].to(x.dtype) * torch.tensor(
        [base ** (-i / width) for i in range(0, width, 2)], dtype=x.dtype
    )
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    first, second = module.split(x)
    return module.join(first * cos - second * sin, first * sin + second * cos)


add(
    "rope-partial",
    "turns only the first {} coordinates of a head",
    "rotate the whole head width",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: torch.cat((_narrow(m, v, x[..., :v], at), x[..., v:]), -1)),
    values=lambda m: list(range(2, m.width, 2)) if isinstance(m, Rotary) else (),
)
add(
    "rope-scaling-missing",
    "does not scale the rotary frequencies",
    "apply the rope scaling of the configuration",
    ROTATED,
    "attn.rotate",
    setting(frequency=lambda m, v: _scaled(m, None), magnitude=lambda m, v: 1.0),
    values=lambda m: () if _scaling(m) is None else (None,),
)
add(
    "rope-magnitude-missing",
    "does not multiply cos and sin by the scaling's magnitude",
    "multiply both by the attention factor (YaRN, LongRoPE)",
    ROTATED,
    "attn.rotate",
    setting(magnitude=lambda m, v: 1.0),
    values=lambda m: () if getattr(m, "magnitude", 1.0) == 1 else (None,),
)
add(
    "rope-magnitude-twice",
    "multiplies cos and sin by the scaling's magnitude twice",
    "the attention factor in the configuration is final",
    ROTATED,
    "attn.rotate",
    setting(magnitude=lambda m, v: m.magnitude**2),
    values=lambda m: () if getattr(m, "magnitude", 1.0) == 1 else (None,),
)
add(
    "rope-whole",
    "turns the whole head where a part of it turns",
    "rotate the first coordinates alone, and leave the others",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: _narrow(m, x.shape[-1], x, at)),
    values=lambda m: (None,) if isinstance(m, Rotary) else (),
)
add(
    "rope-base",
    "uses the RoPE base {}",
    "read the base from the checkpoint's own configuration",
    ROTATED,
    "attn.rotate",
    setting(frequency=_based),
    values=_rotary(*(10.0**e for e in (1, 2, 3, 3.5, 4, 4.25, 4.5, 5, 5.5, 6, 6.5, 7, 8))),
    fits=True,
)
add(
    "position-scaled",
    "multiplies positions by {}",
    "remove the scaling of positions (or give the reference the same rope scaling)",
    ROTATED,
    "attn.rotate",
    setting(frequency=_times),
    values=_rotary(*(2.0**e for e in range(-6, 4))),
    fits=True,
)
