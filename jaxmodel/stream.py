"""An Orbax step written and read in slices, for arrays that need not fit in memory together.

Orbax writes from memory. What it offers for leaves of another kind is a type handler; this one
opens the stores that Orbax asks for and fills them slice by slice. On disk lies an ordinary
checkpoint of NumPy arrays, which Orbax restores as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxtwin.configs.atomic_write import Unwritable, start_writeback
from jaxtwin.jaxmodel.lazy import Index, Lazy

T = TypeVar("T")
PIECE = 2**26  # bytes of a larger array that are written at once; a layer of a stack always is
BEHIND = 2**24  # bytes being written while the next slice is read (or that one slice)
LAYER = 2**20  # bytes of a layer from which on it is a chunk of its own

SAVING = threading.Lock()  # Orbax numbers what it saves for the whole process, and mixes them up

CONTEXT = {
    "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}
}  # of a tree's nodes, as Orbax has


class Leaf:
    """An array as Orbax is handed it. Of a stack (layers first) each large layer is a chunk."""

    def __init__(self, array: Lazy, stacked: bool):
        self.array = array
        self.shape = tuple(array.shape)
        self.dtype = np.dtype(array.dtype)
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.ndim = len(self.shape)
        self.layers = stacked and self.nbytes > LAYER * self.shape[0]

    def storage(self) -> ocp.SaveArgs:
        """The chunks to ask for: layers, or pieces of what is large and no stack."""
        if self.layers:
            return ocp.SaveArgs(shard_axes=(0,))
        return ocp.SaveArgs(chunk_byte_size=PIECE if self.nbytes > PIECE else None)

    def parts(self, chunk: tuple[int, ...]) -> Iterator[tuple[Index, np.ndarray]]:
        """Every value once, in slices of whole chunks of that shape."""
        whole = None if self.layers else self.array.read()
        if self.layers:
            chunk = (1, *self.shape[1:])
        starts = (range(0, size, step) for size, step in zip(self.shape, chunk, strict=True))
        for at in itertools.product(*starts):
            index = tuple(slice(i, i + n) for i, n in zip(at, chunk, strict=True))
            yield index, (self.array.part(index) if whole is None else whole[index])


async def written(future: Awaitable[T]) -> T:
    """What it comes to. Unwritable if it fails."""
    try:
        return await future
    except Exception as error:
        raise Unwritable(error) from error


class Handler(ocp.type_handlers.NumpyHandler):
    """Writes leaves one after another, a slice while the next is being read.

    The disk is kept busy and not waited for: who gives the folder its name does that. The first
    error, a reader's own or Unwritable, stops all, and is kept for `write` to raise. Orbax hears of
    it from the last leaf: it leaves the loop at once, and others would still be at work.
    """

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self.begun: set[Path] = set()
        self.writing: deque[tuple[int, ts.WriteFutures]] = deque()  # with its bytes
        self.turn = asyncio.Lock()
        self.at_work = 0  # leaves given and not done
        self.idle = threading.Event()
        self.idle.set()
        self.context = ts.Context({**CONTEXT, "file_io_sync": False})
        self.error: BaseException | None = None

    async def _open_and_write(
        self, value: Leaf, tspec: dict[str, Any], ts_context: ts.Context
    ) -> None:
        mine: list[ts.WriteFutures] = []
        self.at_work += 1
        self.idle.clear()
        try:
            try:
                async with self.turn:
                    await self._fill(value, tspec, mine)
            except Exception as error:
                self.error = self.error or error
            for future in mine:  # while the next leaf has its turn; and none is left behind
                try:
                    await written(future)
                except Unwritable as error:
                    self.error = self.error or error
        finally:
            self.at_work -= 1
            if self.at_work == 0:
                self.idle.set()
        if self.error is not None and self.at_work == 0:
            raise Unwritable(self.error) from self.error

    async def _fill(self, value: Leaf, tspec: dict[str, Any], mine: list[ts.WriteFutures]) -> None:
        opening = ts.open(ts.Spec(tspec), create=True, open=True, context=self.context)
        store = await written(opening)
        chunk = tspec["metadata"]["chunk_grid"]["configuration"]["chunk_shape"]
        files = Path(tspec["kvstore"]["base"]["path"], "d")
        for index, part in value.parts(tuple(chunk)):
            if self.error is not None:
                return
            while self.writing and part.nbytes + sum(size for size, _ in self.writing) > BEHIND:
                await written(self.writing.popleft()[1])
                for path in set(files.iterdir()) - self.begun:
                    self.begun.add(path)
                    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                        start_writeback(file.fileno())
            mine.append(store[index].write(part, can_reference_source_data_indefinitely=True))
            self.writing.append((part.nbytes, mine[-1]))


def write(step: Path, group: str, arrays: Mapping[str, Lazy], stacks: set[str]) -> None:
    """The arrays as that group of a new step; `stacks` are those with layers in front.

    Written, and not yet on the disk for certain: see configs.places.settle.
    """
    leaves = {path: Leaf(array, path in stacks) for path, array in arrays.items()}
    slices = Handler()
    registry = ocp.type_handlers.create_type_handler_registry(
        (Leaf, slices), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, use_compression=False, type_handler_registry=registry
    )
    storage = {path: leaf.storage() for path, leaf in leaves.items()}
    with SAVING, ocp.Checkpointer(ocp.CompositeCheckpointHandler(**{group: handler})) as saver:
        args = ocp.args.PyTreeSave(leaves, save_args=storage)
        try:
            saver.save(step, ocp.args.Composite(**{group: args}))
        except BaseException as error:  # Ctrl-C too, which stops this thread alone
            if slices.error is None:
                slices.error = Unwritable(error) if isinstance(error, Exception) else error
            slices.idle.wait(60)
    if slices.error is not None:
        raise slices.error


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
