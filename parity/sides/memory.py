"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Collects what is unreachable and returns free memory to the system, where the C library can.

    glibc keeps what torch and NumPy free: after one run of a model in float64, more than the model.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # musl has none
            trim(0)
