"""Probes: named places of a forward pass where a value is seen, or another one put in.

`probe(x, "attn/q")` is the identity and leaves no trace in the program unless a context is open.
Then the value goes out under its path, its cotangent comes back as the gradient of a seed that is
never read, and either can be replaced (activation patching). Patched everywhere with a reference's
values, every part works on the reference's inputs, so its local error is seen apart from the error
that it was handed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jaxtyping import Array


class Slot(NamedTuple):
    """What is put in at one probe. Under a scan every array has the stacked layers in front."""

    seed: Array  # zeros of the value's shape; its gradient is the cotangent that arrived
    value: Array | None = None  # goes on instead of what was computed
    cotangent: Array | None = None  # goes back instead of what arrived


class ProbeContext:
    """What is put in, and what came out, by path."""

    def __init__(self, slots: Mapping[str, Slot], path: str = ""):
        self.slots, self.path = dict(slots), path
        self.values: dict[str, Array] = {}


_context: ContextVar[ProbeContext | None] = ContextVar("probes", default=None)


@contextlib.contextmanager
def probing(slots: Mapping[str, Slot], path: str = "") -> Iterator[ProbeContext]:
    """While open, the probes are on. Open it inside what is differentiated or jitted."""
    token = _context.set(ProbeContext(slots, path))
    try:
        yield _context.get()  # type: ignore[misc]
    finally:
        _context.reset(token)


@contextlib.contextmanager
def probe_scope(name: str | int) -> Iterator[None]:
    """While open, the paths of probes go on with this name."""
    context = _context.get()
    if context is None:
        yield
        return
    path, context.path = context.path, f"{context.path}{name}/"
    try:
        yield
    finally:
        context.path = path


def probe(x: Array, name: str, repeats: bool = False) -> Array:
    """x, seen under the name. ValueError where a name comes twice.

    With `repeats` it may: a part that is called twice shows what the first call is handed.
    """
    context = _context.get()
    if context is None:
        return x
    path = context.path + name
    if path in context.values:
        if repeats:
            return x
        raise ValueError(f"two probes are called {path!r}")
    context.values[path] = x
    slot = context.slots.get(path)
    if slot is None:
        return x
    value = x if slot.value is None else slot.value.astype(x.dtype)
    return _tap(x, slot.seed, value, slot.cotangent)


@jax.custom_vjp
def _tap(x: Array, seed: Array, value: Array, cotangent: Array | None) -> Array:
    return value


def _tap_forward(x: Array, seed: Array, value: Array, cotangent: Array | None) -> tuple[Array, Any]:
    return value, (cotangent, value)


def _tap_backward(kept: Any, arrived: Array) -> tuple[Array, Array, Array, Array | None]:
    cotangent, value = kept
    passed_on = arrived if cotangent is None else cotangent.astype(arrived.dtype)
    zeros_like = jax.numpy.zeros_like
    return (
        passed_on,
        arrived,
        zeros_like(value),
        None if cotangent is None else zeros_like(cotangent),
    )


_tap.defvjp(_tap_forward, _tap_backward)


def run_with_probes(
    run: Callable[[Callable, Any, Any], tuple[Any, Any]], body: Callable, x: Any, layers: Any
) -> tuple[Any, Any]:
    """run(body, x, layers), where `run` is a scan or a remat, with the probes inside let out.

    What such a transformation traces cannot reach out of it, so slots and values pass through as
    arguments and results of the body.
    """
    context = _context.get()
    if context is None:
        return run(body, x, layers)

    def probed(x: Any, both: Any) -> tuple[Any, Any]:
        layer, slots = both
        with probing(slots, context.path) as inner:
            x, out = body(x, layer)
        return x, (out, inner.values)

    mine = {path: slot for path, slot in context.slots.items() if path.startswith(context.path)}
    x, (out, values) = run(probed, x, (layers, mine))
    context.values.update(values)
    return x, out
