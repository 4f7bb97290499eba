"""The one operation of every conversion: split axes, permute them, merge them.

A pattern such as "(n h) d -> d n h" is einops' language with the alphabet's letters. Its inverse is
the arrow turned round, so nothing here can change a value, and every conversion comes back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import numpy as np


def flip(pattern: str) -> str:
    """The inverse pattern."""
    left, right = pattern.split("->")
    return f"{right.strip()} -> {left.strip()}"


def sides(pattern: str) -> tuple[str, str]:
    left, right = pattern.split("->")
    return left.strip(), right.strip()


def shape(side: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that one side of a pattern describes: "(n h) d" -> (n * h, d)."""
    groups = re.findall(r"\([^)]*\)|\S+", side)
    return tuple(prod(sizes[a] for a in group.strip("()").split()) for group in groups)


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

    `take`: (letter, start, stop); of that letter's axis only the entries start..stop-1 are there.
    """
    letter, start, stop = take
    axes = letters(side)
    split = x.reshape([sizes[a] for a in axes])
    return split[(slice(None),) * axes.index(letter) + (slice(start, stop),)]
