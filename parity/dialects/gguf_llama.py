"""GGUF files of the architecture "llama": Q and K rows in adjacent pairs.

llama.cpp's converter permutes the Q and K rows of a Hugging Face checkpoint (half-split) into
Meta's order (adjacent), which this architecture turns. The spec read here turns half-split pairs,
so that a model has the same tensors whether it came as a GGUF or as a Hugging Face file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from configs import Model
from configs.llama import llama
from parity.dialects import gguf_base
from parity.dialects.base import Dialect, made

GGUF_LLAMA = Dialect(name="gguf-llama", pairs="adjacent", naming=gguf_base.NAMING)

MUST: dict[str, tuple[Any, ...]] = {
    **gguf_base.MUST,
    "attention.clamp_kqv": (0,),
    "attention.sliding_window": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}


def from_gguf(
    metadata: Mapping[str, Any], names: Collection[str], where: str, notes: list[str]
) -> Model:
    """The spec of a llama GGUF: its metadata, and the names of its tensors.

    A BadInput names every setting that is missing, unknown or not supported.
    """
    fields = gguf_base.settings(metadata, "llama", where, must=MUST)
    sizes = gguf_base.sizes(fields, metadata, names)
    fields.finish()
    return made(llama, where, **sizes, pairs="half")
