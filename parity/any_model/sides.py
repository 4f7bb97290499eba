"""The sides of a comparison of any models: a torch module and a JAX function, with probes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import BadInput, nearest
from jaxtwin.parity.any_model import arguments, narrowing, outputs
from jaxtwin.parity.any_model.outputs import Output, Pair
from jaxtwin.parity.sides import marks, own_module, settings
from jaxtwin.parity.sides.hypothesis import PlacedHypothesis, committing
from jaxtwin.parity.sides.outcome import Trace
from jaxtwin.parity.sides.probes import INPUT, Hooks, JaxRuns, Mark, Place, Scored, run_torch
from jaxtwin.parity.table import axis_ops
from jaxtwin.parity.table.row import Row

if TYPE_CHECKING:
    import torch


def weighing(shape: tuple[int, ...]) -> np.ndarray:
    """Fixed random weights: the loss is the output's mean with them, so every element counts."""
    return np.random.default_rng(0).normal(size=shape)


def scored(
    leaves: Mapping[str, Any], order: np.ndarray | None, convert: Callable[[np.ndarray, Any], Any]
) -> Scored:
    """The main output, and the mean of all outputs with fixed weights, in rows of that order."""
    losses = []
    for leaf in leaves.values():
        weights = weighing(tuple(leaf.shape))
        weights = weights if order is None else weights[order]
        losses.append((leaf * convert(weights, leaf)).mean())
    return Scored(leaves[outputs.MAIN], losses[0], sum(losses[1:], losses[0]))


@dataclass(frozen=True)
class TorchSide:
    """A torch module on its inputs, run with probes, that can be made to commit mistakes.

    `narrow` is what computed in fewer digits in a run in float64, as far as that was seen.
    """

    model: torch.nn.Module
    inputs: Sequence[torch.Tensor]
    dtype: str
    places: Mapping[str, Place] = field(default_factory=dict)
    pairs: Sequence[Pair] = ()
    order: np.ndarray | None = None  # of the rows, where it is another
    narrow: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, module: torch.nn.Module, inputs: Sequence[np.ndarray], dtype: str) -> TorchSide:
        """A copy in that dtype, in eval mode; whatever its buffers are of, they go on to be."""
        import torch

        kind = getattr(torch, dtype)
        model = getattr(copy.deepcopy(module), own_module.CASTS[str(kind)])().eval()
        side = cls(model, [cls._input(x, kind) for x in inputs], dtype)
        if dtype == "float64":
            low = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
            held = [(n, x.dtype) for n, x in module.named_buffers() if x.dtype in low]
            side.narrow.extend(f"its buffer {name} is {_plain(kind)}" for name, kind in held)
            side._widen_complex()
        return side

    @staticmethod
    def _input(x: np.ndarray, kind: torch.dtype) -> torch.Tensor:
        import torch

        found = torch.from_numpy(np.array(x))
        return found.to(kind) if found.is_floating_point() else found

    def _widen_complex(self) -> None:
        import torch

        for module in self.model.modules():
            for name, x in module._buffers.items():
                if x is not None and x.dtype == torch.complex64:
                    module._buffers[name] = x.to(torch.complex128)

    def probed(self, probes: Sequence[Row]) -> tuple[TorchSide, list[Output]]:
        """With its probes placed; and what its forward returns.

        A probe is a call of `jaxtwin.probe` in torch code or a submodule. BadInput where there is
        neither of that name.
        """
        import torch

        called: list[str] = []

        def see(x: Any, name: str) -> Any:
            if name in called:
                raise BadInput(f"two probes are called {name!r} in the torch module")
            called.append(name)
            return x

        with torch.no_grad(), marks.seeing(see), self.widened():
            returned = self.model(*self.inputs)
        places: dict[str, Place] = {}
        known = dict(self.model.named_modules())
        for row in probes:
            name = row.src.removesuffix(INPUT)
            if row.src in called:
                places[row.src] = Mark(row.src)
            elif name in known:
                places[row.src] = Place(name, is_input=row.src.endswith(INPUT))
            else:
                raise BadInput(
                    f"probe {row.src!r}: the torch module has no submodule {name!r} and calls no "
                    f"jaxtwin.probe of that name; {nearest(name, [*called, *filter(None, known)])}"
                )
        floats = outputs.listed(returned, lambda x: isinstance(x, torch.Tensor) and _is_float(x))
        return replace(self, places=places), floats

    def returning(self, pairs: Sequence[Pair]) -> TorchSide:
        """With its outputs as probes, and all places in the order of computation."""
        places = {**self.places, **{p.name: Mark(p.name) for p in pairs}}
        side = replace(self, pairs=pairs, places=places)
        with self.widened(), Hooks(self.model, places, None) as hooks:
            side._call()
        return replace(side, places={name: places[name] for name in hooks.values})

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

        def score(leaves: Any) -> Scored:
            return scored(leaves, self.order, lambda w, x: torch.from_numpy(w).to(x))

        with self.widened() as mode, committing(self.model, placed):
            trace = run_torch(self.model, self.places, self._call, score, patched, placed)
        if mode is not None:
            self.narrow.extend(x for x in mode.narrow if x not in self.narrow)
        return trace

    def inside(self, patched: Trace, placed: Sequence[PlacedHypothesis]) -> dict[str, Any]:
        """Every tensor of a run, in the order of computation: modules' inputs and outputs, probes.

        By place: "NAME:in", "NAME", and a probe's name.
        """
        edits = [edit for edit in placed if edit.of_values is not None]
        with (
            self.widened(),
            committing(self.model, placed),
            Hooks(self.model, self.places, patched, edits, everything=True) as hooks,
        ):
            self._call()
        return {name: x.detach() for name, x in hooks.live.items()}

    def _call(self) -> dict[str, Any]:
        """What the forward returns, by the names of the outputs that are compared."""
        returned = self.model(*self.inputs)
        return {p.name: marks.mark(outputs.at(returned, p.torch), p.name) for p in self.pairs}

    def widened(self) -> Any:
        """Within: in a comparison in float64, what its code narrows is float64."""
        return own_module.widened() if self.dtype == "float64" else nullcontext()


def _is_float(x: Any) -> bool:
    return bool(x.is_floating_point())


def _plain(kind: Any) -> str:
    return str(kind).removeprefix("torch.")


@dataclass(frozen=True)
class JaxSide:
    """A JAX function of named parameters, and its inputs, in one dtype."""

    call: Callable[..., Any]  # (params by path, *inputs)
    arrays: Mapping[str, Any]  # its parameters as they are stored, by path
    inputs: Sequence[Any]
    dtype: str
    jit: bool
    model: Any = None  # an NNX module
    rows: Sequence[Row] = ()
    probes: Sequence[Row] = ()
    pairs: Sequence[Pair] = ()

    @classmethod
    def of(
        cls, side: Any, params: Any, inputs: Sequence[np.ndarray], dtype: str, jit: bool
    ) -> JaxSide:
        """An NNX or linen module, or a function f(params, *inputs), in that dtype."""
        import jax.numpy as jnp

        call, arrays, model = arguments.function(side, params, dtype)
        converted = [jnp.asarray(x) for x in inputs]
        floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in converted]
        xs = [x.astype(dtype) if f else x for x, f in zip(converted, floating, strict=True)]
        return cls(call, arrays, xs, dtype, jit, model)

    @property
    def cast(self) -> dict[str, Any]:
        """Its parameters in that dtype."""
        import jax.numpy as jnp

        return {path: jnp.asarray(x).astype(self.dtype) for path, x in self.arrays.items()}

    def returned(self) -> list[Output]:
        """What it returns: arrays of floats."""
        import jax
        import jax.numpy as jnp

        with self._widened():
            shapes = jax.eval_shape(lambda p: self.call(p, *self.inputs), self.cast)
        return outputs.listed(shapes, lambda x: jnp.issubdtype(x.dtype, jnp.floating))

    def narrow(self) -> list[tuple[str, str]]:
        """Dtypes of fewer digits in which it computes, each with the line."""
        cast = self.cast
        with self._widened():
            return narrowing.places(lambda: self.call(cast, *self.inputs), self.dtype)

    def run(self, patched: Trace | None, order: np.ndarray | None = None) -> Trace:
        """Forward and backward, patched by that run, on rows in this order."""
        import jax.numpy as jnp

        from jaxtwin.jaxmodel.probe import probe, probing

        xs = [x if order is None else x[order] for x in self.inputs]

        def call(params: Mapping[str, Any]) -> Any:
            # Without rows for its probes they are not asked for.
            with nullcontext() if self.probes else probing({}):
                returned = self.call(params, *xs)
            return {p.name: probe(outputs.at(returned, p.jax), p.name) for p in self.pairs}

        def score(leaves: Any) -> Scored:
            return scored(leaves, order, lambda weights, x: jnp.asarray(weights, x.dtype))

        probes = [*self.probes, *map(_output_row, self.pairs)]
        with self._widened():
            return JaxRuns(call, self.cast, score, self.rows, probes, jit=self.jit)(patched)

    def settings(self) -> settings.Snapshot:
        cast = self.cast
        with self._widened():
            found = settings.jax_side(
                cast.values(), lambda: self.call(cast, *self.inputs), self.model
            )
        return found | {"jit": found["jit"] and self.jit}

    def _widened(self) -> Any:
        return narrowing.widened() if self.dtype == "float64" else ExitStack()


def _output_row(pair: Pair) -> Row:
    sizes = {f"x{i}": n for i, n in enumerate(pair.shape)}
    axes = " ".join(sizes)
    return Row(pair.name, pair.name, f"{axes} -> {axes}", sizes)


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
