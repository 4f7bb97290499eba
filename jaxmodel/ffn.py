"""Feed-forward parts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from configs.spec import Glu
from jaxmodel.axes import Maker, constrain, used

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class GatedFFN(nnx.Module):
    """down(act(gate x) * up x) (arXiv 2002.05202)."""

    def __init__(self, spec: Glu, make: Maker):
        make = make.within("ffn", f=spec.hidden)
        self.gate = make.matrix("gate", "d f")
        self.up = make.matrix("up", "d f")
        self.down = make.matrix("down", "f d", std=make.residual_std)
        self.act = ACTIVATIONS[spec.act]

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        gate = constrain(jnp.einsum("btd,df->btf", x, used(self.gate)), "b t f")
        up = constrain(jnp.einsum("btd,df->btf", x, used(self.up)), "b t f")
        return jnp.einsum("btf,fd->btd", self.act(gate) * up, used(self.down))


FFNS = {Glu: GatedFFN}
