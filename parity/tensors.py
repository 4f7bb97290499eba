"""Tensors not yet read, and rows applied to them: conversion as a lazy mapping.

`forward` and `backward` take named tensors on one side of a list of rows to named tensors on the
other. Nothing is read until somebody reads, and then one tensor at a time; what the mapping is
worth is proven first, from names, shapes and dtypes alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from configs import BadInput
from parity import ops
from parity.table import Move, Row

SHOWN = 20  # problems in one message


@dataclass(frozen=True)
class Tensor:
    """Shape and dtype as the file's header gives them, and how to get the values."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @staticmethod
    def of(array: np.ndarray) -> Tensor:
        return Tensor(tuple(array.shape), array.dtype, lambda: array)


Tensors = Mapping[str, Tensor]


def moves(rows: Iterable[Row]) -> list[Move]:
    return [move for row in rows for move in row.moves()]


def shapes_there(rows: Iterable[Row]) -> list[tuple[str, tuple[int, ...]]]:
    """Every name that the rows have there, with its shape."""
    return [(name, move.shape_there) for move in moves(rows) for name in move.there]


def forward(rows: Sequence[Row], there: Tensors, where: str) -> dict[str, Tensor]:
    """The tensors here, made of those there; a BadInput with every problem if they do not fit."""
    table = moves(rows)
    prove(shapes_there(rows), there, where)
    mixed = [
        f"  {move.here} stacks tensors of {sorted(dtypes)}"
        for move in table
        if len(dtypes := {str(there[name].dtype) for name in move.there}) > 1
    ]
    if mixed:
        raise BadInput(f"{where} mixes dtypes where one is needed:\n{listed(mixed)}")
    return {move.here: _stacked(move, there) for move in table}


def backward(rows: Iterable[Row], here: Tensors, where: str) -> dict[str, Tensor]:
    """The inverse of `forward`.

    A stack is kept while its parts are read one after another, in the order given here, and let go
    with the last of them.
    """
    table = moves(rows)
    prove([(m.here, m.shape_here) for m in table], here, where)
    held: dict[str, np.ndarray] = {}
    return {name: _part(move, i, here, held) for move in table for i, name in enumerate(move.there)}


def prove(wanted: Sequence[tuple[str, tuple[int, ...]]], given: Tensors, where: str) -> None:
    """Every tensor given is used exactly once, and every one wanted is there with its shape.

    All problems are reported together, in one BadInput.
    """
    shapes = dict(wanted)
    uses = Counter(name for name, _ in wanted)
    problems = [f"  {name}: read {n} times by the table" for name, n in uses.items() if n > 1]
    spare = sorted(given.keys() - shapes.keys())
    for name in sorted(shapes.keys() - given.keys()):
        # Looking for a near name takes time, and no more than the first few are shown.
        near = get_close_matches(name, spare, n=1) if len(problems) < SHOWN else []
        hint = f"; is it {near[0]!r}?" if near else ""
        problems.append(f"  {name}: missing, expected shape {shapes[name]}{hint}")
    for name in spare:
        problems.append(f"  {name}: unexpected, shape {given[name].shape}; nothing would read it")
    for name in sorted(shapes.keys() & given.keys()):
        if tuple(given[name].shape) != tuple(shapes[name]):
            problems.append(f"  {name}: shape {given[name].shape}, expected {shapes[name]}")
    if problems:
        raise BadInput(f"{where} does not hold this model's tensors:\n{listed(problems)}")


def listed(problems: Sequence[str]) -> str:
    """The first problems, one a line, and how many more there are."""
    more = len(problems) - SHOWN
    return "\n".join([*problems[:SHOWN], *([f"  and {more} more"] if more > 0 else [])])


def _stacked(move: Move, there: Tensors) -> Tensor:
    """One tensor here, filled slot by slot, so that only one source is in memory beside it."""

    def read() -> np.ndarray:
        parts = (ops.rearrange(there[n].read(), move.pattern, move.sizes) for n in move.there)
        if not move.stack:
            return next(parts)
        out = np.empty(move.shape_here, dtype)
        slots = out.reshape(-1, *move.shape_here[len(move.stack) :])
        for slot, part in zip(slots, parts, strict=True):
            slot[...] = part
        return out

    dtype = there[move.there[0]].dtype
    return Tensor(move.shape_here, dtype, read)


def _part(move: Move, i: int, here: Tensors, held: dict[str, np.ndarray]) -> Tensor:
    """The i-th tensor there that one here is made of; `held` keeps the last stack read."""

    def read() -> np.ndarray:
        whole = held.get(move.here)
        if whole is None:
            held.clear()
            whole = here[move.here].read()
        if i + 1 < len(move.there):
            held[move.here] = whole
        else:
            held.clear()
        slots = whole.reshape(-1, *move.shape_here[len(move.stack) :])
        return ops.rearrange(slots[i], ops.flip(move.pattern), move.sizes)

    return Tensor(move.shape_there, here[move.here].dtype, read)
