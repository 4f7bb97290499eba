"""Feed-forward parts. Each returns its output and its Aux (aux.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from jaxtwin.configs import own_parts
from jaxtwin.configs import spec as specs
from jaxtwin.configs.spec import Glu, Mlp
from jaxtwin.torchref.aux import NO_AUX, Aux

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of that name: built in, or a person's own."""
    registered = own_parts.ACTIVATIONS.get(name)
    return ACTIVATIONS[name] if registered is None else registered.torch


class GatedFFN(nn.Module):
    """down(act(gate x) * up x) (arXiv 2002.05202)."""

    def __init__(self, spec: Glu, model: specs.Model):
        super().__init__()
        self.gate = nn.Linear(model.d, spec.hidden, bias=spec.bias)
        self.up = nn.Linear(model.d, spec.hidden, bias=spec.bias)
        self.down = nn.Linear(spec.hidden, model.d, bias=spec.bias)
        self.act = activation(spec.act)

    def forward(self, x: Float[Tensor, "b t d"]) -> tuple[Float[Tensor, "b t d"], Aux]:
        return self.down(self.act(self.gate(x)) * self.up(x)), NO_AUX


class PlainFFN(nn.Module):
    """down(act(up x)) (arXiv 1706.03762, section 3.3)."""

    def __init__(self, spec: Mlp, model: specs.Model):
        super().__init__()
        self.up = nn.Linear(model.d, spec.hidden, bias=spec.bias)
        self.down = nn.Linear(spec.hidden, model.d, bias=spec.bias)
        self.act = activation(spec.act)

    def forward(self, x: Float[Tensor, "b t d"]) -> tuple[Float[Tensor, "b t d"], Aux]:
        return self.down(self.act(self.up(x))), NO_AUX


FFNS = {Glu: GatedFFN, Mlp: PlainFFN}
