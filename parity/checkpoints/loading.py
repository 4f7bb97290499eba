"""A model of any source, ready in JAX: whole, or each device's slice read alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.configs.errors import nearest
from jaxtwin.parity.checkpoints import state_dict
from jaxtwin.parity.checkpoints.files import FLOATS
from jaxtwin.parity.checkpoints.opened import Source
from jaxtwin.parity.naming.names import Names, read, spec_named
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensor, Tensors, backward, forward, moves

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from jaxtwin.jaxmodel import Decoder


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

    from jaxtwin.jaxmodel import abstract, axes

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
    dst = jax_tensors(source, layout)
    model = abstract(source.spec, layout=layout)
    place = _unsharded(dtype) if mesh is None else _slices(axes.letters(model), dst, mesh, dtype)
    return axes.with_arrays(model, {path: place(path, tensor) for path, tensor in dst.items()})


def jax_tensors(source: Source, layout: str) -> dict[str, Tensor]:
    """The source's tensors by jaxmodel's paths, proven against the model itself and back."""
    from jaxtwin.jaxmodel import checkpoint

    rows = decoder_table.rows(source.spec, layout)
    arrays = forward(rows, source.tensors, source.name)
    checkpoint.prove(source.spec, layout, {p: t.shape for p, t in arrays.items()}, source.name)
    proven_back(backward(rows, arrays, source.name), source)
    return arrays


def proven_back(tensors: Tensors, source: Source) -> None:
    """The way back must end at the names and shapes it began with; if not, the rows are wrong."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != {name: tensor.shape for name, tensor in source.tensors.items()}:
        raise AssertionError(f"the table does not come back to the tensors of {source.name}")


def source_of(model: Decoder, like: Source | None = None) -> Source:
    """A jaxmodel as a source, to be converted; with the carried files and token ids of `like`."""
    from jaxtwin.jaxmodel import axes

    layout = "unroll" if hasattr(model.stack, "layers") else "scan"
    rows = decoder_table.rows(model.spec, layout)
    arrays = {path: Tensor.of(np.asarray(x)) for path, x in axes.arrays(model).items()}
    tensors = backward(rows, arrays, "the model")
    if like is not None and like.spec != model.spec:
        raise BadInput(f"{like.name} is another model: its spec is not the one to be saved")
    source = like or Source("the model", "jax", model.spec, {}, {}, {})
    origins = {name: move.dst for move in moves(rows) for name in move.src}
    return replace(source, tensors=tensors, published=arrays, origins=origins)


def adopted(state: Mapping[str, Any], spec: Model | str, names: Names) -> Source:
    """A state dict in memory, under a person's own names, as a source."""
    naming, where, notes = read(names), "the state dict", list[str]()
    model_spec = spec_named(spec) if isinstance(spec, str) else spec
    tensors, published = state_dict.mapped(state, model_spec, naming, where, notes)
    return Source(
        where,
        "state dict",
        model_spec,
        tensors,
        published,
        {row.dst: row.src for row in naming.rows(model_spec)},
        naming.where,
        notes=tuple(notes),
        naming=naming,
    )


def released(model: Decoder, names: Names) -> dict[str, np.ndarray]:
    """A jaxmodel's parameters under a person's own names, in their layout."""
    source = source_of(model)
    out = state_dict.released(source.tensors, model.spec, read(names), "the model")
    return {name: tensor.read() for name, tensor in out.items()}


Place = Callable[[str, Tensor], "jax.Array"]


def _unsharded(dtype: Any) -> Place:
    import jax.numpy as jnp

    return lambda path, tensor: jnp.array(tensor.read(), dtype=dtype)


def _slices(letters: Mapping[str, str], dst: Mapping[str, Tensor], mesh: Mesh, dtype: Any) -> Place:
    from jaxtwin.jaxmodel import sharding

    if set(mesh.axis_names) != set(sharding.AXES):
        raise BadInput(
            f"a mesh for a model has the axes {', '.join(sharding.AXES)}, each of any size (as "
            f"train.mesh.build makes it); this one has {', '.join(map(str, mesh.axis_names))}"
        )
    shapes = {path: tensor.shape for path, tensor in dst.items()}
    shardings, _ = sharding.parameters(letters, shapes, mesh)
    return lambda path, tensor: sharding.from_slices(tensor, shardings[path], dtype)
