"""Hugging Face's OLMo 2: norms on the outputs alone, and QK-norm over the whole projection.

In bfloat16 the class rotates queries and keys in float32 and rounds once, at the end; both mirrors
round cos and sin first, as the Llama class does. In float32 and wider the two are the same.
"""

from __future__ import annotations

from typing import Any

from jaxtwin.configs import Model
from jaxtwin.configs.spec import GQA, RMS, Block, Glu, QKNorm
from jaxtwin.parity.checkpoints.dialects.base import Dialect, Fields
from jaxtwin.parity.checkpoints.dialects.hf_keys import (
    ACTS,
    BODY,
    LLAMA_DEFAULTS,
    LLAMA_LAYER,
    LLAMA_NAMES,
    Family,
    first_layer,
    layer,
    model,
    sizes,
    word,
    written_sizes,
)
from jaxtwin.parity.checkpoints.dialects.hf_rope import longest, parameters, rope

POST_NORMS = layer(
    ("post_attn.weight", "post_attention_layernorm.weight", "d -> d"),
    ("post_ffn.weight", "post_feedforward_layernorm.weight", "d -> d"),
)
PROJECTION_NORMS = layer(
    ("attn.q_norm.norm.weight", "self_attn.q_norm.weight", "(n {theirs}) -> (n {ours})"),
    ("attn.k_norm.norm.weight", "self_attn.k_norm.weight", "(k {theirs}) -> (k {ours})"),
)
HF_OLMO2 = Dialect(
    "hf-olmo2", LLAMA_NAMES + POST_NORMS + LLAMA_LAYER + PROJECTION_NORMS, "half", prefix=BODY
)


def read_olmo2(fields: Fields) -> Model:
    size = sizes(fields, kv="heads", derived=True)
    bias = fields.flag("attention_bias", absent=False)
    tied = fields.flag("tie_word_embeddings", absent=False)
    act = fields.choice("hidden_act", ACTS)
    rotary = rope(fields, size.length)
    fields.finish()
    norm = RMS(eps=size.eps, cast="after")
    attn = GQA(
        heads=size.heads,
        kv=size.kv,
        width=size.width,
        rope=rotary,
        bias=bias,
        out_bias=bias,
        qk_norm=QKNorm(norm=norm, over="projection"),
    )
    ffn = Glu(hidden=size.hidden, act=act)
    block = Block(pre_attn=None, attn=attn, post_attn=norm, pre_ffn=None, ffn=ffn, post_ffn=norm)
    return model(
        [block] * size.layers,
        init_std=size.init_std,
        norm=norm,
        d=size.d,
        vocab=size.vocab,
        max_len=longest({"": rotary}, size.length),
        tied=tied,
    )


def write_olmo2(spec: Model) -> dict[str, Any]:
    block = first_layer(spec, "OLMo 2", Glu)
    assert block.attn.rope is not None
    return {
        **written_sizes(spec, block),
        "attention_bias": block.attn.bias,
        "hidden_act": word(block.ffn.act, ACTS),
        "rope_parameters": parameters(block.attn.rope),
    }


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    HF_OLMO2,
    read_olmo2,
    write_olmo2,
    tied=False,
    defaults={**LLAMA_DEFAULTS, "vocab_size": 50_304, "rms_norm_eps": 1e-5},
    fixed={"partial_rotary_factor": (1, None), "layer_types": (None,), "sliding_window": (None,)},
)
