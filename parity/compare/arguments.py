"""The arguments of `jaxtwin.compare`, checked before the work: one BadInput, and no traceback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import BadInput, nearest
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, moves, prove, src_shapes

if TYPE_CHECKING:
    import torch

DTYPES = ("float64", "float32", "bfloat16", "float16")


def call(
    module: Any,
    side: Any,
    table: Any,
    inputs: Any,
    probes: Any,
    params: Any,
    dtypes: Any,
) -> None:
    """BadInput where an argument is not of its kind."""
    import torch
    from flax import nnx

    if not isinstance(module, torch.nn.Module):
        raise BadInput(f"torch_module must be a torch.nn.Module, got {_kind(module)}")
    if isinstance(side, nnx.Module):
        if params is not None:
            raise BadInput("params is for a JAX function: an NNX module has its own; leave it out")
    elif not callable(side):
        raise BadInput(
            f"jax_side must be an NNX module or a function f(params, *inputs), got {side!r}"
        )
    elif params is None:
        raise BadInput("a JAX function needs its parameters: params={path: array}")
    for name, rows in (("table", table), ("probes", probes)):
        if not _listed(rows) or not all(isinstance(row, Row) for row in rows):
            raise BadInput(f"{name} must be a list of jaxtwin.Row, got {_kind(rows)}")
    _inputs(inputs)
    if params is not None:
        _params(params)
    if not _listed(dtypes):
        raise BadInput(f"dtypes must be a list such as ['float64', 'float32'], got {dtypes!r}")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise BadInput(f"dtypes has {dtype!r}; {nearest(str(dtype), DTYPES)}")


def _inputs(inputs: Any) -> None:
    if not _listed(inputs):
        raise BadInput(
            f"inputs must be a list with one array for each argument, got {_kind(inputs)}; "
            "for a single one write inputs=[x]"
        )
    for i, x in enumerate(inputs):
        try:
            array = np.asarray(x)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInput(f"inputs[{i}] cannot be made a NumPy array: {error}") from None
        if array.dtype.kind not in "biuf":
            raise BadInput(f"inputs[{i}] is {_kind(x)} of {array.dtype}, and no array of numbers")


def _params(params: Any) -> None:
    if not isinstance(params, Mapping):
        raise BadInput(f"params must be a dict {{path: array}}, got {_kind(params)}")
    for path, x in params.items():
        if not isinstance(path, str) or isinstance(x, Mapping):
            raise BadInput(
                f"params is flat, with paths such as 'head/kernel' that the table has too; "
                f"{path!r} holds {_kind(x)}"
            )


def names(rows: Sequence[Row], arrays: Mapping[str, Any], module: torch.nn.Module) -> None:
    """BadInput where the table and the parameters of either side do not fit. Rows are sized."""
    dst = {path: Tensor.of(np.asarray(x)) for path, x in arrays.items()}
    prove([(move.dst, move.dst_shape) for move in moves(rows)], dst, "the JAX side")
    src = {name: Tensor.of(p.detach().numpy()) for name, p in module.named_parameters()}
    prove(src_shapes(rows), src, "the torch side")


def reading(side: Callable[..., Any]) -> Callable[..., Any]:
    """The JAX function; BadInput where it asks for a parameter that it is not given."""

    def run(params: Mapping[str, Any], *inputs: Any) -> Any:
        try:
            return side(params, *inputs)
        except KeyError as error:
            name = error.args[0] if error.args else None
            if not isinstance(name, str) or name in params:
                raise
            raise BadInput(
                f"the JAX function asks for {name!r}, which params does not have "
                f"({nearest(name, params)}); add it, and its row to the table"
            ) from error

    return run


def _listed(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str | bytes)


def _kind(x: Any) -> str:
    name, shape = type(x).__name__, getattr(x, "shape", None)
    article = "an" if name[0] in "aeiouAEIOU" or name.startswith("nd") else "a"
    return f"{article} {name}" + (f" of shape {tuple(shape)}" if shape is not None else "")
