"""Feed-forward parts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxtwin.configs.spec import Glu, Mlp
from jaxtwin.jaxmodel.axes import Maker, constrain, gathered, matmul_flat
from jaxtwin.jaxmodel.bias import BIASES

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class GatedFFN(nnx.Module):
    """down(act(gate x) * up x) (arXiv 2002.05202)."""

    def __init__(self, spec: Glu, make: Maker):
        make = make.child("ffn", f=spec.hidden)
        self.gate = make.matrix("gate", "d f")
        self.up = make.matrix("up", "d f")
        self.down = make.matrix("down", "f d", std=make.residual_std)
        self.gate_bias = BIASES[spec.bias](make, "f")
        self.up_bias = BIASES[spec.bias](make, "f")
        self.down_bias = BIASES[spec.bias](make, "d")
        self.act = ACTIVATIONS[spec.act]

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        gate = self.gate_bias(matmul_flat(x, gathered(self.gate)))
        up = self.up_bias(matmul_flat(x, gathered(self.up)))
        wide = self.act(constrain(gate, "b t f")) * constrain(up, "b t f")
        return self.down_bias(matmul_flat(wide, gathered(self.down)))


class PlainFFN(nnx.Module):
    """down(act(up x)) (arXiv 1706.03762, section 3.3)."""

    def __init__(self, spec: Mlp, make: Maker):
        make = make.child("ffn", f=spec.hidden)
        self.up = make.matrix("up", "d f")
        self.down = make.matrix("down", "f d", std=make.residual_std)
        self.up_bias = BIASES[spec.bias](make, "f")
        self.down_bias = BIASES[spec.bias](make, "d")
        self.act = ACTIVATIONS[spec.act]

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        up = self.up_bias(matmul_flat(x, gathered(self.up)))
        wide = self.act(constrain(up, "b t f"))
        return self.down_bias(matmul_flat(wide, gathered(self.down)))


FFNS = {Glu: GatedFFN, Mlp: PlainFFN}
