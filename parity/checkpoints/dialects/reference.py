"""The reference decoder's own names, as in its golden files: see tests/golden/README.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtwin.configs import Model
from jaxtwin.configs.llama import llama
from jaxtwin.parity.checkpoints.dialects.base import Dialect, Fields, build_spec
from jaxtwin.parity.table.row import Row

REFERENCE = Dialect(
    name="reference",
    pairs="adjacent",
    naming=(
        Row("embed.weight", "embed.weight", "v d -> v d"),
        Row("layers.{l}.pre_attn.weight", "blocks.{l}.n1.weight", "d -> d"),
        Row(
            "layers.{l}.attn.q.weight",
            "blocks.{l}.attn.q.weight",
            "(n {theirs}) d -> (n {ours}) d",
        ),
        Row(
            "layers.{l}.attn.k.weight",
            "blocks.{l}.attn.k.weight",
            "(k {theirs}) d -> (k {ours}) d",
        ),
        Row("layers.{l}.attn.v.weight", "blocks.{l}.attn.v.weight", "(k h) d -> (k h) d"),
        Row("layers.{l}.attn.o.weight", "blocks.{l}.attn.o.weight", "d (n h) -> d (n h)"),
        Row("layers.{l}.pre_ffn.weight", "blocks.{l}.n2.weight", "d -> d"),
        Row("layers.{l}.ffn.gate.weight", "blocks.{l}.gate.weight", "f d -> f d"),
        Row("layers.{l}.ffn.up.weight", "blocks.{l}.up.weight", "f d -> f d"),
        Row("layers.{l}.ffn.down.weight", "blocks.{l}.down.weight", "d f -> d f"),
        Row("norm.weight", "norm.weight", "d -> d"),
        Row("head.weight", "head.weight", "v d -> v d"),
    ),
)


def from_reference(config: Mapping[str, Any], where: str) -> Model:
    """The spec of a golden file's config; a BadInput on a key too many, too few or out of range."""
    fields = Fields(config, where, fixed={}, ignored={})
    sizes = {
        "vocab": fields.positive_int("vocab"),
        "d": fields.positive_int("width"),
        "layers": fields.positive_int("layers"),
        "heads": fields.positive_int("heads"),
        "kv": fields.positive_int("kv_heads"),
        "hidden": fields.positive_int("hidden"),
        "max_len": fields.positive_int("context"),
        "base": fields.number("theta"),
        "eps": fields.number("eps"),
        "tied": fields.flag("tied"),
    }
    fields.finish()
    return build_spec(llama, where, **sizes, pairs=REFERENCE.pairs)
