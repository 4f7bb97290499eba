"""A row of a table: one tensor's two names, and how its axes move from one to the other.

Holes: "{l}" in a name ranges over the row's values. A hole in both names renames; a hole in the
source's name only stacks its tensors in front ("l ..."). So scanned and unrolled layers, and
experts, are rows and no code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxtwin.parity.table import axis_ops


@dataclass(frozen=True)
class Row:
    """`dst`: the destination's name; `src`: the source's; `pattern`: axes, source -> destination.

    `sizes`: the size of each letter. `holes`: the values that each hole in the names ranges over.
    `take`: (letter, start, stop) where this row takes only the entries start..stop-1 of that
    letter's axis of the source, and other rows of the same source take the rest; `sizes` has the
    size of the full axis. A letter of which one entry is taken may be left out of the destination.
    """

    dst: str
    src: str
    pattern: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    holes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    take: tuple[str, int, int] | None = None

    def prefixed(self, dst: str, src: str, holes: Mapping[str, Sequence[int]]) -> Row:
        """The row as part of something: both names prefixed, holes added."""
        return replace(self, dst=dst + self.dst, src=src + self.src, holes={**holes, **self.holes})

    def sized(self, sizes: Mapping[str, int]) -> Row:
        """The row with the sizes that it does not have of its own."""
        return replace(self, sizes={**sizes, **self.sizes})

    def moves(self) -> Iterable[Move]:
        """One move for each destination tensor."""
        shared = [h for h in self.holes if "{" + h + "}" in self.dst]
        stacked = [h for h in self.holes if h not in shared]
        for values in itertools.product(*(self.holes[h] for h in shared)):
            at = dict(zip(shared, values, strict=True))
            cells = itertools.product(*(self.holes[h] for h in stacked))
            src = [self.src.format(**at, **dict(zip(stacked, cell, strict=True))) for cell in cells]
            stack = tuple(len(self.holes[h]) for h in stacked)
            dst = self.dst.format(**at)
            yield Move(dst, tuple(src), self.pattern, self.sizes, stack, self.take)


@dataclass(frozen=True)
class Move:
    """One destination tensor, and the source tensors that it is stacked from or is a part of."""

    dst: str
    src: tuple[str, ...]
    pattern: str
    sizes: Mapping[str, int]
    stack: tuple[int, ...]
    take: tuple[str, int, int] | None = None

    @property
    def dst_sizes(self) -> Mapping[str, int]:
        """The sizes of what is taken."""
        if self.take is None:
            return self.sizes
        letter, start, stop = self.take
        return {**self.sizes, letter: stop - start}

    @property
    def dst_shape(self) -> tuple[int, ...]:
        return self.stack + axis_ops.shape(axis_ops.sides(self.pattern)[1], self.dst_sizes)

    @property
    def src_shape(self) -> tuple[int, ...]:
        return axis_ops.shape(axis_ops.sides(self.pattern)[0], self.sizes)

    @property
    def src_axes(self) -> list[str]:
        """The letters of the source's side."""
        return axis_ops.letters(axis_ops.sides(self.pattern)[0])

    def forward(self, src: np.ndarray) -> np.ndarray:
        """The destination that one source tensor gives (without the axes of a stack)."""
        if self.take is None:
            return axis_ops.rearrange(src, self.pattern, self.sizes)
        left, right = axis_ops.sides(self.pattern)
        cut = axis_ops.entries(src, left, self.sizes, self.take)
        return axis_ops.rearrange(cut, f"{' '.join(self.src_axes)} -> {right}", self.dst_sizes)

    def backward(self, dst: np.ndarray) -> np.ndarray:
        """The inverse, where no other row takes from that source tensor."""
        return axis_ops.rearrange(dst, axis_ops.flip(self.pattern), self.sizes)

    def put(self, dst: np.ndarray, src: np.ndarray) -> None:
        """The inverse, where the source is fused of several: sets this row's entries in it."""
        assert self.take is not None
        left, right = axis_ops.sides(self.pattern)
        cut = axis_ops.entries(src, left, self.sizes, self.take)
        cut[...] = axis_ops.rearrange(dst, f"{right} -> {' '.join(self.src_axes)}", self.dst_sizes)
