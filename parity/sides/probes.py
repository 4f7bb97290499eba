"""The probes of both mirrors, and runs of either side that are seen from inside.

A probe has one name, torch's, on both sides: "layers.3.attn.q" is layer 3's queries after rotation,
whatever JAX's stack calls them. Rows carry values and cotangents across, as they carry weights.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from jaxtwin.configs import BadInput, Model, dataflow
from jaxtwin.configs.dataflow import Place, model_steps
from jaxtwin.configs.spec import Block, PostBlock
from jaxtwin.parity.sides import marks, terms
from jaxtwin.parity.sides.hypothesis import PlacedHypothesis
from jaxtwin.parity.sides.outcome import Trace
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, backward, forward

if TYPE_CHECKING:
    import torch

    from jaxtwin.jaxmodel.probe import Slot


# ---- where they are -----------------------------------------------------------------------------


def places(spec: Model) -> dict[str, Place]:
    """Where torchref shows each probe, in the order of computation."""
    return {name: cast(Place, step.place) for name, step in model_steps(spec).items()}


def rows(spec: Model, layout: str, shape: tuple[int, ...]) -> list[Row]:
    """The table of the probes, for an input of that (b t): jaxmodel's paths, torchref's names."""

    def block(pattern: Block | PostBlock) -> list[Row]:
        heads = {"n": pattern.attn.heads, "k": pattern.attn.kv, "h": pattern.attn.width}
        found = dataflow.steps(pattern)
        return [Row(step.name.replace(".", "/"), step.name, step.axes, heads) for step in found]

    outside = [Row(s.name, s.name, s.axes) for s in (dataflow.EMBED, dataflow.NORM, dataflow.HEAD)]
    named = [outside[0], *decoder_table.LAYOUTS[layout](spec, block), *outside[1:]]
    sizes = {"b": shape[0], "t": shape[1], "d": spec.d, "v": spec.vocab}
    return [row.sized(sizes) for row in named]


# The first number in a name, with what it is a number of: "layers.3", "transformer.h.3".
LAYER = re.compile(r"^(.*?[^.\d][^.]*?)\.(\d+)(?=\.|$)")


def layer(name: str) -> int | None:
    """The layer that a probe or a parameter belongs to; None outside the layers."""
    found = LAYER.match(name)
    return int(found[2]) if found else None


def part(name: str) -> str:
    """The name without its layer: "attn.q"; of a module of another's, with a star: "h.*.attn.q"."""
    found = LAYER.match(name)
    if not found:
        return name
    rest = name[found.end() :]
    return rest[1:] if found[1] == "layers" and rest else f"{found[1]}.*{rest}"


def in_layer(part: str, number: int | str | None) -> str:
    """The name of a part in a layer, or in layers written so; of what has none, the part itself."""
    if number is None:
        return part
    return part.replace("*", str(number), 1) if "*" in part else f"layers.{number}.{part}"


# ---- torch --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark(Place):
    """A call of `jaxtwin.probe` in torch code: `module` is the name that it gives."""


INPUT = ":in"  # after a module's name: its first argument, and not what it returns


class Hooks:
    """The probes of one torch module, on while this context is open.

    With `patched`, each value is put in place of what was computed, and each cotangent in place of
    what arrived, after they were noted. `edits` are mistakes that are made of values. With them, or
    with `everything`, `live` has all that the run has come by, on its graph and in that order: of
    each module its first argument ("NAME:in") and what it returns, and the probes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        at: Mapping[str, Place],
        patched: Trace | None,
        edits: Sequence[PlacedHypothesis] = (),
        everything: bool = False,
    ):
        self.model, self.at, self.patched = model, at, patched
        self.values: dict[str, torch.Tensor] = {}
        self.cotangents: dict[str, torch.Tensor] = {}
        self.live: dict[str, torch.Tensor] = {}
        self.edits = edits
        self.everything = everything or bool(edits)

    def __enter__(self) -> Hooks:
        self.calls = dict.fromkeys(self.at, 0)
        self.handles = []
        self.marks = {p.module: name for name, p in self.at.items() if isinstance(p, Mark)}
        self.seeing = marks.seeing(self._mark)
        self.seeing.__enter__()
        for name, place in self.at.items():
            if isinstance(place, Mark):
                continue
            module = self.model.get_submodule(place.module)
            if place.is_input:
                hook = module.register_forward_pre_hook(self._input(name, place))
            else:
                hook = module.register_forward_hook(self._output(name, place))
            self.handles.append(hook)
        if self.everything:  # after the probes' own hooks, so that it is what they put in
            for name, module in self.model.named_modules():
                self.handles.append(module.register_forward_pre_hook(self._enters(name)))
                self.handles.append(module.register_forward_hook(self._leaves(name)))
        return self

    def __exit__(self, *error: object) -> None:
        self.seeing.__exit__(None, None, None)
        for handle in self.handles:
            handle.remove()

    def _enters(self, name: str) -> Callable[..., None]:
        return lambda module, args: self._note(name + INPUT, args[0] if args else None)

    def _leaves(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, out: Any) -> None:
            with contextlib.suppress(BadInput):
                self._note(name, _first_tensor(out, name)[0])

        return hook

    def _note(self, name: str, x: Any) -> None:
        import torch

        if isinstance(x, torch.Tensor):
            self.live.setdefault(name, x)

    def _mark(self, x: torch.Tensor, called: str) -> torch.Tensor:
        name = self.marks.get(called)
        if name is None or not self._due(name, self.at[name]):
            return x
        return self._see(name, x.view_as(x) if self.patched is None else x.clone())

    def _due(self, name: str, place: Place) -> bool:
        self.calls[name] += 1
        return self.calls[name] - 1 == place.call

    def _output(self, name: str, place: Place) -> Callable[..., Any]:
        def hook(module: Any, args: Any, out: Any) -> Any:
            if not self._due(name, place):
                return out
            x, put_back = _first_tensor(out, name)
            # A part may hand on the very tensor it got, which has a probe already. So this is
            # another one: on the same memory, unless it is to be overwritten.
            return put_back(self._see(name, x.view_as(x) if self.patched is None else x.clone()))

        return hook

    def _input(self, name: str, place: Place) -> Callable[..., Any]:
        def hook(module: Any, args: Any) -> Any:
            # In place: what a module is given may be used beside it too, as a residual is.
            if not self._due(name, place):
                return args
            x, put_back = _first_tensor(args, name)
            return put_back(self._see(name, x))

        return hook

    def _see(self, name: str, x: torch.Tensor) -> torch.Tensor:
        from jaxtwin.parity.table import bridge

        for edit in self.edits:
            if name in edit.modules and edit.of_values is not None:
                x = edit.of_values(x, self.live, name).contiguous()
        self.values[name] = x.detach()
        value = cotangent = None
        if self.patched is not None:
            self.values[name] = x.detach().clone()  # what was computed, before it is overwritten
            value = bridge.to_torch(self.patched.values[name]).to(x)
            cotangent = bridge.to_torch(self.patched.cotangents[name]).to(x)
            x.data.copy_(value.view_as(x))

        def back(g: torch.Tensor) -> torch.Tensor:
            self.cotangents[name] = g.detach()
            return g if cotangent is None else cotangent.view_as(g)

        if not x.requires_grad:  # behind a stopped gradient; what arrives here is still asked for
            x.requires_grad_()
        x.register_hook(back)
        if self.everything:
            self.live[name] = x
        return x


def _first_tensor(out: Any, name: str) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """The first tensor in what a module returns, and how another is put in its place."""
    import torch

    def is_float(x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.is_floating_point()

    if is_float(out):
        return out, lambda x: x
    if isinstance(out, Mapping):
        key = next((key for key, x in out.items() if is_float(x)), None)
    elif isinstance(out, tuple | list):
        key = next((i for i, x in enumerate(out) if is_float(x)), None)
    else:
        key = None
    if key is None:
        raise BadInput(f"probe {name!r}: the module has no tensor of floats there")

    def put_back(x: torch.Tensor) -> Any:
        if isinstance(out, tuple):
            values = [x if i == key else y for i, y in enumerate(out)]
            return type(out)(*values) if hasattr(out, "_fields") else tuple(values)
        new: Any = copy.copy(out)
        new[key] = x
        return new

    return out[key], put_back


class Scored(NamedTuple):
    """An output, the losses that it is given, and the one number that is differentiated."""

    output: Any
    losses: Any
    objective: Any


def mean_of(score: Callable[[Any], Any]) -> Callable[[Any], Scored]:
    """The usual objective: the mean of the losses `score(output)`."""

    def scored(output: Any) -> Scored:
        losses = score(output)
        return Scored(output, losses, losses.mean())

    return scored


def run_torch(
    model: torch.nn.Module,
    at: Mapping[str, Place],
    call: Callable[[], Any],
    score: Callable[[Any], Scored],
    patched: Trace | None = None,
    placed: Sequence[PlacedHypothesis] = (),
) -> Trace:
    """One forward and backward: `score` is given what `call` returns.

    `placed` are mistakes; those of modules are made by whoever calls.
    """
    from jaxtwin.parity.table import bridge

    model.zero_grad()
    edits = [edit for edit in placed if edit.of_values is not None]
    with terms.Watch(model) as watch, Hooks(model, at, patched, edits) as hooks:
        output, losses, objective = score(call())
        objective.backward()
    names = [name for name in at if name in hooks.values]
    cotangents = {
        name: hooks.cotangents.get(name, hooks.values[name].new_zeros(hooks.values[name].shape))
        for name in names
    }
    grads = {
        name: (p.new_zeros(p.shape) if p.grad is None else p.grad)
        for name, p in model.named_parameters()
    }
    return Trace(
        bridge.to_numpy(output),
        bridge.to_numpy(losses),
        {name: bridge.to_numpy(g) for name, g in grads.items()},
        {name: bridge.to_numpy(hooks.values[name]) for name in names},
        {name: bridge.to_numpy(g) for name, g in cotangents.items()},
        terms=watch.terms(),
    )


# ---- JAX ----------------------------------------------------------------------------------------


class JaxRuns:
    """Runs of a JAX function of named parameters, seen from inside, in torch's names.

    `parameters` and `probes` are the tables of the two. Without `jit` each operation runs by
    itself, which for a tiny model is much the faster: nothing is compiled that runs once.
    """

    def __init__(
        self,
        apply: Callable[[Mapping[str, Any]], Any],
        params: Mapping[str, Any],
        score: Callable[[Any], Scored],
        parameters: Sequence[Row],
        probes: Sequence[Row],
        *,
        jit: bool = True,
    ):
        import jax

        self.apply, self.params, self.score = apply, dict(params), score
        self.parameters, self.probes = parameters, probes
        self.shapes = jax.eval_shape(lambda p: self._seen(p, {})[1], self.params)
        self.step = jax.jit(self._step, static_argnums=2) if jit else self._step

    def __call__(self, patched: Trace | None = None, half: str = "") -> Trace:
        """A forward and a backward; with `patched`, that run's values and cotangents are put in.

        The trace has everything, or with `half` "forward" the values alone, and with "backward" all
        but the values, for a trace is larger than the model.
        """
        put_in = {} if patched is None else self._slots(patched)
        (_, (output, losses, inside)), (grads, cotangents) = self.step(self.params, put_in, half)
        empty: dict[str, np.ndarray] = {}
        forward_only, backward_only = half == "forward", half == "backward"
        return Trace(
            np.asarray(output),
            np.asarray(losses),
            empty if forward_only else _named(self.parameters, grads, "the gradients"),
            empty if backward_only else _named(self.probes, inside, "the JAX side's probes"),
            empty if forward_only else _named(self.probes, cotangents, "the JAX side's cotangents"),
        )

    def _seen(self, params: Mapping[str, Any], slots: Mapping[str, Slot]) -> Any:
        """What the function returns, and the values at the probes that the table has."""
        import jax.numpy as jnp

        from jaxtwin.jaxmodel.probe import probing

        if not self.probes:
            return self.apply(params), {}
        with probing(slots) as context:
            output = self.apply(params)
        # Masks and positions have no cotangents, and no row in the table of the probes.
        floats = {p: x for p, x in context.values.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        return output, floats

    def _step(
        self, params: Mapping[str, Any], put_in: Mapping[str, tuple[Any, ...]], half: str
    ) -> Any:
        import jax
        import jax.numpy as jnp

        from jaxtwin.jaxmodel.probe import Slot

        def loss(params: Mapping[str, Any], seeds: Mapping[str, Any]) -> Any:
            slots = {path: Slot(seed, *put_in.get(path, ())) for path, seed in seeds.items()}
            output, values = self._seen(params, slots)
            output, losses, objective = self.score(output)
            return objective, (output, losses, values if half != "backward" else {})

        seeds = {path: jnp.zeros(x.shape, x.dtype) for path, x in self.shapes.items()}
        if half == "forward":
            return loss(params, seeds), ({}, {})
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, seeds)

    def _slots(self, patched: Trace) -> dict[str, tuple[Any, ...]]:
        """The other run's values and cotangents, by this function's paths."""
        import jax.numpy as jnp

        values = forward(self.probes, _tensors(patched.values), "the reference's probes")
        back = forward(self.probes, _tensors(patched.cotangents), "the reference's cotangents")
        return {
            path: tuple(jnp.asarray(found[path].read(), x.dtype) for found in (values, back))
            for path, x in self.shapes.items()
            if path in values
        }


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: Tensor.of(np.asarray(x)) for name, x in arrays.items()}


def _named(rows: Sequence[Row], dst: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in backward(rows, _tensors(dst), where).items()}
