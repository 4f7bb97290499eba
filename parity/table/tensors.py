"""Tensors not yet read, and rows applied to them: conversion as a lazy mapping.

`forward` and `backward` take named tensors on one side of a list of rows to named tensors on the
other. No value is read before it is asked for, and then one tensor at a time; that the mapping
is complete and invertible is proven first, from names, shapes and dtypes alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from jaxtwin.configs import BadInput
from jaxtwin.parity.table import axis_ops
from jaxtwin.parity.table.axis_ops import Index
from jaxtwin.parity.table.row import Move, Row

SHOWN = 20  # problems in one message


@dataclass(frozen=True)
class Tensor:
    """Shape and dtype as the file's header gives them, and how to get the values.

    `slices` gets those at an index alone, one slice of step 1 for each axis, where that costs less.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    slices: Callable[[Index], np.ndarray] | None = None

    def part(self, index: Index) -> np.ndarray:
        """read()[index], for one slice of step 1 for each axis.

        What is read for it is the smallest slice of the file's tensor that holds these values. Of a
        row that merges or splits axes it is more where the index is not whole entries of the first
        letter of a merged axis; and it is the whole tensor where the file allows no slices
        (an .npz) or where the source tensor is fused of several destinations.
        """
        index = tuple(
            slice(*at.indices(size)[:2]) for at, size in zip(index, self.shape, strict=True)
        )
        if self.slices is None or any(at.start >= at.stop for at in index):
            return self.read()[index]
        return self.slices(index)

    @staticmethod
    def of(array: np.ndarray) -> Tensor:
        return Tensor(tuple(array.shape), array.dtype, lambda: array)


Tensors = Mapping[str, Tensor]


def moves(rows: Iterable[Row]) -> list[Move]:
    return [move for row in rows for move in row.moves()]


def src_shapes(rows: Iterable[Row]) -> list[tuple[str, tuple[int, ...]]]:
    """Every source name of the rows with its shape; one that several rows take from, once.

    AssertionError if those do not between them take every entry exactly once.
    """
    table = moves(rows)
    fused = _fused(table)
    return [
        (name, move.src_shape)
        for move in table
        for name in move.src
        if move.take is None or fused[name][0] is move
    ]


def forward(rows: Sequence[Row], src: Tensors, where: str) -> dict[str, Tensor]:
    """The destination tensors, made of the source's; BadInput with every problem found.

    A fused tensor is kept while its parts are read one after another, in the order of the result.
    """
    table = moves(rows)
    prove(src_shapes(rows), src, where)
    mixed = [
        f"  {move.dst} stacks tensors of {sorted(dtypes)}"
        for move in table
        if len(dtypes := {str(src[name].dtype) for name in move.src}) > 1
    ]
    if mixed:
        raise BadInput(
            f"{where} mixes dtypes where stacked layers need one (--layout unroll keeps each as it "
            f"is):\n{listed(mixed)}"
        )
    last = {name: parts[-1].dst for name, parts in _fused(table).items()}
    held: dict[str, np.ndarray] = {}
    return {move.dst: _stacked(move, src, last, held) for move in table}


def backward(rows: Iterable[Row], dst: Tensors, where: str) -> dict[str, Tensor]:
    """The inverse of `forward`.

    A stack is kept while its parts are read one after another, in the order of the result, then
    freed with the last of them. A fused tensor is assembled when it is read, and the stacks of its
    parts are kept alike.
    """
    table = moves(rows)
    prove([(m.dst, m.dst_shape) for m in table], dst, where)
    fused = _fused(table)
    mixed = [
        f"  {name} is fused of tensors of {sorted(dtypes)}"
        for name, parts in fused.items()
        if len(dtypes := {str(dst[part.dst].dtype) for part in parts}) > 1
    ]
    if mixed:
        raise BadInput(f"{where} mixes dtypes where one is needed:\n{listed(mixed)}")
    held: dict[str, np.ndarray] = {}
    apart: dict[str, dict[str, np.ndarray]] = defaultdict(dict)  # several stacks are read in turns
    out: dict[str, Tensor] = {}
    for move in table:
        for i, name in enumerate(move.src):
            if move.take is None:
                out[name] = _part(move, i, dst, held)
            elif name not in out:
                out[name] = _assembled(name, fused[name], dst, apart)
    return out


def _fused(table: Sequence[Move]) -> dict[str, list[Move]]:
    """The moves that take from each fused source tensor, proven to take every entry once."""
    out: dict[str, list[Move]] = {}
    for move in table:
        for name in move.src if move.take else ():
            out.setdefault(name, []).append(move)
    for name, parts in out.items():
        _tiled(name, parts)
    return out


def _tiled(name: str, parts: Sequence[Move]) -> None:
    """An AssertionError unless the parts' entries are all those of one axis, each once."""
    axes, taken = set(), []
    for move in parts:
        assert move.take is not None
        letter, start, stop = move.take
        before = move.src_axes[: move.src_axes.index(letter)]
        outer = math.prod(move.sizes[a] for a in before)
        axes.add((move.src_shape, outer, move.sizes[letter]))
        taken.append((start, stop))
    if len(axes) > 1:
        raise AssertionError(f"the table cuts {name} along different axes: {sorted(axes)}")
    size = axes.pop()[2]
    edges = [0, *(at for cut in sorted(taken) for at in cut), size]
    if any(a != b for a, b in zip(edges[::2], edges[1::2], strict=True)):
        raise AssertionError(f"the table takes {sorted(taken)} of the {size} entries of {name}")


def prove(wanted: Sequence[tuple[str, tuple[int, ...]]], tensors: Tensors, where: str) -> None:
    """Proves that `tensors` are exactly the `wanted` ones, each used once and of its shape.

    All problems are reported together, in one BadInput.
    """
    shapes = dict(wanted)
    uses = Counter(name for name, _ in wanted)
    problems = [f"  {name}: read {n} times by the table" for name, n in uses.items() if n > 1]
    spare = sorted(tensors.keys() - shapes.keys())
    for name in sorted(shapes.keys() - tensors.keys()):
        # Looking for a near name takes time, and no more than the first few are shown.
        near = get_close_matches(name, spare, n=1) if len(problems) < SHOWN else []
        hint = f"; is it {near[0]!r}?" if near else ""
        problems.append(f"  {name}: missing, expected shape {shapes[name]}{hint}")
    for name in spare:
        problems.append(f"  {name}: unexpected, shape {tensors[name].shape}; nothing would read it")
    for name in sorted(shapes.keys() & tensors.keys()):
        if tuple(tensors[name].shape) != tuple(shapes[name]):
            problems.append(f"  {name}: shape {tensors[name].shape}, expected {shapes[name]}")
    if problems:
        raise BadInput(f"{where} does not hold this model's tensors:\n{listed(problems)}")


def listed(problems: Sequence[str]) -> str:
    """The first problems, one a line, and how many more there are."""
    more = len(problems) - SHOWN
    return "\n".join([*problems[:SHOWN], *([f"  and {more} more"] if more > 0 else [])])


def _stacked(
    move: Move, src: Tensors, last: Mapping[str, str], held: dict[str, np.ndarray]
) -> Tensor:
    """One destination tensor, filled slot by slot, with one source tensor at a time in memory.

    `held` keeps the last fused tensor read until the part that is `last` to be made of it.
    """

    def source(name: str) -> np.ndarray:
        if name not in last:
            return src[name].read()
        x = held.get(name)
        if x is None:
            held.clear()
            x = src[name].read()
        if last[name] == move.dst:
            held.clear()
        else:
            held[name] = x
        return x

    def read() -> np.ndarray:
        parts = (move.forward(source(name)) for name in move.src)
        if not move.stack:
            part = next(parts)
            return part if move.take is None else part.copy()  # no view that keeps the whole
        out = np.empty(move.dst_shape, dtype)
        slots = out.reshape(-1, *move.dst_shape[len(move.stack) :])
        for slot, part in zip(slots, parts, strict=True):
            axis_ops.put(part, slot)
        return out

    def slices(index: Index) -> np.ndarray:
        outer, inner = index[: len(move.stack)], index[len(move.stack) :]
        shape = [at.stop - at.start for at in index]
        cells = list(itertools.product(*(range(at.start, at.stop) for at in outer)))

        def of(cell: tuple[int, ...]) -> np.ndarray:
            source = src[move.src[axis_ops.flat(move.stack, cell)]].part
            return axis_ops.part(source, move.pattern, move.sizes, inner, move.take)

        if len(cells) == 1:  # a layer: not copied once more
            return axis_ops.ordered(of(cells[0])).reshape(shape)
        out = np.empty(shape, dtype)
        for slot, cell in zip(out.reshape(-1, *out.shape[len(outer) :]), cells, strict=True):
            axis_ops.put(of(cell), slot)
        return out

    dtype = src[move.src[0]].dtype
    cheap = move.stack or src[move.src[0]].slices
    return Tensor(move.dst_shape, dtype, read, slices if cheap else None)


def _slot(move: Move, i: int, dst: Tensors, held: dict[str, np.ndarray]) -> np.ndarray:
    """Entry i of a stacked destination; `held` keeps the last stack that allows no slices."""
    if move.stack and dst[move.dst].slices is not None:
        return _slot_part(move, i, dst, (slice(None),) * len(move.dst_shape[len(move.stack) :]))
    stack = held.get(move.dst)
    if stack is None:
        held.clear()
        stack = dst[move.dst].read()
    if i + 1 < len(move.src):
        held[move.dst] = stack
    else:
        held.clear()
    return stack.reshape(-1, *move.dst_shape[len(move.stack) :])[i]


def _slot_part(move: Move, i: int, dst: Tensors, index: Index) -> np.ndarray:
    """Entry i of a stacked destination, at that index of its own axes; nothing else is read."""
    at = tuple(slice(n, n + 1) for n in np.unravel_index(i, move.stack)) if move.stack else ()
    part = dst[move.dst].part((*at, *index))
    return part.reshape(part.shape[len(at) :])


def _part(move: Move, i: int, dst: Tensors, held: dict[str, np.ndarray]) -> Tensor:
    """The i-th of the source tensors that one destination is stacked from."""

    def read() -> np.ndarray:
        return move.backward(_slot(move, i, dst, held))

    def slices(index: Index) -> np.ndarray:
        source = functools.partial(_slot_part, move, i, dst)
        return axis_ops.part(source, axis_ops.flip(move.pattern), move.sizes, index)

    cheap = dst[move.dst].slices
    return Tensor(move.src_shape, dst[move.dst].dtype, read, slices if cheap else None)


def _assembled(
    name: str, parts: Sequence[Move], dst: Tensors, held: Mapping[str, dict[str, np.ndarray]]
) -> Tensor:
    """A fused source tensor, assembled from its parts; `held` keeps the stack of each."""
    shape, dtype = parts[0].src_shape, dst[parts[0].dst].dtype

    def read() -> np.ndarray:
        out = np.empty(shape, dtype)
        for move in parts:
            move.put(_slot(move, move.src.index(name), dst, held[move.dst]), out)
        return out

    return Tensor(shape, dtype, read)
