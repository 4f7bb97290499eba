"""Hugging Face's Gemma 1, 2 and 3 (its text part): scales of 1 + w, an embedding times sqrt(d)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtwin.configs import Model
from jaxtwin.configs.spec import GQA, RMS, Block, Glu, QKNorm, Rope
from jaxtwin.parity.checkpoints.dialects.base import Dialect, Fields
from jaxtwin.parity.checkpoints.dialects.hf_keys import (
    ACTS,
    BODY,
    HEAD_NORMS,
    LLAMA_LAYER,
    LLAMA_NAMES,
    PRE_NORMS,
    Family,
    Sizes,
    first_layer,
    layer,
    layer_types,
    model,
    sizes,
    word,
    written_sizes,
)
from jaxtwin.parity.checkpoints.dialects.hf_rope import (
    LAYER_TYPES,
    longest,
    parameters,
    rope,
    ropes,
)

SANDWICH = layer(
    ("pre_attn.weight", "input_layernorm.weight", "d -> d"),
    ("post_attn.weight", "post_attention_layernorm.weight", "d -> d"),
    ("pre_ffn.weight", "pre_feedforward_layernorm.weight", "d -> d"),
    ("post_ffn.weight", "post_feedforward_layernorm.weight", "d -> d"),
)
HF_GEMMA = Dialect("hf-gemma", LLAMA_NAMES + PRE_NORMS + LLAMA_LAYER, "half", prefix=BODY)
HF_GEMMA2 = Dialect("hf-gemma2", LLAMA_NAMES + SANDWICH + LLAMA_LAYER, "half", prefix=BODY)
HF_GEMMA3 = Dialect(
    "hf-gemma3", LLAMA_NAMES + SANDWICH + LLAMA_LAYER + HEAD_NORMS, "half", prefix=BODY
)

# The class takes a plain "gelu" for the tanh form, as the first releases meant it.
GEMMA1_ACTS = {**ACTS, "gelu": "gelu_tanh"}
LOCAL = "sliding_attention"


def _model(
    size: Sizes,
    attention: Sequence[GQA],
    *,
    act: Any,
    sandwich: bool,
    tied: bool,
    max_len: int,
    cap: float | None = None,
) -> Model:
    norm = _norm(size)
    after = norm if sandwich else None
    ffn = Glu(hidden=size.hidden, act=act)
    return model(
        [
            Block(pre_attn=norm, attn=attn, post_attn=after, pre_ffn=norm, ffn=ffn, post_ffn=after)
            for attn in attention
        ],
        init_std=size.init_std,
        norm=norm,
        d=size.d,
        vocab=size.vocab,
        max_len=max_len,
        embed_scale=size.d**0.5,
        tied=tied,
        cap=cap,
    )


def _norm(size: Sizes) -> RMS:
    return RMS(eps=size.eps, offset=True, cast="after")


def _gqa(size: Sizes, rotary: Rope | None, bias: bool, **more: Any) -> GQA:
    return GQA(
        heads=size.heads,
        kv=size.kv,
        width=size.width,
        rope=rotary,
        bias=bias,
        out_bias=bias,
        **more,
    )


def read_gemma(fields: Fields) -> Model:
    size = sizes(fields)
    tied = fields.flag("tie_word_embeddings", absent=True)
    bias = fields.flag("attention_bias", absent=False)
    act = fields.choice("hidden_act", GEMMA1_ACTS)
    _second_word(fields, "hidden_activation", act, GEMMA1_ACTS)
    rotary = rope(fields, size.length)
    fields.finish()
    attention = [_gqa(size, rotary, bias)] * size.layers
    max_len = longest({"": rotary}, size.length)
    return _model(size, attention, act=act, sandwich=False, tied=tied, max_len=max_len)


def _second_word(fields: Fields, key: str, act: str | None, words: Mapping[str, str]) -> None:
    """A second key for the activation, which the class does not read: it must agree."""
    fields.taken.add(key)
    value = fields.settings.get(key)
    if value is not None and (not isinstance(value, str) or words.get(value) != act):
        fields.problems.append(f"{key}: {value!r} is another activation than the one that is read")


def read_gemma2(fields: Fields) -> Model:
    size = sizes(fields)
    types = fields.words("layer_types", LAYER_TYPES, size.layers)
    if types is None:  # the class's own, which published files do not write out
        types = [LAYER_TYPES[i % 2 == 0] for i in range(size.layers)]
    rotary = rope(fields, size.length)
    caps = {
        key: fields.number(key, null=None)
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    return _read(fields, size, types, dict.fromkeys(LAYER_TYPES, rotary), caps, None)


def read_gemma3(fields: Fields) -> Model:
    size = sizes(fields)
    types = fields.words("layer_types", LAYER_TYPES, size.layers)
    if types is None or fields.settings.get("sliding_window_pattern") is not None:
        every = fields.positive_int("sliding_window_pattern") or 1
        periodic = [LAYER_TYPES[(i + 1) % every != 0] for i in range(size.layers)]
        if types not in (None, periodic):
            fields.problems.append("sliding_window_pattern: layer_types has other layers slide")
        types = periodic
    fields.taken.add("sliding_window_pattern")
    caps = {"final_logit_softcapping": fields.number("final_logit_softcapping", absent=None)}
    norm = None if size.eps is None else QKNorm(norm=_norm(size), over="head")
    return _read(fields, size, types, ropes(fields, size.length), caps, norm)


def _read(
    fields: Fields,
    size: Sizes,
    types: Sequence[str],
    rotary: Mapping[str, Rope | None],
    caps: Mapping[str, Any],
    qk_norm: QKNorm | None,
) -> Model:
    tied = fields.flag("tie_word_embeddings", absent=True)
    bias = fields.flag("attention_bias", absent=False)
    act = fields.choice("hidden_activation", ACTS)
    _second_word(fields, "hidden_act", act, ACTS)
    window = fields.positive_int(
        "sliding_window"
    )  # the class builds its mask even where none slides
    scalar = fields.positive_int("query_pre_attn_scalar")
    fields.finish()
    scale = None if scalar == size.width else scalar**-0.5
    cap = caps.get("attn_logit_softcapping")

    def attn(kind: str) -> GQA:
        seen = window if kind == LOCAL else None
        more = {"qk_norm": qk_norm, "scale": scale, "cap": cap, "window": seen}
        return _gqa(size, rotary[kind], bias, **more)

    return _model(
        size,
        [attn(kind) for kind in types],
        act=act,
        sandwich=True,
        tied=tied,
        max_len=longest({kind: rotary[kind] for kind in types}, size.length),
        cap=caps["final_logit_softcapping"],
    )


def write_gemma(spec: Model) -> dict[str, Any]:
    block = first_layer(spec, "Gemma", Glu)
    assert block.attn.rope is not None
    return {
        **written_sizes(spec, block),
        "attention_bias": block.attn.bias,
        "hidden_act": word(block.ffn.act, {k: v for k, v in GEMMA1_ACTS.items() if k != "gelu"}),
        "rope_parameters": parameters(block.attn.rope),
    }


def write_gemma2(spec: Model) -> dict[str, Any]:
    block = first_layer(spec, "Gemma 2", Glu)
    assert block.attn.rope is not None
    return {
        **_write(spec, block),
        "rope_parameters": parameters(block.attn.rope),
        "attn_logit_softcapping": block.attn.cap,
    }


def write_gemma3(spec: Model) -> dict[str, Any]:
    """A layer type that the model has none of has the other's rope."""
    block = first_layer(spec, "Gemma 3", Glu)
    assert block.attn.rope is not None
    types, _ = layer_types(spec)
    found = {
        kind: next(
            (b.attn.rope for b, t in zip(spec.layers, types, strict=True) if t == kind), None
        )
        for kind in LAYER_TYPES
    }
    return {
        **_write(spec, block),
        "rope_parameters": {k: parameters(r or block.attn.rope) for k, r in found.items()},
        "attn_logit_softcapping": None,
    }


def _write(spec: Model, block: Block) -> dict[str, Any]:
    types, window = layer_types(spec)
    attn = block.attn
    scalar = attn.width if attn.scale is None else round(attn.scale**-2)
    return {
        **written_sizes(spec, block),
        "attention_bias": attn.bias,
        "hidden_activation": word(block.ffn.act, ACTS),
        "query_pre_attn_scalar": scalar,
        "sliding_window": window or spec.max_len,  # a window is always written, used or not
        "layer_types": types,
        "final_logit_softcapping": spec.cap,
    }


PLAIN: dict[str, tuple[Any, ...]] = {"partial_rotary_factor": (1, None)}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 3_072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8_192,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
DEFAULTS2: dict[str, Any] = {
    **{key: value for key, value in DEFAULTS.items() if key != "hidden_act"},
    "hidden_size": 2_304,
    "intermediate_size": 9_216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4_096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    HF_GEMMA,
    read_gemma,
    write_gemma,
    True,
    fixed=PLAIN,
    defaults=DEFAULTS,
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    HF_GEMMA2,
    read_gemma2,
    write_gemma2,
    True,
    fixed=PLAIN,
    defaults=DEFAULTS2,
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    HF_GEMMA3,
    read_gemma3,
    write_gemma3,
    True,
    fixed={**PLAIN, "attn_logit_softcapping": (None,)},  # the class has no cap of scores
    ignored={"_sliding_window_pattern": "what layer_types was made from"},
    defaults={
        **{key: value for key, value in DEFAULTS2.items() if not key.endswith("softcapping")},
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
)
