"""One part at a time on either mirror: NumPy in, NumPy out, so that one test serves both.

Weights have torchref's names and layout; the JAX side takes them through the table. The JAX parts
run under jit, for what XLA makes of them is what counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jaxtwin.configs import GQA, Glu, Mlp, Rope
from jaxtwin.configs.llama import llama
from jaxtwin.configs.spec import Norm
from jaxtwin.jaxmodel import attention as jax_attention
from jaxtwin.jaxmodel import axes, cache
from jaxtwin.jaxmodel import ffn as jax_ffn
from jaxtwin.jaxmodel import norm as jax_norm
from jaxtwin.jaxmodel import position as jax_position
from jaxtwin.parity.table import bridge, decoder_table, tensors
from jaxtwin.torchref import attention as torch_attention
from jaxtwin.torchref import ffn as torch_ffn
from jaxtwin.torchref import norm as torch_norm
from jaxtwin.torchref import position as torch_position

Weights = Mapping[str, np.ndarray]


class TorchSide:
    """A part of torchref."""

    name = "torchref"
    activations = torch_ffn.ACTIVATIONS

    def _run(self, room: Any, spec: Any, d: Any, weights: Weights, *args: np.ndarray) -> np.ndarray:
        part = room[type(spec)](spec, d)
        state = {k: bridge.to_torch(v) for k, v in weights.items()}
        part.load_state_dict(state, assign=True)
        out = part(*map(bridge.to_torch, args))
        return bridge.to_numpy(out[0] if isinstance(out, tuple) else out)

    def norm(self, spec: Norm, weights: Weights, x: np.ndarray) -> np.ndarray:
        return self._run(torch_norm.NORMS, spec, x.shape[-1], weights, x)

    def ffn(self, spec: Glu | Mlp, weights: Weights, x: np.ndarray) -> np.ndarray:
        return self._run(torch_ffn.FFNS, spec, any_model(x.shape[-1]), weights, x)

    def attention(
        self, spec: GQA, weights: Weights, x: np.ndarray, positions: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        room = torch_attention.ATTENTIONS
        return self._run(room, spec, any_model(x.shape[-1]), weights, x, positions, mask)

    def rotate(
        self, spec: Rope | None, x: np.ndarray, positions: np.ndarray, frequency: Any = None
    ) -> np.ndarray:
        part = torch_position.ROTARIES[type(spec)](spec, x.shape[-1])
        if frequency is not None:
            part.frequency = lambda length: list(frequency)
        return bridge.to_numpy(part(bridge.to_torch(x), bridge.to_torch(positions)))

    def act(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.activations[name](torch.from_numpy(x)).numpy()


class JaxSide:
    """A part of jaxmodel."""

    name = "jaxmodel"
    activations = jax_ffn.ACTIVATIONS

    def _part(self, room: Any, spec: Any, d: int, weights: Weights) -> Any:
        make = axes.Maker(jax.random.key(0), jnp.dtype("float32"), 0.02, 0.01, {"d": d})
        part = room[type(spec)](spec, make)
        rows = [
            replace(row, sizes={"d": d, **row.sizes})
            for row in decoder_table.ROWS[type(spec)](spec)
        ]
        src = {k: tensors.Tensor.of(v) for k, v in weights.items()}
        for path, tensor in tensors.forward(rows, src, "the test's weights").items():
            attrgetter(path.replace("/", "."))(part).set_value(jnp.asarray(tensor.read()))
        return part

    def norm(self, spec: Norm, weights: Weights, x: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            part = self._part(jax_norm.NORMS, spec, x.shape[-1], weights)
            return np.asarray(nnx.jit(lambda part, x: part(x))(part, jnp.asarray(x)))

    def ffn(self, spec: Glu | Mlp, weights: Weights, x: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            part = self._part(jax_ffn.FFNS, spec, x.shape[-1], weights)
            return np.asarray(nnx.jit(lambda part, x: part(x)[0])(part, jnp.asarray(x)))

    def attention(
        self, spec: GQA, weights: Weights, x: np.ndarray, positions: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        with jax.enable_x64(True):
            part = self._part(jax_attention.ATTENTIONS, spec, x.shape[-1], weights)
            start = jnp.zeros((), jnp.int32)
            at = jnp.asarray(positions)
            seen = cache.AttentionContext(at, at, at.max() + 1, start, jnp.asarray(mask))
            return np.asarray(nnx.jit(lambda part, x: part(x, seen, None)[0])(part, jnp.asarray(x)))

    def rotate(
        self, spec: Rope | None, x: np.ndarray, positions: np.ndarray, frequency: Any = None
    ) -> np.ndarray:
        with jax.enable_x64(True):
            part = jax_position.ROTARIES[type(spec)](spec, x.shape[-1])
            if frequency is not None:
                part.frequency = tuple(frequency)
            turned = jax.jit(lambda x, at: part(x, at, at.max() + 1))(
                jnp.asarray(x), jnp.asarray(positions)
            )
            return np.asarray(turned)

    def act(self, name: str, x: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            return np.asarray(jax.jit(self.activations[name])(jnp.asarray(x)))


SIDES = (TorchSide(), JaxSide())


def any_model(d: int) -> Any:
    """A spec of width d: torchref's parts read no more of it."""
    return llama(
        vocab=1,
        d=d,
        layers=1,
        heads=1,
        kv=1,
        hidden=1,
        max_len=1,
        base=1.0,
        pairs="half",
        eps=0.0,
        tied=True,
        width=2,
    )
