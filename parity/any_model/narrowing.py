"""Where a JAX function computes in fewer digits than it is given, and how that is undone.

People's ports narrow inside, as `x.astype(jnp.float32)` in a norm does, and are right to. In
float64 that is a rounding of 1e-8, which no bound of float64 can hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

WIDER = {
    "float32": "float64",
    "bfloat16": "float64",
    "float16": "float64",
    "complex64": "complex128",
}


@contextlib.contextmanager
def widened() -> Iterator[None]:
    """Within: what JAX code asks to be `jnp.float32` (or narrower) is float64.

    As `own_module.widened` does for torch. What asks in another way ("float32" in quotes, NumPy's)
    stays as it is, and `places` tells of it.
    """
    import jax.numpy as jnp

    saved = {name: getattr(jnp, name) for name in WIDER}
    try:
        for name, wider in WIDER.items():
            setattr(jnp, name, getattr(jnp, wider))
        yield
    finally:
        for name, value in saved.items():
            setattr(jnp, name, value)


def set_dtypes(model: Any, dtype: str) -> Any:
    """A clone of an NNX module whose parts compute in that dtype.

    Flax's parts fix their dtype when they are made: nnx.Embed takes that of its table. A part that
    was made to compute in more digits than the rest goes on to do so.
    """
    import jax.numpy as jnp
    from flax import nnx

    new = jnp.dtype(dtype)
    stored = [x.dtype for x in _arrays(model) if jnp.issubdtype(x.dtype, jnp.floating)]
    usual = max(set(stored), key=stored.count) if stored else jnp.dtype("float32")
    model = nnx.clone(model)
    for _, part in nnx.iter_modules(model):
        for name in ("dtype", "param_dtype"):
            old = _float(getattr(part, name, None))
            if old is not None and (old == usual or old.itemsize < new.itemsize):
                setattr(part, name, new)
    return model


def _arrays(model: Any) -> list[Any]:
    import jax
    from flax import nnx

    return jax.tree.leaves(nnx.state(model, nnx.Param))


def _float(x: Any) -> Any:
    """A dtype of floats, whatever it is written as; None of anything else."""
    import jax.numpy as jnp

    if x is None or (callable(x) and not isinstance(x, type) and not hasattr(x, "dtype")):
        return None
    try:
        found = jnp.dtype(x)
    except TypeError:
        return None
    return found if jnp.issubdtype(found, jnp.floating) else None


def places(traced: Callable[[], Any], dtype: str) -> list[tuple[str, str]]:
    """The dtypes narrower than that one in which a function computes, each with where it does."""
    import jax
    import jax.numpy as jnp

    found: dict[tuple[str, str], None] = {}
    bits = jnp.finfo(dtype).bits
    for eqn in operations(jax.make_jaxpr(traced)().jaxpr):
        for out in eqn.outvars:
            kind = getattr(out.aval, "dtype", None)
            if kind is None or not jnp.issubdtype(kind, jnp.inexact):
                continue
            if jnp.finfo(kind).bits < bits and out.aval.ndim:
                found[str(np.dtype(kind)), _line(eqn)] = None
    return list(found)


def operations(jaxpr: Any) -> Iterator[Any]:
    """Every operation, those of inner functions among them."""
    from jax.extend.core import jaxprs_in_params

    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from operations(inner)


def _line(eqn: Any) -> str:
    """The line of the user's code that an operation comes from: "norm, port.py:12"."""
    ours = [str(Path(__file__).parents[2] / room) for room in ("parity", "jaxmodel")]
    frames: Iterable[Any] = getattr(eqn.source_info.traceback, "frames", ())
    for frame in frames:
        file = frame.file_name
        if "site-packages" not in file and not file.startswith(tuple(ours)):
            return f"{frame.function_name}, {Path(file).name}:{frame.line_num}"
    return "its code"
