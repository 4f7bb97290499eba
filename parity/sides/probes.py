"""The probes of both mirrors, and runs of either side that are seen from inside.

A probe has one name, torch's, on both sides: "layers.3.attn.q" is layer 3's queries after rotation,
whatever JAX's stack calls them. Rows carry values and cotangents across, as they carry weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.spec import Block, PostBlock
from jaxtwin.parity.sides import terms
from jaxtwin.parity.sides.outcome import Trace
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, backward, forward

if TYPE_CHECKING:
    import torch

    from jaxtwin.jaxmodel.probe import Slot


@dataclass(frozen=True)
class Place:
    """Where a probe sits in a torch module: the output of a submodule, or what it is given."""

    module: str
    given: bool = False  # its (first) argument, and not its output
    call: int = 0  # which call in one pass: a module may be called twice


# ---- where they are -----------------------------------------------------------------------------

# Probes of attention: name, axes in torch -> axes in JAX, and the place in torchref's layer.
ATTENTION = (
    ("attn.q", "b t n h -> b t n h", Place("attn.rotate", call=0)),
    ("attn.k", "b t k h -> b t k h", Place("attn.rotate", call=1)),
    ("attn.v", "b t (k h) -> b t k h", Place("attn.v")),
    ("attn.mixed", "b t (n h) -> b t n h", Place("attn.o", given=True)),
    ("attn", "b t d -> b t d", Place("attn")),
)
# All probes of a layer, by its wiring and in the order of computation.
LAYERS = {
    Block: (
        ("pre_attn", "b t d -> b t d", Place("pre_attn")),
        *ATTENTION,
        ("post_attn", "b t d -> b t d", Place("post_attn")),
        ("mid", "b t d -> b t d", Place("pre_ffn", given=True)),
        ("pre_ffn", "b t d -> b t d", Place("pre_ffn")),
        ("ffn", "b t d -> b t d", Place("ffn")),
        ("post_ffn", "b t d -> b t d", Place("post_ffn")),
        ("out", "b t d -> b t d", Place("")),
    ),
    PostBlock: (
        *ATTENTION,
        ("summed", "b t d -> b t d", Place("post_attn", given=True)),
        ("mid", "b t d -> b t d", Place("post_attn")),
        ("ffn", "b t d -> b t d", Place("ffn")),
        ("total", "b t d -> b t d", Place("post_ffn", given=True)),
        ("out", "b t d -> b t d", Place("post_ffn")),
    ),
}
PARTS = (
    "embed",
    *dict.fromkeys(name for probes in LAYERS.values() for name, _, _ in probes),
    "norm",
    "head",
)


def places(spec: Model) -> dict[str, Place]:
    """Every probe of torchref, in the order of computation."""
    out = {"embed": Place("embed_norm")}
    for i, block in enumerate(spec.layers):
        for name, _, at in LAYERS[type(block)]:
            module = f"layers.{i}" + (f".{at.module}" if at.module else "")
            out[f"layers.{i}.{name}"] = Place(module, at.given, at.call)
    return out | {"norm": Place("norm"), "head": Place("cap")}


def rows(spec: Model, layout: str, shape: tuple[int, ...]) -> list[Row]:
    """The table of the probes, for an input of that (b t): JAX's here, torch's there."""

    def block(pattern: Block | PostBlock) -> list[Row]:
        heads = {"n": pattern.attn.heads, "k": pattern.attn.kv, "h": pattern.attn.width}
        seen = LAYERS[type(pattern)]
        return [Row(name.replace(".", "/"), name, axes, heads) for name, axes, _ in seen]

    named = [
        Row("embed", "embed", "b t d -> b t d"),
        *decoder_table.LAYOUTS[layout](spec, block),
        Row("norm", "norm", "b t d -> b t d"),
        Row("head", "head", "b t v -> b t v"),
    ]
    sizes = {"b": shape[0], "t": shape[1], "d": spec.d, "v": spec.vocab}
    return [row.sized(sizes) for row in named]


def layer(name: str) -> int | None:
    """The layer a probe or a parameter of torchref belongs to; None outside the layers."""
    head, _, rest = name.partition(".")
    return int(rest.split(".")[0]) if head == "layers" else None


def part(name: str) -> str:
    """The name without its layer."""
    return ".".join(name.split(".")[2:]) if name.startswith("layers.") else name


# ---- torch --------------------------------------------------------------------------------------


class Hooks:
    """The probes of one torch module, on while this context is open.

    With `forced`, each value is put in place of what was computed, and each cotangent in place of
    what arrived, after they were noted.
    """

    def __init__(self, model: torch.nn.Module, at: Mapping[str, Place], forced: Trace | None):
        self.model, self.at, self.forced = model, at, forced
        self.values: dict[str, torch.Tensor] = {}
        self.cotangents: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Hooks:
        self.calls = dict.fromkeys(self.at, 0)
        self.handles = []
        for name, place in self.at.items():
            module = self.model.get_submodule(place.module)
            if place.given:
                hook = module.register_forward_pre_hook(self._given(name, place))
            else:
                hook = module.register_forward_hook(self._output(name, place))
            self.handles.append(hook)
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _due(self, name: str, place: Place) -> bool:
        self.calls[name] += 1
        return self.calls[name] - 1 == place.call

    def _output(self, name: str, place: Place) -> Callable[..., Any]:
        def hook(module: Any, args: Any, out: Any) -> Any:
            if not self._due(name, place):
                return out
            # A part may hand on the very tensor it was given, which has a probe already. So this is
            # another one: on the same memory, unless it is to be overwritten.
            return self._see(name, out.view_as(out) if self.forced is None else out.clone())

        return hook

    def _given(self, name: str, place: Place) -> Callable[..., Any]:
        def hook(module: Any, args: Any) -> Any:
            # In place: what a module is given may be used beside it too, as a residual is.
            return (self._see(name, args[0]), *args[1:]) if self._due(name, place) else args

        return hook

    def _see(self, name: str, x: torch.Tensor) -> torch.Tensor:
        from jaxtwin.parity.table import bridge

        self.values[name] = x.detach()
        value = cotangent = None
        if self.forced is not None:
            self.values[name] = x.detach().clone()  # what was computed, before it is overwritten
            value = bridge.to_torch(self.forced.values[name]).to(x)
            cotangent = bridge.to_torch(self.forced.cotangents[name]).to(x)
            x.data.copy_(value.view_as(x))

        def back(g: torch.Tensor) -> torch.Tensor:
            self.cotangents[name] = g.detach()
            return g if cotangent is None else cotangent.view_as(g)

        if not x.requires_grad:  # behind a stopped gradient; what arrives here is still asked for
            x.requires_grad_()
        x.register_hook(back)
        return x


def run_torch(
    model: torch.nn.Module,
    at: Mapping[str, Place],
    call: Callable[[], torch.Tensor],
    score: Callable[[torch.Tensor], torch.Tensor],
    forced: Trace | None = None,
) -> Trace:
    """One forward and backward: `call` gives the output, `score` the losses whose mean it is."""
    from jaxtwin.parity.table import bridge

    model.zero_grad()
    with terms.Watch(model) as watch, Hooks(model, at, forced) as hooks:
        output = call()
        losses = score(output)
        losses.mean().backward()
    seen = [name for name in at if name in hooks.values]
    cotangents = {
        name: hooks.cotangents.get(name, hooks.values[name].new_zeros(hooks.values[name].shape))
        for name in seen
    }
    grads = {
        name: (p.new_zeros(p.shape) if p.grad is None else p.grad)
        for name, p in model.named_parameters()
    }
    return Trace(
        bridge.to_numpy(output),
        bridge.to_numpy(losses),
        {name: bridge.to_numpy(g) for name, g in grads.items()},
        {name: bridge.to_numpy(hooks.values[name]) for name in seen},
        {name: bridge.to_numpy(g) for name, g in cotangents.items()},
        terms=watch.terms(),
    )


# ---- JAX ----------------------------------------------------------------------------------------


def jax_runs(
    apply: Callable[[Mapping[str, Any]], Any],
    params: Mapping[str, Any],
    score: Callable[[Any], Any],
    parameters: Sequence[Row],
    probes: Sequence[Row],
    *,
    jit: bool = True,
) -> Callable[..., Trace]:
    """Runs, forced by another's or not, of a JAX function of named parameters, in torch's names.

    run(forced, half): the trace has everything, or with `half` "forward" the values alone, and with
    "backward" all but the values, for a trace is larger than the model. `parameters` and `probes`
    are the tables of the two. Without `jit` each operation runs by itself, which for a tiny model
    is much the faster: nothing is compiled that runs once.
    """
    import jax
    import jax.numpy as jnp

    from jaxtwin.jaxmodel.probe import Slot, probing

    def seen(params: Mapping[str, Any], slots: Mapping[str, Slot]) -> Any:
        if not probes:  # nobody asked to see anything
            return apply(params), {}
        with probing(slots) as eyes:
            output = apply(params)
        return output, dict(eyes.seen)

    shapes = jax.eval_shape(lambda p: seen(p, {})[1], dict(params))

    def step(params: Mapping[str, Any], given: Mapping[str, tuple[Any, Any]], half: str) -> Any:
        def loss(params: Mapping[str, Any], seeds: Mapping[str, Any]) -> Any:
            slots = {path: Slot(seed, *given.get(path, ())) for path, seed in seeds.items()}
            output, values = seen(params, slots)
            losses = score(output)
            return losses.mean(), (output, losses, values if half != "backward" else {})

        seeds = {path: jnp.zeros(x.shape, x.dtype) for path, x in shapes.items()}
        if half == "forward":
            return loss(params, seeds), ({}, {})
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, seeds)

    compiled = jax.jit(step, static_argnums=2) if jit else step

    def run(forced: Trace | None = None, half: str = "") -> Trace:
        given: dict[str, Any] = {}
        if forced is not None:
            values = forward(probes, _tensors(forced.values), "the reference's probes")
            back = forward(probes, _tensors(forced.cotangents), "the reference's cotangents")
            given = {
                path: tuple(jnp.asarray(s[path].read(), x.dtype) for s in (values, back))
                for path, x in shapes.items()
                if path in values
            }
        (_, (output, losses, inside)), (grads, cotangents) = compiled(dict(params), given, half)
        no: dict[str, np.ndarray] = {}
        return Trace(
            np.asarray(output),
            np.asarray(losses),
            no if half == "forward" else _named(parameters, grads, "the gradients"),
            no if half == "backward" else _named(probes, inside, "the JAX side's probes"),
            no if half == "forward" else _named(probes, cotangents, "the JAX side's cotangents"),
        )

    return run


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: Tensor.of(np.asarray(x)) for name, x in arrays.items()}


def _named(rows: Sequence[Row], dst: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in backward(rows, _tensors(dst), where).items()}
