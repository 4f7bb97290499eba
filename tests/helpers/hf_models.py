"""Tiny models of every Hugging Face family, made by transformers itself, with lively weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.pytorch_utils import Conv1D

WINDOW = 17
# Every size of its own where the class allows it; 4 heads of 10 are not the width 32.
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": 61,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 320,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOOM = {"vocab_size": 61, "hidden_size": 30, "n_layer": 3, "n_head": 6, "seq_length": 320}


def rope(kind: str = "default", base: float = 500.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": base, **more}


ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL)
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
MSCALE = {"mscale": 0.9, "mscale_all_dim": 0.4, "beta_fast": 16.0, "beta_slow": 2.0}
LOCAL_GLOBAL = {
    "sliding_attention": rope(base=100.0),
    "full_attention": rope("linear", base=5_000.0, factor=8.0),
}
ALL_BIASES = {"attention_bias": True, "mlp_bias": True}
SLIDES = {"use_sliding_window": True, "sliding_window": WINDOW}
OWN_WIDTH = {**SIZES, "head_dim": 10}
GEMMA2 = {**OWN_WIDTH, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}

# By model_type: the class of its config, and variants, the plain one first.
VARIANTS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "llama": (
        "LlamaConfig",
        {
            "plain": {**SIZES, "rope_parameters": rope()},
            "all": {
                **OWN_WIDTH,
                **ALL_BIASES,
                "tie_word_embeddings": True,
                "hidden_act": "gelu",
                "rope_parameters": LLAMA3,
            },
            "linear": {**SIZES, "rope_parameters": rope("linear", factor=4.0)},
            "dynamic": {
                **SIZES,
                "max_position_embeddings": 128,
                "rope_parameters": rope("dynamic", factor=4.0),
            },
            "yarn": {**SIZES, "rope_parameters": rope("yarn", factor=8.0, **ORIGINAL)},
            "yarn-mscale": {
                **SIZES,
                "rope_parameters": rope("yarn", factor=8.0, truncate=False, **MSCALE, **ORIGINAL),
            },
            "yarn-factor": {
                **SIZES,
                "rope_parameters": rope("yarn", factor=8.0, attention_factor=1.5, **ORIGINAL),
            },
            "longrope": {
                **SIZES,
                "rope_parameters": rope("longrope", factor=8.0, **LONG, **ORIGINAL),
            },
        },
    ),
    "mistral": (
        "MistralConfig",
        {
            "plain": {**SIZES, "sliding_window": WINDOW, "rope_parameters": rope()},
            "all": {
                **OWN_WIDTH,
                "sliding_window": None,
                "tie_word_embeddings": True,
                "rope_parameters": rope("yarn", factor=8.0, **ORIGINAL),
            },
        },
    ),
    "qwen2": (
        "Qwen2Config",
        {
            "plain": {**SIZES, "rope_parameters": rope()},
            "all": {
                **SIZES,
                **SLIDES,
                "num_hidden_layers": 4,
                "max_window_layers": 2,
                "tie_word_embeddings": True,
                "rope_parameters": rope("yarn", factor=8.0, **ORIGINAL),
            },
        },
    ),
    "qwen3": (
        "Qwen3Config",
        {
            "plain": {**OWN_WIDTH, "rope_parameters": rope()},
            "all": {
                **OWN_WIDTH,
                **SLIDES,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "attention_bias": True,
                "tie_word_embeddings": True,
                "rope_parameters": rope("linear", factor=2.0),
            },
        },
    ),
    "gemma": (
        "GemmaConfig",
        {
            "plain": {**OWN_WIDTH, "rope_parameters": rope()},
            "all": {
                **OWN_WIDTH,
                "attention_bias": True,
                "tie_word_embeddings": False,
                "hidden_act": "gelu",
                "rope_parameters": rope("linear", factor=2.0),
            },
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "plain": {
                **GEMMA2,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 3.0,
                "rope_parameters": rope(),
            },
            "all": {
                **GEMMA2,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "query_pre_attn_scalar": 10,
                "attention_bias": True,
                "tie_word_embeddings": False,
                "layer_types": ["full_attention", "full_attention", "sliding_attention"],
                "rope_parameters": rope(),
            },
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "plain": {**GEMMA2, "num_hidden_layers": 7, "rope_parameters": LOCAL_GLOBAL},
            "all": {
                **GEMMA2,
                "final_logit_softcapping": 3.0,
                "attention_bias": True,
                "tie_word_embeddings": False,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "rope_parameters": {
                    **LOCAL_GLOBAL,
                    "full_attention": rope("yarn", base=5_000.0, factor=8.0, **ORIGINAL),
                },
            },
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "plain": GPT2,
            "all": {
                **GPT2,
                "n_inner": 40,
                "activation_function": "relu",
                "scale_attn_by_inverse_layer_idx": True,
                "scale_attn_weights": False,
                "tie_word_embeddings": False,
            },
        },
    ),
    "olmo2": (
        "Olmo2Config",
        {
            "plain": {**SIZES, "rope_parameters": rope()},
            "all": {
                **OWN_WIDTH,
                "attention_bias": True,
                "tie_word_embeddings": True,
                "hidden_act": "gelu",
                "rope_parameters": rope("yarn", factor=8.0, **ORIGINAL),
            },
        },
    ),
    "bloom": ("BloomConfig", {"plain": BLOOM, "all": {**BLOOM, "tie_word_embeddings": False}}),
}
CASES = [(kind, name) for kind, (_, variants) in VARIANTS.items() for name in variants]


def config(kind: str, variant: str = "plain", **changes: Any) -> Any:
    """transformers' own config."""
    name, variants = VARIANTS[kind]
    return getattr(transformers, name)(**{**variants[variant], **changes})


def json_config(kind: str, variant: str = "plain", **changes: Any) -> dict[str, Any]:
    """The same as JSON, every key written out; ... removes one."""
    theirs = {**config(kind, variant).to_dict(), "architectures": None, **changes}
    return json.loads(json.dumps({k: v for k, v in theirs.items() if v is not ...}))


def model(kind: str, variant: str = "plain", seed: int = 0, **changes: Any) -> Any:
    """transformers' own model in float32, with eager attention.

    Matrices have unit gain; scales lie around the value at which they do nothing; no bias is 0.
    """
    torch.manual_seed(seed)
    with_eager = {**changes, "attn_implementation": "eager"}
    model_ = transformers.AutoModelForCausalLM.from_config(config(kind, variant, **with_eager))
    with torch.no_grad():
        for module in model_.modules():
            rows = 0 if isinstance(module, Conv1D) else 1  # which axis is summed over
            for name, param in module.named_parameters(recurse=False):
                if param.ndim == 2:
                    param.normal_(0, param.shape[rows] ** -0.5)
                elif name == "bias":
                    param.normal_(0, 0.3)
                else:
                    param += torch.rand_like(param) - 0.5
    return model_.eval()


def folder(path: Path, kind: str, variant: str = "plain", dtype: str = "float32") -> Path:
    """A folder that transformers wrote."""
    model(kind, variant).to(getattr(torch, dtype)).save_pretrained(path)
    return path
