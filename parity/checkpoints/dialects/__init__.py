"""Published namings of the same tensors, one file each, and what their files say of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxtwin.configs import BadInput, Model
from jaxtwin.parity.checkpoints.dialects.base import Dialect
from jaxtwin.parity.checkpoints.dialects.gguf_base import NAMESPACES
from jaxtwin.parity.checkpoints.dialects.gguf_gemma import GGUF_GEMMA, from_gguf_gemma3
from jaxtwin.parity.checkpoints.dialects.gguf_llama import GGUF_LLAMA, from_gguf
from jaxtwin.parity.checkpoints.dialects.gguf_qwen import (
    GGUF_QWEN,
    from_gguf_qwen2,
    from_gguf_qwen3,
)
from jaxtwin.parity.checkpoints.dialects.hf import (
    FAMILIES,
    HF_CONFIG,
    decoder_config,
    family_of,
    from_hf,
    is_float8,
    to_hf,
)
from jaxtwin.parity.checkpoints.dialects.hf_keys import TOKEN_IDS
from jaxtwin.parity.checkpoints.dialects.hf_llama import HF_LLAMA
from jaxtwin.parity.checkpoints.dialects.meta_llama import META_LLAMA, from_meta, to_meta
from jaxtwin.parity.checkpoints.dialects.reference import REFERENCE, from_reference

GGUFS = (GGUF_LLAMA, GGUF_QWEN, GGUF_GEMMA)
HF_DIALECTS = tuple(family.dialect for family in FAMILIES.values())
DIALECTS = {dialect.name: dialect for dialect in (REFERENCE, *HF_DIALECTS, *GGUFS, META_LLAMA)}
MODEL_TYPES = {name: (family.dialect, from_hf) for name, family in FAMILIES.items()}
ARCHITECTURES: dict[str, tuple[Dialect, Callable[..., Model]]] = {
    "llama": (GGUF_LLAMA, from_gguf),
    "qwen2": (GGUF_QWEN, from_gguf_qwen2),
    "qwen3": (GGUF_QWEN, from_gguf_qwen3),
    "gemma3": (GGUF_GEMMA, from_gguf_gemma3),
}


def of_model_type(config: Mapping[str, Any], where: str) -> tuple[Dialect, Callable[..., Model]]:
    """The dialect of a config.json's model_type and how to read it; refused by name if unknown."""
    return family_of(config, where).dialect, from_hf


def of_architecture(
    metadata: Mapping[str, Any], where: str
) -> tuple[Dialect, Callable[..., Model]]:
    """The dialect of a GGUF's general.architecture and how to read it; refused if unknown."""
    key = "general.architecture"
    return _known(ARCHITECTURES, metadata.get(key), key, where)


def _known(table: Mapping[str, Any], name: Any, key: str, where: str) -> Any:
    if isinstance(name, str) and name in table:
        return table[name]
    problem = f"{key} {name!r} is not supported" if name is not None else f"{key} is missing"
    raise BadInput(f"{where}: {problem}; supported: {', '.join(sorted(table))}")


__all__ = [
    "ARCHITECTURES",
    "DIALECTS",
    "FAMILIES",
    "GGUF_GEMMA",
    "GGUF_LLAMA",
    "GGUF_QWEN",
    "HF_CONFIG",
    "HF_LLAMA",
    "META_LLAMA",
    "MODEL_TYPES",
    "NAMESPACES",
    "REFERENCE",
    "TOKEN_IDS",
    "Dialect",
    "decoder_config",
    "family_of",
    "from_gguf",
    "from_hf",
    "from_meta",
    "from_reference",
    "is_float8",
    "of_architecture",
    "of_model_type",
    "to_hf",
    "to_meta",
]
