"""Feed-forward parts. Each returns its output and its Aux (aux.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxtwin.configs import own_parts
from jaxtwin.configs.spec import Glu, Mlp
from jaxtwin.jaxmodel.aux import NO_AUX, Aux
from jaxtwin.jaxmodel.axes import Maker, constrain, gathered, matmul_flat
from jaxtwin.jaxmodel.bias import Bias
from jaxtwin.jaxmodel.skip import Skip

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def activation(name: str) -> Callable[[Array], Array]:
    """The function of that name: built in, or a person's own."""
    registered = own_parts.ACTIVATIONS.get(name)
    return ACTIVATIONS[name] if registered is None else registered.jax


class GatedFFN(nnx.Module):
    """down(act(gate x) * up x) (arXiv 2002.05202)."""

    def __init__(self, spec: Glu, make: Maker):
        make = make.child("ffn", f=spec.hidden)
        self.gate = make.matrix("gate", "d f")
        self.up = make.matrix("up", "d f")
        self.down = make.matrix("down", "f d", std=make.residual_std)
        self.gate_bias = Bias(make, "f") if spec.bias else Skip()
        self.up_bias = Bias(make, "f") if spec.bias else Skip()
        self.down_bias = Bias(make, "d") if spec.bias else Skip()
        self.act = activation(spec.act)

    def __call__(self, x: Float[Array, "b t d"]) -> tuple[Float[Array, "b t d"], Aux]:
        gate = self.gate_bias(matmul_flat(x, gathered(self.gate)))
        up = self.up_bias(matmul_flat(x, gathered(self.up)))
        wide = self.act(constrain(gate, "b t f")) * constrain(up, "b t f")
        return self.down_bias(matmul_flat(wide, gathered(self.down))), NO_AUX


class PlainFFN(nnx.Module):
    """down(act(up x)) (arXiv 1706.03762, section 3.3)."""

    def __init__(self, spec: Mlp, make: Maker):
        make = make.child("ffn", f=spec.hidden)
        self.up = make.matrix("up", "d f")
        self.down = make.matrix("down", "f d", std=make.residual_std)
        self.up_bias = Bias(make, "f") if spec.bias else Skip()
        self.down_bias = Bias(make, "d") if spec.bias else Skip()
        self.act = activation(spec.act)

    def __call__(self, x: Float[Array, "b t d"]) -> tuple[Float[Array, "b t d"], Aux]:
        up = self.up_bias(matmul_flat(x, gathered(self.up)))
        wide = self.act(constrain(up, "b t f"))
        return self.down_bias(matmul_flat(wide, gathered(self.down))), NO_AUX


FFNS = {Glu: GatedFFN, Mlp: PlainFFN}
