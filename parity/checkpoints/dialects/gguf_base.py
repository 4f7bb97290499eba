"""What GGUF files of every architecture share: tensor names, and how their settings are read.

The names are those of the `gguf` package's tensor table. Architectures differ in the order of
their rotary pairs, in the settings that they know and in what one left out means.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints.dialects.base import Fields
from jaxtwin.parity.table.row import Row

LAYER = "blk.{l}."


def _heads(dst: str, src: str, heads: str) -> tuple[Row, Row]:
    """A projection's rows and bias, in the order of its rotary pairs."""
    axes = f"({heads} {{theirs}})", f"({heads} {{ours}})"
    return (
        Row(
            f"layers.{{l}}.attn.{dst}.weight",
            f"{LAYER}{src}.weight",
            "{} d -> {} d".format(*axes),
        ),
        Row(f"layers.{{l}}.attn.{dst}.bias", f"{LAYER}{src}.bias", "{} -> {}".format(*axes)),
    )


def _layer(dst: str, src: str, pattern: str) -> Row:
    return Row("layers.{l}." + dst, LAYER + src, pattern)


NAMING = (
    Row("embed.weight", "token_embd.weight", "v d -> v d"),
    _layer("pre_attn.weight", "attn_norm.weight", "d -> d"),
    *_heads("q", "attn_q", "n"),
    *_heads("k", "attn_k", "k"),
    _layer("attn.v.weight", "attn_v.weight", "(k h) d -> (k h) d"),
    _layer("attn.v.bias", "attn_v.bias", "(k h) -> (k h)"),
    _layer("attn.q_norm.norm.weight", "attn_q_norm.weight", "{theirs} -> {ours}"),
    _layer("attn.k_norm.norm.weight", "attn_k_norm.weight", "{theirs} -> {ours}"),
    _layer("attn.o.weight", "attn_output.weight", "d (n h) -> d (n h)"),
    _layer("post_attn.weight", "post_attention_norm.weight", "d -> d"),
    _layer("pre_ffn.weight", "ffn_norm.weight", "d -> d"),
    _layer("ffn.gate.weight", "ffn_gate.weight", "f d -> f d"),
    _layer("ffn.up.weight", "ffn_up.weight", "f d -> f d"),
    _layer("ffn.down.weight", "ffn_down.weight", "d f -> d f"),
    _layer("post_ffn.weight", "post_ffw_norm.weight", "d -> d"),
    Row("norm.weight", "output_norm.weight", "d -> d"),
    Row("head.weight", "output.weight", "v d -> v d"),
)

# Settings with one value this model computes (llama.cpp's own defaults).
FIXED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "rope.scale_linear": (1,),
    "rope.scaling.factor": (1,),
    "rope.scaling.type": ("none",),
}
IGNORED: dict[str, str] = {
    "rope.scaling.finetuned": "history only",
    "rope.scaling.original_context_length": "read by scaled frequencies only",
}
DEFAULTS = {"rope.freq_base": 10_000.0}
# Where a reader looks beside the architecture's own settings: what is not about the computation
# (names, licences, the tokenizer, how the file was made).
NAMESPACES = ("GGUF.", "general.", "tokenizer.", "quantize.", "split.")


def settings(
    metadata: Mapping[str, Any],
    architecture: str,
    where: str,
    notes: list[str],
    *,
    fixed: Mapping[str, tuple[Any, ...]] = FIXED,
) -> Fields:
    """The settings of that architecture, to be taken; BadInput on one part of a split file.

    `notes` gets what llama.cpp supplies by itself.
    """
    if metadata.get("split.count", 0) not in (0, 1):
        raise BadInput(
            f"{where} is one part of a split GGUF; llama-gguf-split --merge makes it one"
        )
    prefix = f"{architecture}."
    selected = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    named = f"{where}, settings {prefix}*"
    fields = Fields(
        selected, named, fixed=fixed, ignored=IGNORED, defaults=DEFAULTS, whose="llama.cpp"
    )
    fields.notes = notes
    return fields


def sizes(fields: Fields, metadata: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """What every architecture says: vocab, d, layers, heads, kv, width, hidden, max_len, base,

    eps and tied. A number is the decimal that its float32 was made from. The file has no flag for
    tying: the head is the embedding when there is no output.weight.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    counted = len(tokens) if isinstance(tokens, list) else None
    heads = fields.positive_int("attention.head_count")
    out = {
        "vocab": fields.positive_int("vocab_size", absent=counted),
        "d": fields.positive_int("embedding_length"),
        "layers": fields.positive_int("block_count"),
        "heads": heads,
        "kv": fields.positive_int("attention.head_count_kv", absent=heads),
        "hidden": fields.positive_int("feed_forward_length"),
        "max_len": fields.positive_int("context_length"),
        "base": decimal(fields.number("rope.freq_base")),
        "eps": decimal(fields.number("attention.layer_norm_rms_epsilon")),
        "tied": "output.weight" not in names,
    }
    if out["vocab"] is None:
        fields.problems.append(
            "vocab_size: missing, and so is the token list that would be counted"
        )
    return {**out, "width": _width(fields, out["d"], heads)}


def _width(fields: Fields, d: int | None, heads: int | None) -> int | None:
    """A head's width where it is written; llama.cpp takes d / heads where it is not."""
    widths = {
        key: width
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        if (width := fields.positive_int(key, absent=None)) is not None
    }
    width = widths.get("attention.key_length", (d or 0) // (heads or 1))
    if any(
        other != width for other in widths.values()
    ):  # a smaller rotary width rotates a part only
        fields.problems.append(f"head width {width} expected throughout, got {widths}")
    return widths.get("attention.key_length")


def decimal(x: float | None) -> float | None:
    """The shortest decimal with this float32: a file says 9.99999974e-06 and means 1e-05."""
    if x is None:
        return None
    with np.errstate(over="ignore"):  # infinity, which the spec refuses
        return float(str(np.float32(x)))
