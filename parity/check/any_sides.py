"""The sides of a comparison of any models: a torch module and a JAX function, with probes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import BadInput
from jaxtwin.parity.compare import arguments
from jaxtwin.parity.sides import settings
from jaxtwin.parity.sides.outcome import Trace
from jaxtwin.parity.sides.probes import JaxRuns, Place, mean_of, run_torch
from jaxtwin.parity.table import axis_ops
from jaxtwin.parity.table.row import Row

if TYPE_CHECKING:
    import torch

    from jaxtwin.parity.sides.hypothesis import PlacedHypothesis

INPUT = ":in"  # after a submodule's name: its first argument, and not what it returns


def weighing(shape: tuple[int, ...]) -> np.ndarray:
    """Fixed random weights: the loss is the output's mean with them, so every element counts."""
    return np.random.default_rng(0).normal(size=shape)


@dataclass(frozen=True)
class TorchSide:
    """A torch module on its inputs, run with probes, that can be made to commit mistakes."""

    model: torch.nn.Module
    places: Mapping[str, Place]
    inputs: Sequence[torch.Tensor]
    order: np.ndarray | None = None  # of the rows, where it is another

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        probes: Sequence[Row],
        inputs: Sequence[np.ndarray],
        dtype: str,
    ) -> TorchSide:
        """A copy in that dtype, in eval mode. BadInput where a probe names no submodule."""
        import torch

        kind = getattr(torch, dtype)
        model = copy.deepcopy(module).to(kind).eval()
        known = dict(model.named_modules())
        places = {}
        for row in probes:
            name = row.src.removesuffix(INPUT)
            if name not in known:
                raise BadInput(f"probe {row.src!r}: the torch module has no submodule {name!r}")
            places[row.src] = Place(name, is_input=row.src.endswith(INPUT))
        arrays = [torch.from_numpy(np.array(x)) for x in inputs]
        return cls(model, places, [x.to(kind) if x.is_floating_point() else x for x in arrays])

    def reordered(self, order: np.ndarray | None) -> TorchSide:
        if order is None:
            return self
        return replace(self, inputs=[x[order] for x in self.inputs], order=order)

    def jittered(self, seed: int) -> TorchSide:
        """With every parameter moved by up to half a unit in its last place: rounded otherwise."""
        import torch

        if not seed:
            return self
        draw = torch.Generator().manual_seed(seed)
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for p in model.parameters():
                share = torch.rand(p.shape, generator=draw).to(p) - 0.5
                p.add_(p * share * torch.finfo(p.dtype).eps)
        return replace(self, model=model)

    def run(self, patched: Trace | None = None, placed: Sequence[PlacedHypothesis] = ()) -> Trace:
        """Forward and backward; with `patched`, each part is fed that run's values."""
        import torch

        from jaxtwin.parity.sides.hypothesis import committing

        def score(output: torch.Tensor) -> torch.Tensor:
            weights = weighing(tuple(output.shape))
            weights = weights if self.order is None else weights[self.order]
            return output * torch.from_numpy(weights).to(output)

        with committing(self.model, placed) if placed else nullcontext():
            return run_torch(
                self.model, self.places, lambda: self.model(*self.inputs), mean_of(score), patched
            )


@dataclass(frozen=True)
class JaxSide:
    """A JAX function on its inputs, run with probes."""

    run: Callable[[Trace | None, np.ndarray | None], Trace]  # patched by, rows in this order
    arrays: Mapping[str, Any]  # its parameters as they are stored, by path
    settings: Callable[[], settings.Snapshot]

    @classmethod
    def of(
        cls,
        side: Any,
        params: Mapping[str, Any] | None,
        rows: Sequence[Row],
        probes: Sequence[Row],
        inputs: Sequence[np.ndarray],
        dtype: str,
        jit: bool,
    ) -> JaxSide:
        """An NNX module, or a function f(params, *inputs) with its `params`, in that dtype."""
        import jax.numpy as jnp
        from flax import nnx

        model = side if isinstance(side, nnx.Module) else None
        if model is not None:
            arrays, call = _nnx(model)
        else:
            arrays, call = dict(params or {}), arguments.reading(side)
        cast = {path: jnp.asarray(x).astype(dtype) for path, x in arrays.items()}
        converted = [jnp.asarray(x) for x in inputs]
        floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in converted]
        xs = [x.astype(dtype) if f else x for x, f in zip(converted, floating, strict=True)]

        def run(patched: Trace | None, order: np.ndarray | None) -> Trace:
            ordered = [x if order is None else x[order] for x in xs]

            def score(output: Any) -> Any:
                weights = weighing(output.shape)
                weights = weights if order is None else weights[order]
                return output * jnp.asarray(weights, output.dtype)

            runs = JaxRuns(lambda p: call(p, *ordered), cast, mean_of(score), rows, probes, jit=jit)
            return runs(patched)

        def read() -> settings.Snapshot:
            found = settings.jax_side(cast.values(), lambda: call(cast, *xs), model)
            return found | {"jit": found["jit"] and jit}

        return cls(run, arrays, read)


def _nnx(module: Any) -> tuple[dict[str, Any], Callable[..., Any]]:
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


def sized(rows: Sequence[Row], tensors: Mapping[str, Any]) -> list[Row]:
    """The rows with the sizes of their single letters, read off torch's tensors."""
    out = []
    for row in rows:
        sizes = dict(row.sizes)
        for move in row.moves():
            if move.src[0] in tensors:
                groups = axis_ops.axes(axis_ops.sides(row.pattern)[0])
                shape = tensors[move.src[0]].shape
                if len(groups) != len(shape):
                    raise BadInput(f"{row.src}: {row.pattern!r} is not of its shape {shape}")
                sizes |= {g: n for g, n in zip(groups, shape, strict=True) if "(" not in g}
        out.append(replace(row, sizes=sizes))
    return out
