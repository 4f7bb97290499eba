"""Tensors not yet read, and rows applied to them: conversion as a lazy mapping.

`forward` and `backward` take named tensors on one side of a list of rows to named tensors on the
other. Nothing is read until somebody reads, and then one tensor at a time; what the mapping is worth
is proven first, from names, shapes and dtypes alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from configs import BadInput, nearest
from parity import ops
from parity.table import Move, Row


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


def forward(rows: Iterable[Row], there: Tensors, where: str) -> dict[str, Tensor]:
    """The tensors here, made of those there; a BadInput with every problem if they do not fit."""
    table = moves(rows)
    wanted = {name: move.shape_there for move in table for name in move.there}
    prove(wanted, [name for move in table for name in move.there], there, where)
    return {move.here: _stacked(move, there) for move in table}


def backward(rows: Iterable[Row], here: Tensors, where: str) -> dict[str, Tensor]:
    """The inverse of `forward`."""
    table = moves(rows)
    prove({m.here: m.shape_here for m in table}, [m.here for m in table], here, where)
    return {
        name: _part(move, i, here) for move in table for i, name in enumerate(move.there)
    }


def prove(
    wanted: Mapping[str, tuple[int, ...]], used: list[str], given: Tensors, where: str
) -> None:
    """Every tensor given is used exactly once, every one wanted is there with the right shape, and
    all share one dtype. All problems are reported together."""
    problems = [f"  {n}: read {c} times by the table" for n, c in Counter(used).items() if c > 1]
    for name in sorted(wanted.keys() - given.keys()):
        hint = nearest(name, given.keys() - wanted.keys()) if given.keys() - wanted.keys() else ""
        problems.append(f"  {name}: missing, expected shape {wanted[name]}; {hint}".rstrip("; "))
    for name in sorted(given.keys() - wanted.keys()):
        problems.append(f"  {name}: unexpected, shape {given[name].shape}; nothing would read it")
    for name in sorted(wanted.keys() & given.keys()):
        if tuple(given[name].shape) != tuple(wanted[name]):
            problems.append(f"  {name}: shape {given[name].shape}, expected {wanted[name]}")
    dtypes = Counter(str(t.dtype) for t in given.values())
    if len(dtypes) > 1:
        usual = dtypes.most_common(1)[0][0]
        odd = [f"{n} is {t.dtype}" for n, t in given.items() if str(t.dtype) != usual]
        problems.append(f"  dtypes are mixed: most are {usual}, but {', '.join(odd[:5])}")
    if problems:
        shown = problems[:20] + [f"  and {len(problems) - 20} more"] * (len(problems) > 20)
        raise BadInput(f"{where} does not hold this model's tensors:\n" + "\n".join(shown))


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


def _part(move: Move, i: int, here: Tensors) -> Tensor:
    """The i-th tensor there that one here is made of."""

    def read() -> np.ndarray:
        whole = here[move.here].read()
        slots = whole.reshape(-1, *move.shape_here[len(move.stack) :])
        return ops.rearrange(slots[i], ops.flip(move.pattern), move.sizes)

    return Tensor(move.shape_there, here[move.here].dtype, read)
