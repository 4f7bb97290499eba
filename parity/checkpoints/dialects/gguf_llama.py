"""GGUF files of the architecture "llama": Q and K rows in adjacent pairs.

llama.cpp's converter permutes the Q and K rows of a Hugging Face checkpoint (half-split) into
Meta's order (adjacent), which this architecture rotates. The spec read from it rotates half-split
pairs, so that a model has the same tensors whether it came as a GGUF or as a Hugging Face file.

Of Llama 3.1's scaling such a file holds no setting, only what each pair's frequency is divided by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtwin.configs import Llama3, Model
from jaxtwin.configs.llama import llama
from jaxtwin.configs.spec import Scaling
from jaxtwin.parity.checkpoints.dialects import gguf_base
from jaxtwin.parity.checkpoints.dialects.base import Dialect, build_spec

GGUF_LLAMA = Dialect(name="gguf-llama", pairs="adjacent", naming=gguf_base.NAMING)

FIXED: dict[str, tuple[Any, ...]] = {
    **gguf_base.FIXED,
    "attention.clamp_kqv": (0,),
    "attention.sliding_window": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}

DIVISORS = "rope_freqs.weight"
# The scalings that Llamas were published with: 3.1 and 3.3, and 3.2.
SCALINGS = tuple(Llama3(factor=by, low=1.0, high=4.0, original=8_192) for by in (8.0, 32.0))


def from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str, notes: list[str]
) -> Model:
    """The spec of a llama GGUF: its metadata and its tensors; `notes` gets what they imply.

    A BadInput names every setting that is missing, unknown or not supported.
    """
    fields = gguf_base.settings(metadata, "llama", where, notes, fixed=FIXED)
    sizes = gguf_base.sizes(fields, metadata, tensors)
    fields.finish()
    spec = build_spec(llama, where, **sizes, pairs="half")
    if DIVISORS not in tensors:
        return spec
    width, stored = spec.layers[0].attn.width, tensors[DIVISORS].read()
    for scaling in SCALINGS if (stored != 1).any() else ():
        if are_divisors(stored, sizes["base"], width, scaling):
            notes.append(f"{DIVISORS} holds Llama 3.1's scaled frequencies, by {scaling.factor}")
            return build_spec(llama, where, **sizes, pairs="half", scaling=scaling)
    return spec


def are_divisors(stored: np.ndarray, base: float, width: int, scaling: Scaling | None) -> bool:
    """Whether each frequency divided by its entry (width / 2 of them) is the scaling's.

    The frequencies they were made of are powers in float32, as far off as settle.agrees says;
    where a divisor goes from 1 to the factor, that moves it by as much as it is steep there.
    """
    if scaling is None:
        return stored.shape == (width // 2,) and bool((stored == 1).all())
    if stored.shape != (width // 2,) or not isinstance(scaling, Llama3):
        return False
    turns = scaling.original / (2 * math.pi) * base ** (-np.arange(0, width, 2) / width)
    ramp = scaling.high - scaling.low
    kept = np.clip((turns - scaling.low) / ramp, 0, 1)
    want = 1 / ((1 - kept) / scaling.factor + kept)
    off = (math.log(base) + 2) * 2.0**-24
    room = want * 2.0**-22 + want**2 * turns / ramp * off
    return bool((np.abs(stored - want) <= room).all())
