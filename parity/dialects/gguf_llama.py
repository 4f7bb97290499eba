"""GGUF files of the architecture "llama": names, metadata, and Q and K rows in adjacent pairs.

The names are those of the `gguf` package's tensor table. llama.cpp's converter permutes the Q and K
rows of a Hugging Face checkpoint (half-split) into Meta's order (adjacent), which this architecture
turns. The spec read here turns half-split pairs, so that a model has the same tensors whether it
came as a GGUF or as a Hugging Face file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from configs import BadInput, Model
from configs.llama import llama
from parity.dialects.base import Dialect, Fields, made
from parity.table import Row

GGUF_LLAMA = Dialect(
    name="gguf-llama",
    pairs="adjacent",
    naming=(
        Row("embed.weight", "token_embd.weight", "v d -> v d"),
        Row("layers.{l}.pre_attn.weight", "blk.{l}.attn_norm.weight", "d -> d"),
        Row("layers.{l}.attn.q.weight", "blk.{l}.attn_q.weight", "(n {theirs}) d -> (n {ours}) d"),
        Row("layers.{l}.attn.k.weight", "blk.{l}.attn_k.weight", "(k {theirs}) d -> (k {ours}) d"),
        Row("layers.{l}.attn.v.weight", "blk.{l}.attn_v.weight", "(k h) d -> (k h) d"),
        Row("layers.{l}.attn.o.weight", "blk.{l}.attn_output.weight", "d (n h) -> d (n h)"),
        Row("layers.{l}.pre_ffn.weight", "blk.{l}.ffn_norm.weight", "d -> d"),
        Row("layers.{l}.ffn.gate.weight", "blk.{l}.ffn_gate.weight", "f d -> f d"),
        Row("layers.{l}.ffn.up.weight", "blk.{l}.ffn_up.weight", "f d -> f d"),
        Row("layers.{l}.ffn.down.weight", "blk.{l}.ffn_down.weight", "d f -> d f"),
        Row("norm.weight", "output_norm.weight", "d -> d"),
        Row("head.weight", "output.weight", "v d -> v d"),
    ),
)

# Settings of the architecture that have one value this model computes (llama.cpp's own defaults).
MUST: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scale_linear": (1,),
    "rope.scaling.factor": (1,),
    "rope.scaling.type": ("none",),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
FREE: dict[str, str] = {
    "rope.scaling.finetuned": "history only",
    "rope.scaling.original_context_length": "read by scaled frequencies only",
}
# Where a reader looks: the settings, and what is not about the computation (names, licences, the
# tokenizer, how the file was made).
NAMESPACES = ("llama.", "GGUF.", "general.", "tokenizer.", "quantize.", "split.")


def from_gguf(metadata: Mapping[str, Any], names: Collection[str], where: str) -> Model:
    """The spec of a llama GGUF: its metadata, and the names of its tensors.

    The file has no flag for tying: the head is the embedding when there is no output.weight. A
    BadInput names every setting that is missing, unknown or not supported.
    """
    if metadata.get("split.count", 0) not in (0, 1):
        raise BadInput(
            f"{where} is one part of a split GGUF; llama-gguf-split --merge makes it one"
        )
    prefix = "llama."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    fields = Fields(own, f"{where}, settings llama.*", must=MUST, free=FREE)
    tokens = metadata.get("tokenizer.ggml.tokens")
    heads = fields.whole("attention.head_count")
    widths = {
        key: width
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        if (width := fields.whole(key, absent=None)) is not None
    }
    sizes = {
        "vocab": fields.whole(
            "vocab_size", absent=len(tokens) if isinstance(tokens, list) else None
        ),
        "d": fields.whole("embedding_length"),
        "layers": fields.whole("block_count"),
        "heads": heads,
        "kv": fields.whole("attention.head_count_kv", absent=heads),
        "hidden": fields.whole("feed_forward_length"),
        "max_len": fields.whole("context_length"),
        "base": fields.number("rope.freq_base"),
        "eps": fields.number("attention.layer_norm_rms_epsilon"),
    }
    if sizes["vocab"] is None:
        fields.problems.append("vocab_size: missing, and there is no token list to count")
    # llama.cpp takes d / heads where no width is written; a smaller rotary width turns a part only.
    width = widths.get("attention.key_length", (sizes["d"] or 0) // (heads or 1))
    if any(other != width for other in widths.values()):
        fields.problems.append(f"head width {width} expected throughout, got {widths}")
    fields.finish()
    sizes |= {"base": decimal(sizes["base"]), "eps": decimal(sizes["eps"])}
    tied = "output.weight" not in names
    width = widths.get("attention.key_length")
    return made(llama, where, **sizes, width=width, tied=tied, pairs="half")


def decimal(x: float) -> float:
    """The shortest decimal with this float32: a file says 9.99999974e-06 and means 1e-05."""
    with np.errstate(over="ignore"):  # infinity, which the spec refuses
        return float(str(np.float32(x)))
