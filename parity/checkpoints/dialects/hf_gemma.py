"""Hugging Face's Gemma 1, 2 and 3 (its text part): scales of 1 + w, an embedding times sqrt(d)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtwin.configs import Model
from jaxtwin.configs.spec import GQA, RMS, Block, Glu, QKNorm, Rope
from jaxtwin.parity.checkpoints.dialects.base import Dialect, Fields
from jaxtwin.parity.checkpoints.dialects.hf_keys import (
    ACTS,
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
HF_GEMMA = Dialect("hf-gemma", LLAMA_NAMES + PRE_NORMS + LLAMA_LAYER, "half")
HF_GEMMA2 = Dialect("hf-gemma2", LLAMA_NAMES + SANDWICH + LLAMA_LAYER, "half")
HF_GEMMA3 = Dialect("hf-gemma3", LLAMA_NAMES + SANDWICH + LLAMA_LAYER + HEAD_NORMS, "half")

# The class takes a plain "gelu" for the tanh form, as the first releases meant it.
GEMMA1_ACTS = {**ACTS, "gelu": "gelu_tanh"}
LOCAL = "sliding_attention"


def _model(
    said: Sizes,
    attention: Sequence[GQA],
    *,
    act: Any,
    sandwich: bool,
    tied: bool,
    max_len: int,
    cap: float | None = None,
) -> Model:
    norm = _norm(said)
    after = norm if sandwich else None
    ffn = Glu(hidden=said.hidden, act=act)
    return model(
        [
            Block(pre_attn=norm, attn=attn, post_attn=after, pre_ffn=norm, ffn=ffn, post_ffn=after)
            for attn in attention
        ],
        init_std=said.init_std,
        norm=norm,
        d=said.d,
        vocab=said.vocab,
        max_len=max_len,
        embed_scale=said.d**0.5,
        tied=tied,
        cap=cap,
    )


def _norm(said: Sizes) -> RMS:
    return RMS(eps=said.eps, offset=True, cast="after")


def _gqa(said: Sizes, turned: Rope | None, bias: bool, **more: Any) -> GQA:
    return GQA(
        heads=said.heads,
        kv=said.kv,
        width=said.width,
        rope=turned,
        bias=bias,
        out_bias=bias,
        **more,
    )


def read_gemma(fields: Fields) -> Model:
    said = sizes(fields)
    tied = fields.flag("tie_word_embeddings", absent=True)
    bias = fields.flag("attention_bias", absent=False)
    act = fields.choice("hidden_act", GEMMA1_ACTS)
    _second_word(fields, "hidden_activation", act, GEMMA1_ACTS)
    turned = rope(fields, said.length)
    fields.finish()
    attention = [_gqa(said, turned, bias)] * said.layers
    max_len = longest({"": turned}, said.length)
    return _model(said, attention, act=act, sandwich=False, tied=tied, max_len=max_len)


def _second_word(fields: Fields, key: str, act: str | None, words: Mapping[str, str]) -> None:
    """A second key for the activation, which the class does not read: it must agree."""
    fields.taken.add(key)
    said = fields.given.get(key)
    if said is not None and (not isinstance(said, str) or words.get(said) != act):
        fields.problems.append(f"{key}: {said!r} is another activation than the one that is read")


def read_gemma2(fields: Fields) -> Model:
    said = sizes(fields)
    types = fields.words("layer_types", LAYER_TYPES, said.layers)
    if types is None:  # the class's own, which published files do not write out
        types = [LAYER_TYPES[i % 2 == 0] for i in range(said.layers)]
    turned = rope(fields, said.length)
    caps = {
        key: fields.number(key, null=None)
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    return _read(fields, said, types, dict.fromkeys(LAYER_TYPES, turned), caps, None)


def read_gemma3(fields: Fields) -> Model:
    said = sizes(fields)
    types = fields.words("layer_types", LAYER_TYPES, said.layers)
    if types is None or fields.given.get("sliding_window_pattern") is not None:
        every = fields.whole("sliding_window_pattern") or 1
        periodic = [LAYER_TYPES[(i + 1) % every != 0] for i in range(said.layers)]
        if types not in (None, periodic):
            fields.problems.append("sliding_window_pattern: layer_types has other layers slide")
        types = periodic
    fields.taken.add("sliding_window_pattern")
    caps = {"final_logit_softcapping": fields.number("final_logit_softcapping", absent=None)}
    norm = None if said.eps is None else QKNorm(norm=_norm(said), over="head")
    return _read(fields, said, types, ropes(fields, said.length), caps, norm)


def _read(
    fields: Fields,
    said: Sizes,
    types: Sequence[str],
    turned: Mapping[str, Rope | None],
    caps: Mapping[str, Any],
    qk_norm: QKNorm | None,
) -> Model:
    tied = fields.flag("tie_word_embeddings", absent=True)
    bias = fields.flag("attention_bias", absent=False)
    act = fields.choice("hidden_activation", ACTS)
    _second_word(fields, "hidden_act", act, ACTS)
    window = fields.whole("sliding_window")  # the class builds its mask even where none slides
    scalar = fields.whole("query_pre_attn_scalar")
    fields.finish()
    scale = None if scalar == said.width else scalar**-0.5
    cap = caps.get("attn_logit_softcapping")

    def attn(kind: str) -> GQA:
        seen = window if kind == LOCAL else None
        more = {"qk_norm": qk_norm, "scale": scale, "cap": cap, "window": seen}
        return _gqa(said, turned[kind], bias, **more)

    return _model(
        said,
        [attn(kind) for kind in types],
        act=act,
        sandwich=True,
        tied=tied,
        max_len=longest({kind: turned[kind] for kind in types}, said.length),
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
GEMMA = Family("gemma", "GemmaForCausalLM", HF_GEMMA, read_gemma, write_gemma, True, must=PLAIN)
GEMMA2 = Family(
    "gemma2", "Gemma2ForCausalLM", HF_GEMMA2, read_gemma2, write_gemma2, True, must=PLAIN
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    HF_GEMMA3,
    read_gemma3,
    write_gemma3,
    True,
    must={**PLAIN, "attn_logit_softcapping": (None,)},  # the class has no cap of scores
    free={"_sliding_window_pattern": "what layer_types was made from"},
)
