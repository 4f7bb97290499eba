"""The one operation of every conversion: split axes, permute them, merge them.

A pattern such as "(n h) d -> d n h" is einops' language with the alphabet's letters. Its inverse is
the arrow turned round, so nothing here can change a value, and every conversion comes back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import einops
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


def rearrange(x: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> np.ndarray:
    """x (of the left side's shape) as the right side; a view where the layout allows it."""
    named = set(re.findall(r"\w+", pattern))
    return einops.rearrange(x, pattern, **{a: n for a, n in sizes.items() if a in named})
