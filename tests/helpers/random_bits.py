"""Arrays of random bits, whatever they mean as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


def random_bits(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Infinities, subnormals, minus zero and NaNs with payloads among them."""
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.frombuffer(raw, dtype).reshape(shape)
