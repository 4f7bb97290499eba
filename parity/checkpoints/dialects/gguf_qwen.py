"""GGUF files of the architectures "qwen2" and "qwen3": Q and K rows as Hugging Face has them.

llama.cpp rotates half-split pairs in these (its rope type NEOX), so its converter permutes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtwin.configs import Model
from jaxtwin.configs.llama import llama
from jaxtwin.parity.checkpoints.dialects import gguf_base
from jaxtwin.parity.checkpoints.dialects.base import Dialect, build_spec

GGUF_QWEN = Dialect(name="gguf-qwen", pairs="half", naming=gguf_base.NAMING)


def from_gguf_qwen2(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str, notes: list[str]
) -> Model:
    """The spec of a qwen2 GGUF (Qwen 2 and 2.5): Q, K and V have biases.

    A BadInput names every setting that is missing, unknown or not supported.
    """
    return _qwen("qwen2", metadata, tensors, where, notes, bias=True)


def from_gguf_qwen3(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str, notes: list[str]
) -> Model:
    """The same of a qwen3 GGUF: queries and keys are normed, each head by itself."""
    return _qwen("qwen3", metadata, tensors, where, notes, qk_norm=True)


def _qwen(
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    where: str,
    notes: list[str],
    **kind: bool,
) -> Model:
    fields = gguf_base.settings(metadata, architecture, where, notes)
    sizes = gguf_base.sizes(fields, metadata, tensors)
    fields.finish()
    return build_spec(llama, where, **sizes, **kind, pairs="half")
