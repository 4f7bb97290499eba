"""Meta's files, made of transformers' models by Meta's rules; and the published params.json."""

from __future__ import annotations

from typing import Any

import torch
import transformers

# 8 * 24 / 3 = 64, and the next multiple of 10 is 70; 4 heads of 6, 2 of them for keys.
PARAMS: dict[str, Any] = {
    "dim": 24,
    "multiple_of": 10,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 3,
    "norm_eps": 1e-5,
    "vocab_size": 32,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-7b": {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-06,
                 "vocab_size": -1},
    "llama2-7b": {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32,
                  "norm_eps": 1e-05, "vocab_size": -1},
    "llama2-70b": {"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64,
                   "n_kv_heads": 8, "n_layers": 80, "norm_eps": 1e-05, "vocab_size": -1},
    "llama3-8b": {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "norm_eps": 1e-05,
                  "vocab_size": 128256, "multiple_of": 1024, "ffn_dim_multiplier": 1.3,
                  "rope_theta": 500000.0},
    "llama3.1-8b": {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "norm_eps": 1e-05,
                    "vocab_size": 128256, "multiple_of": 1024, "ffn_dim_multiplier": 1.3,
                    "rope_theta": 500000.0, "use_scaled_rope": True},
    "llama3.2-1b": {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "norm_eps": 1e-05,
                    "vocab_size": 128256, "multiple_of": 256, "ffn_dim_multiplier": 1.5,
                    "rope_theta": 500000.0, "use_scaled_rope": True},
}  # fmt: skip


def model(scaled: bool = False, tied: bool = False) -> Any:
    """transformers' Llama with lively values; frequencies scaled as in Llama 3.1 if asked."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    if scaled:
        rope |= {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8_192}
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=24,
        intermediate_size=70,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131_072 if scaled else 4_096,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    hf_model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for param in hf_model.parameters():
            around, spread = (1.0, 0.3) if param.ndim == 1 else (0.0, param.shape[1] ** -0.5)
            param.normal_(around, spread)
    return hf_model.eval()


def meta_name(name: str) -> str:
    """Meta's name for one of transformers', written out again."""
    for theirs, ours in {
        "model.": "",
        "lm_head": "output",
        "embed_tokens": "tok_embeddings",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.": "attention.",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        **{f"{x}_proj": f"w{x}" for x in "qkvo"},
    }.items():
        name = name.replace(theirs, ours)
    return name


def state_of(hf_model: Any) -> dict[str, torch.Tensor]:
    """Meta's tensors: the halves of Q and K heads lie in turn, as Meta's code turns pairs."""
    heads = {"wq": 4, "wk": 2}
    out = {}
    for name, value in hf_model.state_dict().items():
        ours, value = meta_name(name), value.detach().clone()
        if (part := ours.split(".")[-2]) in heads:
            halves = value.view(heads[part], 2, 3, 24)
            value = halves.transpose(1, 2).reshape(value.shape).contiguous()
        out[ours] = value
    return out
