"""Depth: the layers one after another, scanned (compile time flat in depth) or unrolled.

torchref has no such room: there it is a plain list. Both layouts hold the same values and come
from the same table; unrolled decodes several times faster on a CPU, scanned compiles once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtwin.configs import spec as specs
from jaxtwin.jaxmodel.aux import Aux
from jaxtwin.jaxmodel.axes import Maker
from jaxtwin.jaxmodel.block import BLOCKS
from jaxtwin.jaxmodel.cache import KV, AttentionContext
from jaxtwin.jaxmodel.probe import probe_scope, run_with_probes

# What the backward pass recomputes instead of keeping: a run's choice, never the model's.
REMATS: dict[str, Callable[[Callable], Callable]] = {
    "none": lambda f: f,
    "dots": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable, prevent_cse=False
    ),
    "full": lambda f: jax.checkpoint(f, prevent_cse=False),
}


def empty(attn: specs.GQA, batch: int, slots: int, dtype: Any, stacked: tuple[int, ...] = ()) -> KV:
    shape = (*stacked, batch, slots, attn.kv, attn.width)
    return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def unstacked(auxes: list[Aux], repeats: int) -> list[Aux]:
    """What each layer of a run says, from what a scan stacks for each block of the pattern."""
    return [jax.tree.map(lambda x, i=i: x[i], aux) for i in range(repeats) for aux in auxes]


class Scanned(nnx.Module):
    """Each run is one scan over its repeats; the pattern's blocks stand in the scan's body."""

    def __init__(self, spec: specs.Model, make: Maker, remat: str):
        self.runs = nnx.List(
            nnx.List(
                self.stacked(block, make, jnp.asarray(layers))
                for block, layers in zip(run.blocks, numbers, strict=True)
            )
            for run, numbers in zip(spec.runs, spec.layer_numbers(), strict=True)
        )
        self.repeats = tuple(run.repeats for run in spec.runs)
        self.remat = REMATS[remat]

    @staticmethod
    def stacked(spec: specs.Block | specs.PostBlock, make: Maker, numbers: Array) -> Any:
        """One block whose parameters carry a leading "l"."""
        keys = jax.vmap(lambda i: jax.random.fold_in(make.key, i))(numbers)
        build = jax.vmap(lambda key: BLOCKS[type(spec)](spec, make.with_key(key)))
        block = build(keys)
        for _, param in nnx.to_flat_state(nnx.state(block, nnx.Param)):
            param.set_metadata(letters="l " + param.letters)
        return block

    def __call__(
        self, x: Float[Array, "b t d"], context: AttentionContext, cache: Any
    ) -> tuple[Float[Array, "b t d"], Any, list[Aux]]:
        def body(x: Array, layer: Any) -> tuple[Array, Any]:
            blocks, kvs = layer
            new, auxes = [], []
            for at, (block, kv) in enumerate(zip(blocks, kvs, strict=True)):
                with probe_scope(at):
                    x, kv, aux = block(x, context, kv)
                new.append(kv)
                auxes.append(aux)
            return x, (new, auxes)

        def scan(body: Callable, x: Array, layers: Any) -> tuple[Array, Any]:
            return jax.lax.scan(self.remat(body), x, layers)

        cache = cache or [[None] * len(run) for run in self.runs]
        caches, auxes = [], []
        for r, (run, kvs) in enumerate(zip(self.runs, cache, strict=True)):
            with probe_scope(f"stack/runs/{r}"):
                x, (new, stacked) = run_with_probes(scan, body, x, (list(run), kvs))
            caches.append(new)
            auxes += unstacked(stacked, self.repeats[r])
        return x, caches, auxes

    @staticmethod
    def cache(spec: specs.Model, batch: int, slots: int, dtype: Any) -> Any:
        return [
            [empty(block.attn, batch, slots, dtype, (run.repeats,)) for block in run.blocks]
            for run in spec.runs
        ]


class Unrolled(nnx.Module):
    """Every layer is a module of its own."""

    def __init__(self, spec: specs.Model, make: Maker, remat: str):
        self.layers = nnx.List(
            [BLOCKS[type(block)](block, make.child(i)) for i, block in enumerate(spec.layers)]
        )
        self.remat = REMATS[remat]

    def __call__(
        self, x: Float[Array, "b t d"], context: AttentionContext, cache: Any
    ) -> tuple[Float[Array, "b t d"], Any, list[Aux]]:
        def body(x: Array, layer: Any) -> tuple[Array, Any]:
            block, kv = layer
            x, kv, aux = block(x, context, kv)
            return x, (kv, aux)

        def once(body: Callable, x: Array, layer: Any) -> tuple[Array, Any]:
            return self.remat(body)(x, layer)

        caches, auxes = [], []
        cache = cache or [None] * len(self.layers)
        for i, layer in enumerate(zip(self.layers, cache, strict=True)):
            with probe_scope(f"stack/layers/{i}"):
                x, (kv, aux) = run_with_probes(once, body, x, layer)
            caches.append(kv)
            auxes.append(aux)
        return x, caches, auxes

    @staticmethod
    def cache(spec: specs.Model, batch: int, slots: int, dtype: Any) -> Any:
        return [empty(block.attn, batch, slots, dtype) for block in spec.layers]


LAYOUTS: dict[str, type[Scanned] | type[Unrolled]] = {"scan": Scanned, "unroll": Unrolled}
