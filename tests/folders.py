"""Model files made by other code (transformers, safetensors, torch) for the tests to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import transformers

# Every size is of its own, so that no swapped axis goes unseen; 3 heads of 10 are not the width 24.
SIZES = {
    "vocab_size": 23,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **SIZES,
    "hidden_act": "silu",
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
}


def hf_model(dtype: str = "float32", *, tied: bool = False, seed: int = 0, **more: Any) -> Any:
    """transformers' own Llama with lively random values."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **SIZES,
        rope_theta=500.0,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        **more,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(1.0 if param.ndim == 1 else 0.0, 0.3)
    return model.to(getattr(torch, dtype)).eval()


def hf_folder(folder: Path, dtype: str = "float32", **more: Any) -> Path:
    """A folder that transformers wrote."""
    shard = more.pop("max_shard_size", "50GB")
    hf_model(dtype, **more).save_pretrained(folder, max_shard_size=shard)
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    """config.json with keys set; ... removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def stored(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder's safetensors files, read by the library."""
    out: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= safetensors.numpy.load_file(path)
    return out


def store(folder: Path, tensors: Mapping[str, np.ndarray], name: str = "model.safetensors") -> Path:
    """The tensors as one file of the folder, written by the library."""
    whole = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
    safetensors.numpy.save_file(whole, folder / name, metadata={"format": "pt"})
    return folder


def store_shards(
    folder: Path,
    shards: Mapping[str, Mapping[str, np.ndarray]],
    where: Mapping[str, str] | None = None,
) -> Path:
    """Shards with an index: the true one unless `where` maps tensors otherwise."""
    for name, tensors in shards.items():
        store(folder, tensors, name)
    true = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {}, "weight_map": true if where is None else where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink(missing_ok=True)
    return folder


def bits(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What is compared when nothing may change: dtype, shape and bytes of every tensor."""
    return {k: (str(v.dtype), v.shape, v.tobytes()) for k, v in tensors.items()}
