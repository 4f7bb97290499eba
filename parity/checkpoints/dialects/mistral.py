"""Mistral's own files: params.json with a hidden_dim, tensors named as Meta's, adjacent pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtwin.configs import Model
from jaxtwin.configs.llama import llama
from jaxtwin.parity.checkpoints.dialects.base import Fields, build_spec

LENGTH = 32_768
IGNORED = {
    "max_batch_size": "how text is generated",
    "model_type": "which of their own classes loads it",
    "architecture": "which of their own classes loads it",
}
FIXED: dict[str, tuple[Any, ...]] = {
    "moe": (None,),
    "vision_encoder": (None,),
    "multimodal": (None,),
    "quantization": (None,),
    "causal": (True,),
}


def is_mistral(params: Mapping[str, Any]) -> bool:
    """Meta's files give a multiple in place of the feed-forward's width."""
    return "hidden_dim" in params


def from_mistral(params: Mapping[str, Any], tied: bool, where: str, notes: list[str]) -> Model:
    """The spec of a params.json; the rotated halves are those of Hugging Face's file of it.

    A BadInput names every setting that is missing, unknown or not supported. The length, which
    bounds the input and changes no number, is not in the files of most.
    """
    fields = Fields(params, where, fixed=FIXED, ignored=IGNORED)
    heads = fields.positive_int("n_heads")
    length = fields.positive_int(fields.alias("max_seq_len", "max_position_embeddings"), absent=0)
    sizes = {
        "vocab": fields.positive_int("vocab_size"),
        "d": fields.positive_int("dim"),
        "layers": fields.positive_int("n_layers"),
        "heads": heads,
        "kv": fields.positive_int("n_kv_heads", absent=heads),
        "width": fields.positive_int("head_dim"),
        "hidden": fields.positive_int("hidden_dim"),
        "eps": fields.number("norm_eps"),
        "base": fields.number("rope_theta"),
        "window": fields.positive_int("sliding_window", absent=None),
        "max_len": length or LENGTH,
    }
    stated = fields.flag("tied_embeddings", absent=tied)
    if stated != tied:
        fields.problems.append(f"tied_embeddings: {stated}, and the tensors say {tied}")
    fields.finish()
    if not length:
        notes.append(f"no max_seq_len: {LENGTH} positions, as in Mistral 7B; it changes no number")
    return build_spec(llama, where, **sizes, tied=tied, pairs="half")
