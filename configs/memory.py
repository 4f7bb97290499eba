"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Collects what is unreachable, and trims.

    glibc keeps what torch and NumPy free: after one run of a model in float64, more than the model.
    """
    gc.collect()
    trim()


def trim() -> None:
    """Returns free memory to the system, where the C library can."""
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:  # musl has none
            malloc_trim(0)
