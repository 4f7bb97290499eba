"""Where a model has no such part: one module that hands on what it is given."""

from __future__ import annotations

from typing import Any

from flax import nnx


class Skip(nnx.Module):
    """Its first argument, unchanged; it stands for any absent part."""

    def __init__(self, *args: Any):
        pass

    def __call__(self, x: Any, *args: Any) -> Any:
        return x
