"""The arguments of `jaxtwin.compare`, checked before the work: one BadInput, and no traceback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import BadInput, nearest
from jaxtwin.parity.any_model import narrowing
from jaxtwin.parity.any_model.outputs import MAIN
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, moves, prove, src_shapes

if TYPE_CHECKING:
    import torch

Function = Callable[..., Any]  # (parameters by path, *inputs)
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
    from flax import linen, nnx

    if not isinstance(module, torch.nn.Module):
        raise BadInput(f"torch_module must be a torch.nn.Module, got {_kind(module)}")
    if isinstance(side, nnx.Module):
        if params is not None:
            raise BadInput("params is for a JAX function: an NNX module has its own; leave it out")
    elif not callable(side) and not isinstance(side, linen.Module):
        raise BadInput(
            "jax_side must be an NNX or linen module or a function f(params, *inputs), "
            f"got {side!r}"
        )
    elif params is None:
        what = "linen module" if isinstance(side, linen.Module) else "JAX function"
        raise BadInput(f"a {what} needs its parameters: params={{path: array}}, nested or flat")
    for name, rows in (("table", table), ("probes", probes)):
        if not _listed(rows) or not all(isinstance(row, Row) for row in rows):
            raise BadInput(f"{name} must be a list of jaxtwin.Row, got {_kind(rows)}")
    for row in probes:
        if row.src.split(".")[0] == MAIN or row.dst.split(".")[0] == MAIN:
            raise BadInput(f"a probe cannot be called {MAIN!r}: what is returned is seen as that")
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
    import jax

    if not isinstance(params, Mapping):
        raise BadInput(f"params must be a dict {{path: array}}, got {_kind(params)}")
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(x, "shape"):
            raise BadInput(f"params has {_path(path)!r}, which holds {_kind(x)} and no array")
    flat = [_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if twice := [path for path in flat if flat.count(path) > 1]:
        raise BadInput(f"params has {twice[0]!r} twice, nested and flat")


def _path(keys: Sequence[Any]) -> str:
    """A place in nested dicts and lists as a path: "blocks/0/kernel"."""
    return "/".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in keys)


def function(side: Any, params: Any, dtype: str) -> tuple[Function, dict[str, Any], Any]:
    """A function f(parameters by path, *inputs), the parameters, and the module if it is NNX's."""
    import jax
    from flax import linen, nnx

    if isinstance(side, nnx.Module):
        model = narrowing.set_dtypes(side, dtype)
        arrays, of_arrays = _nnx(model)
        return of_arrays, arrays, model
    apply, wrapped = side, False
    if isinstance(side, linen.Module):
        wrapped = set(params) == {"params"}
        module = _linen(side, dtype)
        collection = (lambda p: p) if wrapped else (lambda p: {"params": p})
        apply = lambda p, *inputs: module.apply(collection(p), *inputs)  # noqa: E731
    found, tree = jax.tree_util.tree_flatten_with_path(params)
    prefix = "params/" if wrapped else ""
    arrays = {_path(keys).removeprefix(prefix): x for keys, x in found}

    def call(params: Mapping[str, Any], *inputs: Any) -> Any:
        return apply(jax.tree_util.tree_unflatten(tree, [params[n] for n in arrays]), *inputs)

    return reading(call, params), arrays, None


def _linen(module: Any, dtype: str) -> Any:
    """The module computing in that dtype, where it says which itself."""
    fixed = {name: dtype for name in ("dtype", "param_dtype") if getattr(module, name, None)}
    return module.clone(**fixed)


def _nnx(module: Any) -> tuple[dict[str, Any], Function]:
    """A module's parameters by path, and the function of them that it is."""
    from flax import nnx

    split: Any = nnx.split(module, nnx.Param, ...)
    graph, state, rest = split
    flat = dict(nnx.to_flat_state(state))
    paths = {"/".join(map(str, path)): path for path in flat}
    arrays = {name: flat[path].get_value() for name, path in paths.items()}

    def call(params: Mapping[str, Any], *inputs: Any) -> Any:
        new = {path: flat[path].replace(params[name]) for name, path in paths.items()}
        return nnx.merge(graph, nnx.from_flat_state(new), rest)(*inputs)

    return arrays, call


def names(rows: Sequence[Row], arrays: Mapping[str, Any], module: torch.nn.Module) -> None:
    """BadInput where the table and the parameters of either side do not fit. Rows are sized."""
    dst = {path: Tensor.of(np.asarray(x)) for path, x in arrays.items()}
    prove([(move.dst, move.dst_shape) for move in moves(rows)], dst, "the JAX side")
    src = {name: Tensor.of(p.detach().numpy()) for name, p in module.named_parameters()}
    prove(src_shapes(rows), src, "the torch side")


def reading(call: Function, params: Mapping[str, Any]) -> Function:
    """The JAX function; BadInput where it asks for a parameter that it is not given."""

    def run(flat: Mapping[str, Any], *inputs: Any) -> Any:
        try:
            return call(flat, *inputs)
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
