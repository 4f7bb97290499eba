"""A model of any source, ready in JAX: whole, or each device's slice read alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from configs import BadInput
from configs.errors import nearest
from parity.convert import jax_tensors
from parity.files import FLOATS
from parity.source import Source
from parity.tensors import Tensor

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding

    from jaxmodel import Decoder


def decoder(
    source: Source, *, mesh: Mesh | None = None, layout: str = "scan", dtype: Any = None
) -> Decoder:
    """The source as a jaxmodel Decoder, filled array by array, in its own dtype unless given.

    With a mesh, arrays are cut as `train` cuts them, and the host holds one slice at a time: it is
    read from the file, put on every device that needs it, and let go. Whole arrays are read only
    where the source gives no slices (an .npz).

    BadInput for float64 while JAX would narrow it, and for a mesh that does not fit the model.
    """
    import jax
    import jax.numpy as jnp

    from jaxmodel import abstract, axes

    try:
        wanted = jnp.dtype(source.dtype if dtype is None else dtype)
    except TypeError:
        raise BadInput(
            f"there is no dtype {dtype!r}; {nearest(str(dtype), map(str, FLOATS.values()))}"
        ) from None
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise BadInput(
            f"{source.name} is to be {wanted}, which JAX would narrow; set JAX_ENABLE_X64=1 or "
            "ask for float32"
        )
    here = jax_tensors(source, layout)
    model = abstract(source.spec, layout=layout)
    place = _whole(dtype) if mesh is None else _slices(axes.letters(model), here, mesh, dtype)
    return axes.with_arrays(model, {path: place(path, tensor) for path, tensor in here.items()})


Place = Callable[[str, Tensor], "jax.Array"]


def _whole(dtype: Any) -> Place:
    import jax.numpy as jnp

    return lambda path, tensor: jnp.array(tensor.read(), dtype=dtype)


def _slices(
    letters: Mapping[str, str], here: Mapping[str, Tensor], mesh: Mesh, dtype: Any
) -> Place:
    from jaxmodel import sharding

    if set(mesh.axis_names) != set(sharding.AXES):
        raise BadInput(
            f"a mesh for a model has the axes {', '.join(sharding.AXES)}, each of any size (as "
            f"train.mesh.build makes it); this one has {', '.join(map(str, mesh.axis_names))}"
        )
    shapes = {path: tensor.shape for path, tensor in here.items()}
    shardings, _ = sharding.parameters(letters, shapes, mesh)
    return lambda path, tensor: sharded(tensor, shardings[path], dtype)


def sharded(tensor: Tensor, sharding: NamedSharding, dtype: Any = None) -> jax.Array:
    """The tensor as an array cut that way; each distinct slice is read once."""
    import jax

    dtype = tensor.dtype if dtype is None else dtype
    whole = tensor.read() if tensor.slices is None else None
    places: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(tensor.shape).items():
        sizes = zip(index or (), tensor.shape, strict=True)
        places.setdefault(tuple(at.indices(size)[:2] for at, size in sizes), []).append(device)
    parts = []
    for bounds, devices in places.items():
        index = tuple(slice(*bound) for bound in bounds)
        part = tensor.part(index) if whole is None else whole[index]
        part = np.array(part, dtype)  # its own memory, which a device may take over
        parts += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(tensor.shape, sharding, parts)
