"""Arrays not yet read: what a file, a conversion or another host array gives, slice by slice."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

Index = tuple[slice, ...]


@runtime_checkable
class Lazy(Protocol):
    """An array not yet read: as a whole, or at one slice of step 1 for each axis."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def read(self) -> np.ndarray: ...
    def part(self, index: Index, /) -> np.ndarray: ...
