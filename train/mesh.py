"""Where arrays live: the mesh, one table from letters to mesh axes, and one resolver.

Both of the table's columns are about the same letters. A parameter's model width is cut by fsdp; an
activation has its rows cut by data and fsdp already, so its width stays whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from configs import LEGEND, BadInput, nearest, runs

AXES = ("data", "fsdp", "tensor")


@dataclass(frozen=True)
class Rule:
    """The mesh axes that cut a letter, in a parameter and in an activation.

    `whole`: where the size does not divide by the mesh axis, every device holds all of it. Without
    it that is an error, because a vocabulary or width kept whole is a memory surprise.
    """

    parameter: tuple[str, ...] = ()
    activation: tuple[str, ...] = ()
    whole: bool = False


RULES = {
    "b": Rule(activation=("data", "fsdp")),
    "t": Rule(),
    "s": Rule(),
    "d": Rule(parameter=("fsdp",)),
    "n": Rule(("tensor",), ("tensor",), whole=True),
    "k": Rule(("tensor",), ("tensor",), whole=True),
    "h": Rule(),
    "f": Rule(("tensor",), ("tensor",)),
    "e": Rule(),
    "v": Rule(("tensor",), ("tensor",)),
    "l": Rule(),
    "m": Rule(),
    "r": Rule(),
}

# Eight simulated devices share a few cores, so one of them can reach a collective minutes after
# another. XLA's own time limits would abort the process.
PATIENCE = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 300,
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
    "xla_cpu_collective_timeout_seconds": 3600,
}


def simulate(devices: int) -> None:
    """Makes this process see that many CPU devices. Call it before JAX is first used.

    BadInput when JAX has started already with fewer.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    more = [f"--{flag}={seconds}" for flag, seconds in PATIENCE.items() if flag not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *more]).strip()
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:  # JAX runs already
        have = jax.devices()
        if have[0].platform != "cpu" or len(have) < devices:
            raise BadInput(
                f"{devices} CPU devices cannot be simulated: JAX has started with {len(have)} "
                f"{have[0].platform}; start a fresh process"
            ) from None


def build(shape: runs.Mesh) -> Mesh:
    """The mesh over the first devices of the machine, or a BadInput if it has too few."""
    have = jax.devices()
    if shape.devices > len(have):
        raise BadInput(
            f"mesh {shape.data}x{shape.fsdp}x{shape.tensor} needs {shape.devices} devices and this "
            f"machine has {len(have)} ({have[0].platform}); make it smaller, or set devices = "
            f"{shape.devices} to simulate them on the CPU"
        )
    if jax.process_count() > 1 and shape.devices != len(have):
        raise BadInput(f"the mesh has {shape.devices} devices, but the hosts together {len(have)}")
    return jax.make_mesh(
        (shape.data, shape.fsdp, shape.tensor),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=have[: shape.devices],
    )


def partition(
    letters: str, shape: tuple[int, ...], column: str, mesh: Mesh
) -> tuple[PartitionSpec, list[str]]:
    """How an array with those letters is cut, and the letters that stay whole for want of dividing.

    `column` is "parameter" or "activation". ValueError on an unknown letter, on a mesh axis used
    twice and on letters that do not fit the shape; BadInput where a size does not divide.
    """
    names = letters.split()
    if len(names) != len(shape):
        raise ValueError(f"letters {letters!r} do not fit the shape {shape}")
    cuts: list[tuple[str, ...] | None] = []
    used: dict[str, str] = {}
    whole = []
    for name, size in zip(names, shape, strict=True):
        if name not in RULES:
            raise ValueError(f"letter {name!r} of {letters!r} is unknown; {nearest(name, RULES)}")
        axes = getattr(RULES[name], column)
        for axis in axes:
            if axis in used:
                raise ValueError(
                    f"{letters!r}: {used[axis]} and {name} would both be cut by {axis}"
                )
            used[axis] = name
        ways = math.prod(mesh.shape[axis] for axis in axes)
        if size % ways and not RULES[name].whole:
            raise BadInput(
                f"{LEGEND[name]} {name}={size} does not divide by {_product(axes, mesh)}"
            )
        if size % ways:
            whole.append(name)
        cuts.append(axes if axes and size % ways == 0 else None)
    return PartitionSpec(*cuts), whole


def parameters(
    letters: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], mesh: Mesh
) -> tuple[dict[str, NamedSharding], list[str]]:
    """Every parameter's sharding by its path, and a line for each letter that stays whole.

    One BadInput with every parameter that does not divide.
    """
    out: dict[str, NamedSharding] = {}
    notes: dict[str, None] = {}
    problems = []
    for path, names in letters.items():
        try:
            spec, whole = partition(names, shapes[path], "parameter", mesh)
        except BadInput as problem:
            problems.append(f"  {path}: {problem}")
            continue
        out[path] = NamedSharding(mesh, spec)
        for name in whole:
            size = shapes[path][names.split().index(name)]
            ways = _product(RULES[name].parameter, mesh)
            notes[f"{size} {LEGEND[name]} do not divide by {ways}: each device holds them all"] = (
                None
            )
    if problems:
        raise BadInput("the mesh does not fit the model:\n" + "\n".join(problems))
    return out, list(notes)


def rows(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: "b t", rows cut and time whole."""
    return NamedSharding(mesh, PartitionSpec(RULES["b"].activation, None))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def activations(mesh: Mesh) -> Callable[[jax.Array, str], jax.Array]:
    """The resolver to install with `jaxmodel.axes.resolving` where a step is traced."""

    def resolve(x: jax.Array, letters: str) -> jax.Array:
        spec, _ = partition(letters, x.shape, "activation", mesh)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return resolve


def like(tree: Any, mesh: Mesh, shardings: Mapping[str, NamedSharding]) -> Any:
    """Shardings for a tree that holds whole sets of parameters (moments) and lone numbers (counts).

    A dict keyed by exactly the parameters' paths is cut as they are; the rest is replicated.
    """

    def is_set(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == shardings.keys()

    def one(node: Any) -> Any:
        return dict(shardings) if is_set(node) else replicated(mesh)

    return jax.tree.map(one, tree, is_leaf=is_set)


def _product(axes: tuple[str, ...], mesh: Mesh) -> str:
    return " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
