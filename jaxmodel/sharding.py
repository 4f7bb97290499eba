"""How parameters and activations are sharded over a mesh: one table from letters to mesh axes.

Both of the table's columns are about the same letters. A parameter's model width is cut by fsdp; an
activation has its rows cut by data and fsdp already, so its width stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtwin.configs import LEGEND, BadInput, nearest
from jaxtwin.jaxmodel.lazy import Lazy

AXES = ("data", "fsdp", "tensor")


@dataclass(frozen=True)
class Rule:
    """The mesh axes that cut a letter, in a parameter and in an activation.

    `replicate_if_indivisible`: where the size does not divide by the mesh axis, every device holds
    all of it. Without it that is an error: a vocabulary or width kept whole is a memory surprise.
    """

    parameter: tuple[str, ...] = ()
    activation: tuple[str, ...] = ()
    replicate_if_indivisible: bool = False


RULES = {
    "b": Rule(activation=("data", "fsdp")),
    "t": Rule(),
    "s": Rule(),
    "d": Rule(parameter=("fsdp",)),
    "n": Rule(("tensor",), ("tensor",), replicate_if_indivisible=True),
    "k": Rule(("tensor",), ("tensor",), replicate_if_indivisible=True),
    "h": Rule(),
    "f": Rule(("tensor",), ("tensor",)),
    "e": Rule(),
    "v": Rule(("tensor",), ("tensor",)),
    "l": Rule(),
    "m": Rule(),
    "r": Rule(),
}


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
    cut_by: dict[str, str] = {}
    replicated = []
    for name, size in zip(names, shape, strict=True):
        if name not in RULES:
            raise ValueError(f"letter {name!r} of {letters!r} is unknown; {nearest(name, RULES)}")
        axes = getattr(RULES[name], column)
        for axis in axes:
            if axis in cut_by:
                raise ValueError(
                    f"{letters!r}: {cut_by[axis]} and {name} would both be sharded over {axis}"
                )
            cut_by[axis] = name
        ways = math.prod(mesh.shape[axis] for axis in axes)
        if size % ways and not RULES[name].replicate_if_indivisible:
            raise BadInput(
                f"{LEGEND[name]} {name}={size} is not divisible by {_product(axes, mesh)}"
            )
        if size % ways:
            replicated.append(name)
        cuts.append(axes if axes and size % ways == 0 else None)
    return PartitionSpec(*cuts), replicated


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
            spec, replicated = partition(names, shapes[path], "parameter", mesh)
        except BadInput as problem:
            problems.append(f"  {path}: {problem}")
            continue
        out[path] = NamedSharding(mesh, spec)
        for name in replicated:
            size = shapes[path][names.split().index(name)]
            ways = _product(RULES[name].parameter, mesh)
            notes[
                f"{size} {LEGEND[name]} are not divisible by {ways}: replicated on every device"
            ] = None
    if problems:
        raise BadInput("the mesh does not fit the model:\n" + "\n".join(problems))
    return out, list(notes)


def from_slices(array: Lazy | np.ndarray, sharding: NamedSharding, dtype: Any = None) -> jax.Array:
    """The array, sharded so; each distinct slice is read once, put on its devices and let go.

    A lazy array that cannot be read in slices (its `slices` is None) is read whole, once.
    """
    dtype = array.dtype if dtype is None else dtype
    read: Callable[[Any], np.ndarray]
    if isinstance(array, np.ndarray):
        read = array.__getitem__
    elif getattr(array, "slices", True) is None:
        read = array.read().__getitem__
    else:
        read = array.part
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        sizes = zip(index or (), array.shape, strict=True)
        devices.setdefault(tuple(at.indices(size)[:2] for at, size in sizes), []).append(device)
    parts = []
    for bounds, holders in devices.items():
        part = read(tuple(slice(*bound) for bound in bounds))
        part = np.array(part, dtype)  # its own memory, which a device may take over
        parts += [jax.device_put(part, device) for device in holders]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def _product(axes: tuple[str, ...], mesh: Mesh) -> str:
    return " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
