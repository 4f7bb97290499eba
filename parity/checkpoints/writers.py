"""Writers: complete or not at all, tensor by tensor where the format allows it.

Everything is written into a hidden sibling, renamed at the end: a killed write leaves nothing that
loads as complete.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.atomic_write import Unwritable, appearing, refuse_taken, start_writeback
from jaxtwin.configs.spec import to_json
from jaxtwin.parity.checkpoints.files import FLOATS
from jaxtwin.parity.table import axis_ops
from jaxtwin.parity.table.tensors import Tensor, Tensors

SHARD = 5_000_000_000  # bytes of tensors in one file, at most
PIECE = 2**26  # bytes put in order at once

__all__ = ["SHARD", "appearing", "refuse_taken", "write_hf", "write_json", "write_meta", "write_pt"]


class Behind:
    """Calls made in two other threads, so that computing and writing overlap.

    At most two calls are behind, so little more is in memory. What one raises is raised by a later
    `call`, or on leaving.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.calls: deque[Future[None]] = deque()

    def call(self, act: Callable[..., None], *args: Any) -> None:
        while len(self.calls) > 1:
            self.calls.popleft().result()
        self.calls.append(self.pool.submit(act, *args))

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=kind is not None)
        for call in self.calls if kind is None else ():
            call.result()


def write_hf(
    dst: Path,
    config: Mapping[str, Any],
    tensors: Tensors,
    carry: Mapping[str, bytes],
    *,
    shard: int = SHARD,
) -> None:
    """A complete Hugging Face folder.

    Tensors are read one at a time, in the order given, and written where they belong, so one of
    them is in memory at a time. More than `shard` bytes of them make several files with an index.
    """
    groups = grouped(tensors, shard)
    with appearing(dst) as hidden:
        hidden.mkdir()
        _write_files(hidden, carry)
        write_safetensors({hidden / file: names for file, names in groups.items()}, tensors)
        if len(groups) > 1:
            index = {
                "metadata": {"total_size": sum(map(nbytes, tensors.values()))},
                "weight_map": {n: file for file, names in groups.items() for n in sorted(names)},
            }
            write_json(hidden / "model.safetensors.index.json", index)
        write_json(hidden / "config.json", config)  # last: nothing reads a folder without it


def grouped(tensors: Tensors, shard: int) -> dict[str, list[str]]:
    """Names by file: as many tensors as fit in `shard` bytes (at least one) in each."""
    groups: list[list[str]] = [[]]
    room = shard
    for name, tensor in tensors.items():
        room -= nbytes(tensor)
        if room < 0 and groups[-1]:
            groups.append([])
            room = shard - nbytes(tensor)
        groups[-1].append(name)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    total = len(groups)
    return {f"model-{i:05}-of-{total:05}.safetensors": g for i, g in enumerate(groups, 1)}


def write_safetensors(layout: Mapping[Path, list[str]], tensors: Tensors) -> None:
    """Safetensors files, each with its named tensors, filled in the order of `tensors`.

    The library writes only what is in memory as a whole; this is the same file, byte for byte.
    """

    def write(file: BinaryIO, at: int, x: np.ndarray) -> None:
        for piece in raw(x):
            while piece:  # one call writes 2 GiB at most, and less on a disk that is nearly full
                done = os.pwrite(file.fileno(), piece, at)
                start_writeback(file.fileno(), at, done)
                piece, at = piece[done:], at + done

    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for path, names in layout.items():
            header, starts = safetensors_header({name: tensors[name] for name in names})
            file: BinaryIO = stack.enter_context(path.open("wb", buffering=0))
            write(file, 0, np.frombuffer(header, np.uint8))
            places |= {name: (file, len(header) + start) for name, start in starts.items()}
        behind = stack.enter_context(Behind())
        for name, tensor in tensors.items():
            behind.call(write, *places[name], tensor.read())


def safetensors_header(tensors: Tensors) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors, and where the bytes of each start behind it.

    A length, then JSON padded to 8 bytes; widest dtype first, then by name, as the library does.
    """
    codes = {dtype: code for code, dtype in FLOATS.items()}
    order = list(FLOATS)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in sorted(tensors, key=lambda n: (order.index(codes[tensors[n].dtype]), n)):
        tensor = tensors[name]
        starts[name], end = end, end + nbytes(tensor)
        entries[name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, starts


def raw(x: np.ndarray) -> Iterator[memoryview]:
    """The bytes of an array in C order; if they must be copied for it, not all at once."""
    rows = max(1, len(x) * PIECE // x.nbytes) if x.ndim and x.nbytes else 1
    at_once = x.flags.c_contiguous or len(x) <= rows
    for part in [x] if at_once else (x[at : at + rows] for at in range(0, len(x), rows)):
        yield axis_ops.ordered(part).reshape(-1).view(np.uint8).data


def nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _write_files(folder: Path, carry: Mapping[str, bytes]) -> None:
    for name, data in carry.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def _state(tensors: Tensors) -> dict[str, Any]:
    """All of them as torch's, in memory."""
    from jaxtwin.parity.table import bridge

    return {name: bridge.to_torch(tensor.read()) for name, tensor in tensors.items()}


def _torch_save(data: Any, path: Path) -> None:
    import torch

    try:
        torch.save(data, path)
    except RuntimeError as error:  # where the disk is full, too
        raise Unwritable(error) from error


def write_pt(dst: Path, spec: Model, tensors: Tensors, carry: Mapping[str, bytes]) -> None:
    """A .pt of ours: see readers.pt_file. torch writes it from memory, all of it at once."""
    from jaxtwin.parity.table import bridge

    state = _state(tensors)
    files = {n: bridge.to_torch(np.frombuffer(b, np.uint8)) for n, b in carry.items()}
    data = {"format": 1, "spec": to_json(spec), "state": state, "files": files}
    with appearing(dst) as hidden:
        _torch_save(data, hidden)


def write_meta(
    dst: Path, params: Mapping[str, Any], tensors: Tensors, carry: Mapping[str, bytes]
) -> None:
    """A folder as Meta publishes one. torch writes the tensors from memory, all of them at once."""
    state = _state(tensors)
    with appearing(dst) as hidden:
        hidden.mkdir()
        _write_files(hidden, carry)
        _torch_save(state, hidden / "consolidated.00.pth")
        write_json(hidden / "params.json", params)  # last: nothing reads a folder without it


def write_state_dict(dst: Path, tensors: Tensors) -> None:
    """A plain state dict, in the order given."""
    state = _state(tensors)
    with appearing(dst) as hidden:
        _torch_save(state, hidden)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8")
