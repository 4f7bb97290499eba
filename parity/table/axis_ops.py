"""The one operation of every conversion: split axes, permute them, merge them.

A pattern such as "(n h) d -> d n h" is einops' language with the alphabet's letters. Its inverse is
the arrow reversed, so no value can change, and every conversion is invertible.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np


def flip(pattern: str) -> str:
    """The inverse pattern."""
    left, right = pattern.split("->")
    return f"{right.strip()} -> {left.strip()}"


def sides(pattern: str) -> tuple[str, str]:
    left, right = pattern.split("->")
    return left.strip(), right.strip()


def axes(side: str) -> list[str]:
    """Every axis of one side as it is written: "(n h) d" -> "(n h)", "d"."""
    return re.findall(r"\([^)]*\)|\S+", side)


def groups(side: str) -> list[list[str]]:
    """The letters of every axis of one side: "(n h) d" -> [n, h], [d]."""
    return [letters(axis) for axis in axes(side)]


def shape(side: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that one side of a pattern describes: "(n h) d" -> (n * h, d)."""
    return tuple(prod(sizes[a] for a in group) for group in groups(side))


def letters(side: str) -> list[str]:
    """The letters of one side, in order: "(n h) d" -> n, h, d."""
    return re.findall(r"\w+", side)


def rearrange(x: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> np.ndarray:
    """x (of the left side's shape) as the right side; a view where the layout allows it.

    A letter may stand on one side alone where its size is 1. einops does the same, but looks for
    every framework that it knows on the way, torch among them.
    """
    left, right = sides(pattern)
    if x.shape != shape(left, sizes):
        raise ValueError(f"{x.shape} is not {left} of {dict(sizes)}")
    old, new = letters(left), letters(right)
    if lost := [a for a in set(old) ^ set(new) if sizes[a] != 1]:
        raise ValueError(f"{pattern!r} has {', '.join(lost)} on one side alone, and not of size 1")
    axes = old + [a for a in new if a not in old]
    split = x.reshape([sizes[a] for a in axes])
    moved = split.transpose([axes.index(a) for a in new + [a for a in old if a not in new]])
    return moved.reshape(shape(right, sizes))


def entries(
    x: np.ndarray, side: str, sizes: Mapping[str, int], take: tuple[str, int, int]
) -> np.ndarray:
    """A view of x (of that side's shape), one axis a letter, cut to what is taken.

    `take`: (letter, start, stop); only the entries start..stop-1 of that letter's axis.
    """
    letter, start, stop = take
    axes = letters(side)
    split = x.reshape([sizes[a] for a in axes])
    return split[(slice(None),) * axes.index(letter) + (slice(start, stop),)]


XLA_TRANSPOSES = 2**20  # bytes; a matrix of that size or more is transposed by XLA


def put(x: np.ndarray, out: np.ndarray) -> None:
    """out[...] = x, for an `out` in C order."""
    copy = _transposed(x)
    out[...] = x if copy is None else copy


def ordered(x: np.ndarray) -> np.ndarray:
    """x in C order, perhaps read-only; itself if it is."""
    if x.flags.c_contiguous:
        return x
    copy = _transposed(x)
    return np.ascontiguousarray(x) if copy is None else copy


def _transposed(x: np.ndarray) -> np.ndarray | None:
    """x in C order, if it is a large transposed matrix, or is one where axes are merged.

    NumPy goes along whole rows of the copy, and of every line of memory that it fetches for them it
    uses one value. What JAX makes of a strided array for the CPU is transposed tile by tile.
    """
    if x.nbytes < XLA_TRANSPOSES:
        return None
    bits = x.view(f"u{x.itemsize}")  # moved as integers: no float is touched
    for first in range(1, x.ndim):
        shape = (prod(x.shape[:first]), prod(x.shape[first:]))
        try:
            flat = np.reshape(bits, shape, copy=False)
        except ValueError:  # these axes do not merge
            continue
        if flat.strides[0] >= flat.strides[1]:
            return None
        import jax

        try:
            cpu = jax.local_devices(backend="cpu")[0]
            with jax.enable_x64(True):  # or 64 bits would be cut to 32
                return np.asarray(jax.device_put(flat, cpu)).reshape(x.shape).view(x.dtype)
        except Exception:  # JAX was told to use no CPU, to guard transfers, to trace: NumPy then
            return None
    return None


Index = tuple[slice, ...]  # one for each axis, of step 1


def part(
    read: Callable[[Index], np.ndarray],
    pattern: str,
    sizes: Mapping[str, int],
    index: Index,
    take: tuple[str, int, int] | None = None,
) -> np.ndarray:
    """rearrange(...)[index], given `read`, which reads a slice of the left side alone.

    `sizes` are the left side's, `take` as in `entries`. Read is the smallest slice that holds what
    is asked for: no more than that where a slice of a group, such as (n h), is whole entries of its
    first letters, or falls within one of them.
    """
    left, right = sides(pattern)
    letter, start, stop = take or ("", 0, 0)
    inner = {**sizes, letter: stop - start} if take else sizes
    wanted: dict[str, tuple[int, int]] = {}
    cut = []
    for group, at in zip(groups(right), index, strict=True):
        lengths = [inner[a] for a in group]
        ranges = _around(lengths, at.start, at.stop)
        first = flat(lengths, [low for low, _ in ranges])
        cut.append(slice(at.start - first, at.stop - first))
        wanted |= dict(zip(group, ranges, strict=True))
    wanted = {a: wanted.get(a, (0, inner[a])) for a in letters(left)}
    if take:
        wanted[letter] = (wanted[letter][0] + start, wanted[letter][1] + start)
    bounds, lengths, inside = [], [], []
    for group in groups(left):
        known = _slice_of([sizes[a] for a in group], [wanted[a] for a in group])
        bounds.append(known[0])
        for a, (low, high) in zip(group, known[1], strict=True):
            lengths.append(high - low)
            inside.append(slice(wanted[a][0] - low, wanted[a][1] - low))
    box = read(tuple(bounds)).reshape(lengths)[tuple(inside)]
    taken = {a: high - low for a, (low, high) in wanted.items()}
    src = {**dict.fromkeys(letters(right), 1), **taken}
    return rearrange(box, f"{' '.join(letters(left))} -> {right}", src)[tuple(cut)]


def _around(lengths: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
    """The range of each letter of a group, such that together they hold its start..stop-1."""
    out = []
    rest = prod(lengths)
    for at, length in enumerate(lengths):
        rest //= length
        low, high = start // rest, (stop - 1) // rest + 1
        out.append((low, high))
        if high - low > 1:
            return out + [(0, length) for length in lengths[at + 1 :]]
        start, stop = start - low * rest, stop - low * rest
    return out


def _slice_of(
    lengths: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> tuple[slice, list[tuple[int, int]]]:
    """The smallest slice of a group that holds those ranges of its letters, and its own ranges."""
    several = [at for at, (low, high) in enumerate(ranges) if high - low > 1]
    first = several[0] if several else len(ranges)
    held = [*ranges[: first + 1], *((0, length) for length in lengths[first + 1 :])]
    start = flat(lengths, [low for low, _ in held])
    return slice(start, start + prod(high - low for low, high in held)), held


def flat(lengths: Sequence[int], at: Sequence[int]) -> int:
    """The number within a group of the entry that has those numbers in its letters."""
    out = 0
    for length, i in zip(lengths, at, strict=True):
        out = out * length + i
    return out
