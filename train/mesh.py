"""Where arrays live: the mesh, and one resolver. What is cut how is in jaxmodel/sharding.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtwin.configs import BadInput, runs
from jaxtwin.jaxmodel.sharding import AXES, RULES, parameters, partition

__all__ = [
    "AXES",
    "RULES",
    "activations",
    "build",
    "like",
    "parameters",
    "partition",
    "replicated",
    "rows",
    "simulate",
]

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
