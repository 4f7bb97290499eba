"""An Orbax step written and read in slices, for arrays that need not fit in memory together.

Orbax writes from memory. For values of another kind it calls a type handler, a public interface:
the one here writes each array with tensorstore, slice by slice, in the format that Orbax gives
NumPy arrays. On disk lies an ordinary checkpoint, which Orbax restores as any other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxtwin.configs.atomic_write import Unwritable, start_writeback
from jaxtwin.configs.memory import trim
from jaxtwin.jaxmodel.lazy import Index, Lazy

T = TypeVar("T", covariant=True)
PIECE = 2**26  # bytes from which on an array is written in chunks of that size
BEHIND = 2**24  # bytes being written while the next slice is read (or that one slice)
LAYER = 2**20  # bytes of a layer from which on it is a chunk of its own

SAVING = threading.Lock()  # Orbax numbers what it saves for the whole process, and mixes them up

CONTEXT = {
    "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}
}  # of a tree's nodes, as Orbax has
DATABASE = {  # Orbax's options of the key-value database that all arrays of a group share
    "target_data_file_size": 2**31,
    "config": {
        "max_inline_value_bytes": 1024,
        "max_decoded_node_bytes": 100_000_000,
        "manifest_kind": "single",
    },
    "assume_config": True,
}
LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}


@runtime_checkable
class Pending(Protocol[T]):
    """What tensorstore returns at once and completes in its threads."""

    def result(self) -> T: ...


class Leaf:
    """An array as Orbax is handed it. Of a stack (layers first) each large layer is a chunk."""

    def __init__(self, array: Lazy, stacked: bool):
        self.array = array
        self.shape = tuple(array.shape)
        self.dtype = np.dtype(array.dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.by_layer = stacked and self.nbytes > LAYER * self.shape[0]

    def chunk(self) -> tuple[int, ...]:
        """The shape stored as a unit: a layer, rows of at most PIECE bytes, or the array."""
        if self.by_layer:
            return (1, *self.shape[1:])
        if self.nbytes <= PIECE:
            return self.shape
        rows = max(1, PIECE * self.shape[0] // self.nbytes)
        pieces = -(-self.shape[0] // rows)
        return (-(-self.shape[0] // pieces), *self.shape[1:])

    def slices(self) -> Iterator[tuple[Index, np.ndarray]]:
        """Every value once, a chunk at a time. Read a layer at a time, or all at once."""
        values = None if self.by_layer else self.array.read()
        chunk = self.chunk()
        axes = (
            [slice(i, min(i + step, size)) for i in range(0, size, step)]
            for size, step in zip(self.shape, chunk, strict=True)
        )
        for index in itertools.product(*axes):
            yield index, (self.array.part(index) if values is None else values[index])


def written(pending: Pending[T]) -> T:
    """Its result, waited for. Unwritable if it failed."""
    try:
        return pending.result()
    except Exception as error:
        raise Unwritable(error) from error


class SliceWriter(ocp.type_handlers.TypeHandler):
    """Writes leaves one after another, a slice while the next is being read.

    The disk is kept busy and not waited for: who gives the folder its name does that. The first
    error, a reader's own or Unwritable, stops all writing and is kept in `error`: Orbax would wrap
    it. Setting it from outside stops the writing too, and `idle` tells when.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.idle = threading.Event()
        self.idle.set()
        self.pending: deque[tuple[int, ts.WriteFutures]] = deque()  # with its bytes
        self.flushed: set[Path] = set()  # data files whose way to the disk has begun
        self.context = ts.Context({**CONTEXT, "file_io_sync": False})

    def typestr(self) -> str:
        """The kind of value that the checkpoint names: Orbax restores it with its own handler."""
        return "np.ndarray"

    async def serialize(
        self,
        values: Sequence[Leaf],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[ocp.future.Future]:
        """What writes all leaves, in a thread of Orbax's, once it has made their folder."""
        work = self._write_all(values, infos)
        return [ocp.future.CommitFutureAwaitingContractedSignals(work, name="write slices")]

    async def _write_all(
        self, leaves: Sequence[Leaf], infos: Sequence[ocp.type_handlers.ParamInfo]
    ) -> None:
        self.idle.clear()
        try:
            for leaf, info in zip(leaves, infos, strict=True):
                await info.await_path_creation()
                # Orbax then merges the databases of all processes into the group's.
                self._write(leaf, Path(info.parent_dir, "ocdbt.process_0"), info.name)
                trim()  # else glibc keeps what a layer of one size leaves for the next
            while self.pending:
                written(self.pending.popleft()[1])
        except BaseException as error:
            self.error = self.error or error
            for _, pending in self.pending:
                with contextlib.suppress(Exception):
                    pending.result()
            raise
        finally:
            self.idle.set()

    def _write(self, leaf: Leaf, database: Path, name: str) -> None:
        self._stop_on_error()
        spec = write_spec(leaf, database, name)
        store = written(ts.open(spec, create=True, open=True, context=self.context))
        for index, part in leaf.slices():
            self._stop_on_error()
            while self.pending and part.nbytes + sum(size for size, _ in self.pending) > BEHIND:
                written(self.pending.popleft()[1])
                self._flush(database / "d")
            write = store[index].write(part, can_reference_source_data_indefinitely=True)
            self.pending.append((part.nbytes, write))

    def _stop_on_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _flush(self, folder: Path) -> None:
        for path in set(folder.iterdir()) - self.flushed:
            self.flushed.add(path)
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                start_writeback(file.fileno())

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("read with Orbax's handler of NumPy arrays")

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError("read with Orbax's handler of NumPy arrays")


def write_spec(leaf: Leaf, database: Path, name: str) -> ts.Spec:
    """The array as Orbax stores it: uncompressed zarr 3 chunks, each a value of the database."""
    files = {"driver": "file", "path": f"{database}/"}
    chunk = leaf.chunk()
    sharding = {
        "chunk_shape": chunk,
        "codecs": [LITTLE_ENDIAN],
        "index_codecs": [LITTLE_ENDIAN, {"name": "crc32c"}],
        "index_location": "end",
    }
    return ts.Spec(
        {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                # Data files are complete before the manifest, which alone must change at once.
                "base": {**files, "file_io_locking": {"mode": "non_atomic"}},
                "manifest": files,
                "path": name,
                "cache_pool": "cache_pool#ocdbt",
                **DATABASE,
            },
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "store_data_equal_to_fill_value": True,  # else zeros would read as data lost
            "dtype": leaf.dtype.name,
            "metadata": {
                "shape": leaf.shape,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
                "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            },
        }
    )


def write(step: Path, group: str, arrays: Mapping[str, Lazy], stacks: set[str]) -> None:
    """The arrays as that group of a new step; `stacks` are those with layers in front.

    Written, and not yet on the disk for certain: see configs.atomic_write.fsync_tree.
    """
    leaves = {path: Leaf(array, path in stacks) for path, array in arrays.items()}
    writer = SliceWriter()
    registry = ocp.type_handlers.create_type_handler_registry(
        (Leaf, writer), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, use_compression=False, type_handler_registry=registry
    )
    with SAVING, ocp.Checkpointer(ocp.CompositeCheckpointHandler(**{group: handler})) as saver:
        args = ocp.args.Composite(**{group: ocp.args.PyTreeSave(leaves)})
        try:
            saver.save(step, args)
        except BaseException as error:
            if writer.error is None:  # Ctrl-C too, which stops this thread alone
                writer.error = Unwritable(error) if isinstance(error, Exception) else error
            writer.idle.wait(60)
    if writer.error is not None:
        raise writer.error


def reader(step: Path, group: str, path: str, context: ts.Context) -> Callable[[Index], np.ndarray]:
    """What reads that array of a step, stored as Orbax does unless told otherwise, at an index.

    `context` holds what is known of the step; one for all of its arrays will do.
    """
    base = {"driver": "file", "path": f"{step / group}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": path, "cache_pool": "cache_pool#ocdbt"}
    # Absent data is damage; without this it would be read as zeros.
    spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}

    @functools.cache
    def opened() -> ts.TensorStore:
        return ts.open(ts.Spec(spec), read=True, open=True, context=context).result()

    def read(index: Index) -> np.ndarray:
        store = opened()[index]  # into memory that NumPy asks for: large pages, a third of the time
        out = np.empty(store.shape, store.dtype.numpy_dtype)
        ts.array(out).write(store).result()
        return out

    return read


def usual(step: Path, group: str) -> bool:
    """Whether the arrays are stored as Orbax does unless told otherwise, so that `reader` can."""
    told = json.loads((step / group / "_METADATA").read_text())
    return bool(told.get("use_ocdbt") and told.get("use_zarr3"))
