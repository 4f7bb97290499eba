"""A model at rest: the spec beside its arrays, in one folder that is whole or not there.

    FOLDER/jaxtwin.json     {"format": 1, "spec": {...}, "layout": "scan" | "unroll", "files": []}
    FOLDER/tokenizer.json   ... and whatever other small files the writer was handed
    FOLDER/<step>/          an Orbax step; its "params" are the model's arrays by path

A converted model is a training checkpoint at step 0 without optimizer state, so every reader takes
the parameters of the newest complete step. Orbax moves the bytes and commits a step whole. What it
leaves to its caller is refused here: it would take a step without its commit marker for a good one,
and cast to whatever dtype it is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from jaxtwin.configs import BadInput, atomic_write, nearest
from jaxtwin.configs.spec import Model, from_json, to_json
from jaxtwin.jaxmodel import axes, stream
from jaxtwin.jaxmodel.model import Decoder, abstract
from jaxtwin.jaxmodel.stack import LAYOUTS

FORMAT = 1
HEADER = "jaxtwin.json"
PARAMS = "params"
COMMITTED = "commit_success.txt"  # Orbax writes it last, on every kind of file system


@dataclass(frozen=True)
class Saved:
    """What a folder holds, from its headers alone."""

    spec: Model
    layout: str
    step: int
    shapes: dict[str, jax.ShapeDtypeStruct]
    chunks: dict[str, tuple[int, ...]]  # what is read of an array at least


def write(
    folder: str | os.PathLike[str],
    spec: Model,
    layout: str,
    arrays: Mapping[str, Any],
    *,
    step: int = 0,
    carry: Mapping[str, bytes] | None = None,
) -> None:
    """Writes the model's arrays (by path) as a folder of ours, complete or not at all.

    All work happens in a hidden sibling that is renamed at the end: a killed write leaves no folder
    that reads as complete. The arrays are held once and not copied. BadInput when the folder exists
    and is not empty, when a carried name is not a plain one, or when the arrays are not the
    spec's.
    """
    arrays = dict(arrays)
    prove(spec, layout, {path: x.shape for path, x in arrays.items()}, f"the model for {folder}")
    _refuse_names(carry or {})
    with _appearing(Path(folder)) as hidden:  # absolute: Orbax takes no other
        with stream.SAVING, storage():
            try:
                ocp.save_checkpointables(hidden / str(step), {PARAMS: arrays})
            except Exception as error:  # of many kinds
                raise atomic_write.Unwritable(error) from error
        _write_header(hidden, spec, layout, carry or {})  # last: nothing reads a folder without it


def write_lazily(
    folder: str | os.PathLike[str],
    spec: Model,
    layout: str,
    arrays: Mapping[str, stream.Lazy],
    *,
    carry: Mapping[str, bytes] | None = None,
) -> None:
    """As `write`, at step 0, of arrays not yet read: they are read as they are written.

    In memory at a time: two layers of a stack, or two pieces of another array and all of it.
    """
    prove(spec, layout, {path: x.shape for path, x in arrays.items()}, f"the model for {folder}")
    letters = axes.letters(abstract(spec, layout=layout))
    stacks = {path for path, names in letters.items() if names.split()[0] == "l"}
    _refuse_names(carry or {})
    with _appearing(Path(folder)) as hidden:
        stream.write(hidden / "0", PARAMS, arrays, stacks)
        _write_header(hidden, spec, layout, carry or {})


def begin(
    folder: str | os.PathLike[str],
    spec: Model,
    layout: str,
    *,
    carry: Mapping[str, bytes] | None = None,
) -> None:
    """The folder with its header and carried files and no step yet: the start of a training run.

    It reads as incomplete until a step is committed into it. Refuses what `write` refuses.
    """
    _refuse_names(carry or {})
    with _appearing(Path(folder)) as hidden:
        _write_header(hidden, spec, layout, carry or {})


def describe(folder: str | os.PathLike[str], *, step: int | None = None) -> Saved:
    """What the folder holds at that step (the newest complete one), no array read.

    BadInput when it is not one of ours, has no (such) complete step, or its arrays are not the
    spec's.
    """
    folder = Path(folder).absolute()
    spec, layout = header(folder)
    known = steps(folder)
    if not known:
        raise BadInput(f"{folder} has no complete step: it was never saved to, or half written")
    if step is None:
        step = known[-1]
    if step not in known:
        raise BadInput(f"{folder} has no complete step {step}; complete: {known}")
    stored = contents(folder / str(step)).get(PARAMS, {})
    with readable(folder / str(step)):  # what is no array has no shape
        shapes = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in stored.items()}
        chunks = {path: _chunk(x) for path, x in stored.items()}
    prove(spec, layout, {path: x.shape for path, x in shapes.items()}, f"{folder / str(step)}")
    return Saved(spec, layout, step, shapes, chunks)


def _chunk(stored: Any) -> tuple[int, ...]:
    told = stored.storage_metadata
    return tuple(stored.shape if told is None or told.chunk_shape is None else told.chunk_shape)


def read(
    folder: str | os.PathLike[str],
    paths: Iterable[str] | None = None,
    *,
    step: int | None = None,
    shardings: Any = None,
) -> dict[str, Any]:
    """The arrays of those paths (all of them unless given), bit for bit as they were stored.

    NumPy arrays, or jax arrays where `shardings` (one, or one for each path) says which device
    needs which part; then only those parts are read. BadInput on an unknown path, on damaged files,
    and on float64 asked for as a jax array while x64 is off: JAX would narrow it without a word.
    """
    saved = describe(folder, step=step)
    paths = list(saved.shapes if paths is None else paths)
    for path in paths:
        if path not in saved.shapes:
            raise BadInput(f"{folder} holds no {path!r}; {nearest(path, saved.shapes)}")
    if not paths:
        return {}
    where = Path(folder).absolute() / str(saved.step)
    if shardings is None:
        wanted: dict[str, Any] = dict.fromkeys(paths, np.ndarray)
    else:
        each = shardings if isinstance(shardings, Mapping) else dict.fromkeys(paths, shardings)
        refuse_narrowing(saved.shapes, paths, where)
        wanted = {
            path: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=each[path])
            for path in paths
            for s in [saved.shapes[path]]
        }
    with readable(where), storage(partial=True):
        return ocp.load_checkpointables(where, {PARAMS: wanted})[PARAMS]


def parts(
    folder: str | os.PathLike[str], saved: Saved
) -> dict[str, Callable[[stream.Index], np.ndarray]]:
    """What reads each array at an index alone, bit for bit, in whole chunks (see `Saved`).

    Empty for a step that Orbax was told to store otherwise than `storage` does.
    """
    where = Path(folder).absolute() / str(saved.step)
    with readable(where):
        if not stream.usual(where, PARAMS):
            return {}
    context = ts.Context(stream.CONTEXT)

    def guarded(path: str) -> Callable[[stream.Index], np.ndarray]:
        read = stream.reader(where, PARAMS, path, context)

        def part(index: stream.Index) -> np.ndarray:
            with readable(where):
                return read(index)

        return part

    return {path: guarded(path) for path in saved.shapes}


def load(
    folder: str | os.PathLike[str], *, layout: str | None = None, dtype: Any = None
) -> Decoder:
    """The decoder of the newest complete step.

    In the stored layout and dtype unless others are given. BadInput as `read`, and for float64
    values while x64 is off unless `dtype` asks for a narrower one.
    """
    saved = describe(folder)
    if dtype is None:
        refuse_narrowing(saved.shapes, saved.shapes, folder)
    layout = saved.layout if layout is None else layout
    values = relaid(saved.spec, read(folder, step=saved.step), saved.layout, layout)
    arrays = {path: jax.numpy.asarray(x, dtype) for path, x in values.items()}
    return axes.with_arrays(abstract(saved.spec, layout=layout), arrays)


def header(folder: str | os.PathLike[str]) -> tuple[Model, str]:
    """The spec and layout that the folder's jaxtwin.json declares, or a BadInput."""
    path = Path(folder) / HEADER
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"{folder} is not a checkpoint of ours: it has no {HEADER}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    if (
        not isinstance(data, dict)
        or type(data.get("format")) is not int
        or data["format"] != FORMAT
    ):
        got = data.get("format") if isinstance(data, dict) else data
        raise BadInput(f"{path}: format {got!r} is not known here; this version reads {FORMAT}")
    keys = data.keys() - {"files"}
    if keys != {"format", "spec", "layout"} or data["layout"] not in list(LAYOUTS):
        raise BadInput(f"{path} must hold format, spec and a layout of {sorted(LAYOUTS)}")
    if not isinstance(data.get("files", []), list):
        raise BadInput(f"{path}: files must be a list of names")
    return from_json(data["spec"], str(path)), data["layout"]


def carried(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """The small files that travel with the model, by name."""
    root = Path(folder)
    names = json.loads((root / HEADER).read_text()).get("files")
    if names is None:  # written before the header had them
        names = sorted(p.name for p in root.iterdir() if p.is_file() and p.name != HEADER)
    atomic_write.refuse_names(names)
    return {name: (root / name).read_bytes() for name in names}


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The complete steps in ascending order; half-written ones do not count."""
    names = [marker.parent.name for marker in Path(folder).glob(f"*/{COMMITTED}")]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def prove(spec: Model, layout: str, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """A BadInput with every difference between those shapes (by path) and the spec's own."""
    due = _due(spec, layout)
    problems = [f"  {p}: missing, expected shape {due[p]}" for p in sorted(due.keys() - shapes)]
    problems += [f"  {p}: unexpected, shape {shapes[p]}" for p in sorted(shapes.keys() - due)]
    problems += [
        f"  {p}: shape {tuple(shapes[p])}, expected {due[p]}"
        for p in sorted(due.keys() & shapes.keys())
        if tuple(shapes[p]) != due[p]
    ]
    if problems:
        shown = problems[:20] + [f"  and {len(problems) - 20} more"] * (len(problems) > 20)
        raise BadInput(f"{where} does not hold its spec's arrays:\n" + "\n".join(shown))


@functools.lru_cache(maxsize=8)  # a reader of many parts asks for each of them
def _due(spec: Model, layout: str) -> dict[str, tuple[int, ...]]:
    return {path: x.shape for path, x in axes.arrays(abstract(spec, layout=layout)).items()}


def refuse_narrowing(
    shapes: Mapping[str, jax.ShapeDtypeStruct], paths: Iterable[str], where: Any
) -> None:
    """A BadInput if JAX, as it is set now, cannot hold these dtypes."""
    for path in paths:
        dtype = shapes[path].dtype
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise BadInput(
                f"{where}: {path} is {dtype}, which JAX would narrow; set JAX_ENABLE_X64=1"
            )


def relaid(
    spec: Model, arrays: Mapping[str, np.ndarray], old: str, new: str
) -> dict[str, np.ndarray]:
    """The same values by the other layout's paths: layers stacked, or one by one."""
    if old == new:
        return dict(arrays)
    out = {path: x for path, x in arrays.items() if not path.startswith("stack/")}
    for r, run in enumerate(spec.layer_numbers()):
        for i, layers in enumerate(run):
            stack = f"stack/runs/{r}/{i}/"
            each = [f"stack/layers/{layer}/" for layer in layers]
            if new == "unroll":
                for path in [p for p in arrays if p.startswith(stack)]:
                    for layer, x in zip(each, arrays[path], strict=True):
                        out[layer + path.removeprefix(stack)] = x
            else:
                for path in [p for p in arrays if p.startswith(each[0])]:
                    name = path.removeprefix(each[0])
                    out[stack + name] = np.stack([arrays[layer + name] for layer in each])
    return out


def refuse_taken(folder: str | os.PathLike[str]) -> None:
    """A BadInput unless the folder is absent or empty, and could be written."""
    atomic_write.refuse_taken(folder)


def storage(*, partial: bool = False) -> ocp.Context:
    """How Orbax is used throughout, as a context to enter.

    Uncompressed, because trained weights shrink by a few percent for three times the time. With
    `partial`, a load may name some of the arrays only.
    """
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.memory.deepcopy_host_arrays = False
    context.pytree.loading.partial_load = partial
    return context


def contents(step: Path) -> dict[str, Any]:
    """What a step holds, in groups of shapes and dtypes by name; BadInput if it is damaged."""
    with readable(step):
        groups = ocp.checkpointables_metadata(step).metadata
        if None in groups.values():  # Orbax's answer to a damaged group, besides a warning
            raise ValueError(f"damaged: {', '.join(k for k, v in groups.items() if v is None)}")
        return groups


@contextlib.contextmanager
def readable(step: Path) -> Iterator[None]:
    """Whatever Orbax raises on damaged files (many kinds, at length) as one BadInput."""
    try:
        yield
    except Exception as error:
        raise BadInput(f"{step} cannot be read: {str(error)[:200]}") from error


@contextlib.contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A hidden sibling to write into, which takes the folder's name once all went well."""
    with atomic_write.appearing(folder) as hidden:
        hidden.mkdir()
        yield hidden


def _refuse_names(carry: Iterable[str]) -> None:
    atomic_write.refuse_names(carry)
    for name in carry:
        if name == HEADER or name.split("/")[0].isdigit():
            raise BadInput(f"{name!r} cannot be carried along: the checkpoint's own are called so")


def _write_header(folder: Path, spec: Model, layout: str, carry: Mapping[str, bytes]) -> None:
    for name, content in carry.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    data = {"format": FORMAT, "spec": to_json(spec), "layout": layout, "files": sorted(carry)}
    (folder / HEADER).write_text(json.dumps(data, indent=1) + "\n")
