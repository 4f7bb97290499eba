"""What transformers' config classes take for a key that a config.json leaves out (5.24).

An implementation's facts, and not the file's: each that is used is noted. A test compares them with
the classes. Keys whose absence has a meaning of its own (head_dim: d / heads) are the readers'.
"""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2_048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
QWEN: dict[str, Any] = {
    **LLAMA,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
    "sliding_window": 4_096,
}
GEMMA: dict[str, Any] = {
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
GEMMA2: dict[str, Any] = {
    **{key: value for key, value in GEMMA.items() if key != "hidden_act"},
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
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {
        **LLAMA,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4_096,
    },
    "qwen2": QWEN,
    "qwen3": {**QWEN, "head_dim": 128},
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": {
        **{k: v for k, v in GEMMA2.items() if not k.endswith("softcapping")},
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
    "gpt2": {
        "vocab_size": 50_257,
        "n_positions": 1_024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    },
    "bloom": {
        "vocab_size": 250_880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "layer_norm_epsilon": 1e-5,
    },
    "olmo2": {**LLAMA, "vocab_size": 50_304, "rms_norm_eps": 1e-5},
}
