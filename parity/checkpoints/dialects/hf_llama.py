"""Hugging Face's Llama (1 to 3.2), and Mistral, which is one whose tokens see a window."""

from __future__ import annotations

from typing import Any

from jaxtwin.configs import BadInput, Model
from jaxtwin.configs.spec import GQA, RMS, Block, Glu
from jaxtwin.parity.checkpoints.dialects.base import Dialect, Fields
from jaxtwin.parity.checkpoints.dialects.hf_keys import (
    ACTS,
    BODY,
    LLAMA_DEFAULTS,
    LLAMA_LAYER,
    LLAMA_NAMES,
    PRE_NORMS,
    Family,
    first_layer,
    layer,
    model,
    sizes,
    word,
    written_sizes,
)
from jaxtwin.parity.checkpoints.dialects.hf_rope import longest, parameters, rope

MLP_BIASES = layer(
    ("ffn.gate.bias", "mlp.gate_proj.bias", "f -> f"),
    ("ffn.up.bias", "mlp.up_proj.bias", "f -> f"),
    ("ffn.down.bias", "mlp.down_proj.bias", "d -> d"),
)
HF_LLAMA = Dialect(
    "hf-llama", LLAMA_NAMES + PRE_NORMS + LLAMA_LAYER + MLP_BIASES, "half", prefix=BODY
)
HF_MISTRAL = Dialect("hf-mistral", LLAMA_NAMES + PRE_NORMS + LLAMA_LAYER, "half", prefix=BODY)


def read_llama(fields: Fields) -> Model:
    size = sizes(fields, kv="heads", derived=True)
    bias = fields.flag("attention_bias", absent=False)
    return _read(fields, size, bias, fields.flag("mlp_bias", absent=False), None)


def read_mistral(fields: Fields) -> Model:
    size = sizes(fields, kv="null", derived=True)
    return _read(fields, size, False, False, fields.positive_int("sliding_window", null=None))


def _read(fields: Fields, size: Any, bias: bool, mlp_bias: bool, window: int | None) -> Model:
    tied = fields.flag("tie_word_embeddings", absent=False)
    act = fields.choice("hidden_act", ACTS)
    rotary = rope(fields, size.length)
    fields.finish()
    norm = RMS(eps=size.eps)
    block = Block(
        pre_attn=norm,
        attn=GQA(
            heads=size.heads,
            kv=size.kv,
            width=size.width,
            rope=rotary,
            bias=bias,
            out_bias=bias,
            window=window,
        ),
        pre_ffn=norm,
        ffn=Glu(hidden=size.hidden, act=act, bias=mlp_bias),
    )
    return model(
        [block] * size.layers,
        init_std=size.init_std,
        norm=norm,
        d=size.d,
        vocab=size.vocab,
        max_len=longest({"": rotary}, size.length),
        tied=tied,
    )


def write_llama(spec: Model) -> dict[str, Any]:
    block = first_layer(spec, "Llama", Glu)
    if spec.d % block.attn.heads:
        raise BadInput(
            f"transformers refuses a Llama whose hidden_size ({spec.d}) is not a multiple of its "
            f"heads ({block.attn.heads}); this model cannot be written for it"
        )
    biases = {"attention_bias": block.attn.bias, "mlp_bias": block.ffn.bias}
    return {**_write(spec, block), **biases}


def write_mistral(spec: Model) -> dict[str, Any]:
    block = first_layer(spec, "Mistral", Glu)
    return {**_write(spec, block), "sliding_window": block.attn.window}


def _write(spec: Model, block: Block) -> dict[str, Any]:
    assert block.attn.rope is not None
    return {
        **written_sizes(spec, block),
        "hidden_act": word(block.ffn.act, ACTS),
        "rope_parameters": parameters(block.attn.rope),
    }


PLAIN = {
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1, None),
    "layer_types": (None,),
    "is_llama_config": (True,),
}
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    HF_LLAMA,
    read_llama,
    write_llama,
    tied=False,
    fixed={**PLAIN, "sliding_window": (None,)},
    defaults=LLAMA_DEFAULTS,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    HF_MISTRAL,
    read_mistral,
    write_mistral,
    tied=False,
    fixed={**PLAIN, "attention_bias": (False, None), "mlp_bias": (False, None)},
    defaults={
        **LLAMA_DEFAULTS,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4_096,
    },
)
