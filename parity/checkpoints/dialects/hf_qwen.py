"""Hugging Face's Qwen 2 and 2.5 (Q, K, V have biases) and Qwen 3 (queries and keys are normed)."""

from __future__ import annotations

from typing import Any

from jaxtwin.configs import Model
from jaxtwin.configs.spec import GQA, RMS, Block, Glu, QKNorm
from jaxtwin.parity.checkpoints.dialects.base import Dialect, Fields
from jaxtwin.parity.checkpoints.dialects.hf_keys import (
    ACTS,
    BODY,
    HEAD_NORMS,
    LLAMA_DEFAULTS,
    LLAMA_LAYER,
    LLAMA_NAMES,
    PRE_NORMS,
    Family,
    Sizes,
    first_layer,
    layer_types,
    model,
    sizes,
    word,
    written_sizes,
)
from jaxtwin.parity.checkpoints.dialects.hf_rope import LAYER_TYPES, longest, parameters, rope

HF_QWEN2 = Dialect("hf-qwen2", LLAMA_NAMES + PRE_NORMS + LLAMA_LAYER, "half", prefix=BODY)
HF_QWEN3 = Dialect(
    "hf-qwen3", LLAMA_NAMES + PRE_NORMS + LLAMA_LAYER + HEAD_NORMS, "half", prefix=BODY
)


def windows(fields: Fields, layers: int) -> list[int | None]:
    """The window of every layer.

    use_sliding_window false turns sliding_window off altogether. Else layers from number
    max_window_layers on slide, unless layer_types says which.
    """
    sliding = fields.flag("use_sliding_window", absent=False)
    window = fields.positive_int("sliding_window", null=None) if sliding else None
    types = fields.words("layer_types", LAYER_TYPES, layers)
    if sliding and window and types is None:
        start = fields.count("max_window_layers")
        if start is not None:
            types = [LAYER_TYPES[i >= start] for i in range(layers)]
    if types and "sliding_attention" in types and window is None:
        fields.problems.append(
            "layer_types: some are sliding_attention, and no sliding_window is in use"
        )
    if types is None:
        types = ["full_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in types]


def read_qwen2(fields: Fields) -> Model:
    return _read(fields, sizes(fields, kv="null", derived=True), True, False, None)


def read_qwen3(fields: Fields) -> Model:
    size = sizes(fields, kv="null")
    bias = fields.flag("attention_bias", absent=False)
    return _read(fields, size, bias, bias, "head")


def _read(fields: Fields, size: Sizes, bias: bool, out_bias: bool, over: Any) -> Model:
    seen = windows(fields, size.layers)
    tied = fields.flag("tie_word_embeddings", absent=False)
    act = fields.choice("hidden_act", ACTS)
    rotary = rope(fields, size.length)
    fields.finish()
    norm = RMS(eps=size.eps)

    def block(window: int | None) -> Block:
        attn = GQA(
            heads=size.heads,
            kv=size.kv,
            width=size.width,
            rope=rotary,
            bias=bias,
            out_bias=out_bias,
            qk_norm=QKNorm(norm=norm, over=over) if over else None,
            window=window,
        )
        return Block(pre_attn=norm, attn=attn, pre_ffn=norm, ffn=Glu(hidden=size.hidden, act=act))

    return model(
        [block(window) for window in seen],
        init_std=size.init_std,
        norm=norm,
        d=size.d,
        vocab=size.vocab,
        max_len=longest({"": rotary}, size.length),
        tied=tied,
    )


def write_qwen2(spec: Model) -> dict[str, Any]:
    return _write(spec, first_layer(spec, "Qwen 2", Glu))


def write_qwen3(spec: Model) -> dict[str, Any]:
    block = first_layer(spec, "Qwen 3", Glu)
    return {**_write(spec, block), "attention_bias": block.attn.bias}


def _write(spec: Model, block: Block) -> dict[str, Any]:
    """Which layers slide is written twice where it can be, for transformers 4 and 5."""
    assert block.attn.rope is not None
    types, window = layer_types(spec)
    start = types.index("sliding_attention") if window else len(types)
    return {
        **written_sizes(spec, block),
        "hidden_act": word(block.ffn.act, ACTS),
        "rope_parameters": parameters(block.attn.rope),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": start,
        "layer_types": types,
    }


# Read only where a window is used.
UNUSED = {
    "sliding_window": "read where use_sliding_window is true",
    "max_window_layers": "read where a window is used and layer_types does not say",
}
PLAIN = {"partial_rotary_factor": (1, None), "use_mrope": (False,)}
DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
    "sliding_window": 4_096,
}
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    HF_QWEN2,
    read_qwen2,
    write_qwen2,
    tied=False,
    fixed=PLAIN,
    ignored=UNUSED,
    defaults=DEFAULTS,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    HF_QWEN3,
    read_qwen3,
    write_qwen3,
    tied=False,
    fixed=PLAIN,
    ignored=UNUSED,
    defaults={**DEFAULTS, "head_dim": 128},
)
