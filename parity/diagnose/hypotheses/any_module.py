"""Mistakes in modules of anybody's: offered by what a module is, whatever it is called."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from jaxtwin.parity.diagnose.hypotheses.base import ANY, Forward, add, calling, setting

EPS = ("eps", "epsilon", "variance_epsilon", "norm_eps")


def _eps(m: Any) -> str:
    """The attribute of a module that is its eps; "" where it has none."""
    return next((name for name in EPS if isinstance(getattr(m, name, None), float)), "")


def _scaling(m: Any) -> bool:
    """Whether a module's one parameter is a scale of the last axis: a norm's without a bias."""
    shapes = [p.ndim for p in m._parameters.values() if p is not None]
    return shapes == [1] and m._parameters.get("weight") is not None and not m._modules


def _pairs(m: nn.Module) -> Sequence[str]:
    """Two parts of a module that could stand for one another, as "w1 and w3"."""
    alike = [
        f"{one} and {two}"
        for (one, a), (two, b) in itertools.combinations(m.named_children(), 2)
        if type(a) is type(b)
        and [p.shape for p in a.parameters()] == [p.shape for p in b.parameters()] != []
    ]
    return alike[:12]


def _exchanged(m: nn.Module, pair: str) -> None:
    one, two = pair.split(" and ")
    parts = dict(m.named_children())
    m.__dict__.update({one: parts[two], two: parts[one]})


add(
    "norm-eps",
    "uses the eps {}",
    "give it the eps that torch's module has (torch's LayerNorm has 1e-5, Flax's norms 1e-6)",
    ANY,
    "{part}",
    lambda m, v: m.__dict__.update({_eps(m): v}),
    values=lambda m: [10.0**e for e in range(-12, 1)] if _eps(m) else (),
    fits=True,
)
add(
    "norm-plus-one",
    "scales by 1 + w where w is stored",
    "scale by the stored weight",
    ANY,
    "{part}",
    setting(weight=lambda m, v: 1 + m._parameters["weight"]),
    values=lambda m: (None,) if _scaling(m) else (),
)
add(
    "norm-scale-missing",
    "does not apply the scale",
    "multiply by the stored weight",
    ANY,
    "{part}",
    setting(weight=lambda m, v: torch.ones_like(m._parameters["weight"])),
    values=lambda m: (None,) if _scaling(m) else (),
)
add(
    "norm-missing",
    "gives back what it is given: the part is left out",
    "apply it here",
    ANY,
    "{part}",
    calling(lambda f, m, v, x: x),
    values=lambda m: (None,) if _eps(m) else (),
)
add(
    "parts-exchanged",
    "uses {} for one another",
    "look which of the two is activated, and which matrix comes first in the file",
    ANY,
    "{part}",
    _exchanged,
    values=_pairs,
)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: x.clamp(min=0),
    "identity": lambda x: x,
}


class _Activating(TorchFunctionMode):
    """Within: whatever activation torch code calls is another."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(f, "__name__", "").rstrip("_") in ("silu", "gelu", "relu"):
            return ACTIVATIONS[self.name](args[0])
        return f(*args, **(kwargs or {}))


def _activated(f: Forward, m: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    with _Activating(name):
        return f(*args, **kwargs)


add(
    "gelu-flavour",
    "uses the {} GELU",
    "torch's nn.GELU is exact, jax.nn.gelu the tanh approximation unless approximate=False",
    ANY,
    "{part}",
    setting(approximate=lambda m, v: v),
    values=lambda m: (
        [v for v in ("none", "tanh") if v != m.approximate] if isinstance(m, nn.GELU) else ()
    ),
)
add(
    "activation",
    "uses the activation {}",
    "give it the activation that torch's module calls",
    ANY,
    "{part}",
    calling(_activated),
    values=lambda m: list(ACTIVATIONS),
)
add(
    "bias-missing",
    "leaves the bias out",
    "add the bias",
    ANY,
    "{part}",
    calling(lambda f, m, v, x: F.linear(x, m.weight)),
    values=lambda m: (None,) if isinstance(m, nn.Linear) and m.bias is not None else (),
)
add(
    "matrix-transposed",
    "multiplies by the transposed matrix",
    "torch's Linear stores (out, in): x @ weight.T",
    ANY,
    "{part}",
    calling(lambda f, m, v, x: F.linear(x, m.weight.T, m.bias)),
    values=lambda m: (
        (None,) if isinstance(m, nn.Linear) and m.in_features == m.out_features else ()
    ),
)
