"""Parameters declared once, as letters, sizes and initialiser; and the model at rest as arrays.

The letters (`configs.LEGEND`) give a parameter its shape and travel with it as metadata, from which
`sharding` derives how it is cut. The model itself knows no mesh: `constrain` is a no-op until a
trainer installs its resolver.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Maker:
    """Declares parameters while a model is built.

    Every parameter draws from a key of its own, folded from its name, so the values depend on the
    seed and the name alone: scanned or unrolled, sharded or not, the same seed is the same model.
    """

    key: jax.Array
    dtype: jnp.dtype
    std: float
    residual_std: float  # matrices that write into the residual stream: std / sqrt(2 layers)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def child(self, name: str | int, **sizes: int) -> Maker:
        """The maker for a named part (or a numbered layer), which may add sizes of its own."""
        fold = name if isinstance(name, int) else zlib.crc32(name.encode())
        key = jax.random.fold_in(self.key, fold)
        return replace(self, key=key, sizes={**self.sizes, **sizes})

    def with_key(self, key: jax.Array) -> Maker:
        return replace(self, key=key)

    def matrix(self, name: str, letters: str, std: float | None = None) -> nnx.Param:
        """Normal values of the given spread (the model's own where none is given)."""
        shape = tuple(self.sizes[a] for a in letters.split())
        values = draw(self.child(name).key, shape, std or self.std, self.dtype)
        return nnx.Param(values, letters=letters)

    def full(self, letters: str, value: float) -> nnx.Param:
        """The same value everywhere: a scale's 1, a bias's 0."""
        shape = tuple(self.sizes[a] for a in letters.split())
        return nnx.Param(jnp.full(shape, value, self.dtype), letters=letters)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def draw(key: jax.Array, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> jax.Array:
    """Normal values, always compiled as one: op by op, the last bit of some would be another."""
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)


def params(model: nnx.Module) -> dict[str, nnx.Param]:
    """Every parameter by its path, e.g. "stack/runs/0/0/attn/q"; metadata included."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): param for path, param in flat}


def arrays(model: nnx.Module) -> dict[str, Any]:
    """Every parameter's value by its path: arrays, or shapes of an abstract model."""
    return {path: param.get_value() for path, param in params(model).items()}


def letters(model: nnx.Module) -> dict[str, str]:
    """Every parameter's letters by its path, the stacked "l" in front where there is one."""
    return {path: param.letters for path, param in params(model).items()}


def with_arrays(model: Any, values: Mapping[str, Any]) -> Any:
    """The (abstract or real) model with every parameter replaced; all paths must be given."""
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    paths = {"/".join(map(str, path)): path for path in flat}
    if paths.keys() != values.keys():
        odd = sorted(paths.keys() ^ values.keys())
        raise ValueError(f"parameters and values differ in {len(odd)} paths, e.g. {odd[:3]}")
    new = {path: flat[path].replace(values[name]) for name, path in paths.items()}
    return nnx.merge(graph, nnx.from_flat_state(new))


Resolver = Callable[[jax.Array, str], jax.Array]
_resolver: ContextVar[Resolver] = ContextVar("resolver", default=lambda x, letters: x)


def constrain(x: jax.Array, letters: str) -> jax.Array:
    """An activation with its axes named, for whoever shards it; the identity when nobody does."""
    return _resolver.get()(x, letters)


def gathered(param: nnx.Param) -> jax.Array:
    """A parameter's value at the place of use, where it is named as an activation is.

    So a trainer gathers a layer's d (cut by fsdp) just before the layer and at no other time;
    left to itself, the partitioner was seen to move the activations instead, whole.
    """
    value = param.get_value()
    names = param.letters.split()
    return constrain(value, " ".join(names[len(names) - value.ndim :]))  # in a scan without its l


def matmul_flat(x: jax.Array, w: jax.Array) -> jax.Array:
    """x (... i) times w (i ...), with all rows on one axis and all columns on another.

    The same product as an einsum over the axes as they are, but XLA on a CPU has a faster kernel
    for it, and one that sums a weight's gradient over the rows with 1.3 times torch's error and not
    up to 1.8 times.
    """
    flat = x.reshape(-1, w.shape[0]) @ w.reshape(w.shape[0], -1)
    return flat.reshape(*x.shape[:-1], *w.shape[1:])


@contextlib.contextmanager
def resolving(resolver: Resolver) -> Iterator[None]:
    """Within: `constrain` calls the resolver. Install it where the step is traced."""
    token = _resolver.set(resolver)
    try:
        yield
    finally:
        _resolver.reset(token)
