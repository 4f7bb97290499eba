"""Model files made by other code (transformers, safetensors, torch) for the tests to read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import transformers

from jaxtwin.configs import Model
from jaxtwin.configs.llama import llama
from jaxtwin.configs.spec import to_json
from jaxtwin.parity.checkpoints.dialects import from_hf
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.tests.helpers.kit import torch_model

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


def from_config(**changes: Any) -> Model:
    """The spec of CONFIG with keys set; ... removes one."""
    return from_hf({k: v for k, v in {**CONFIG, **changes}.items() if v is not ...})


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


def spec_of(pairs: str = "half", tied: bool = False, layers: int = 3) -> Model:
    """Sizes of their own on every axis."""
    return llama(
        vocab=23, d=24, layers=layers, heads=6, kv=2, hidden=20, max_len=32, base=500.0,
        pairs=pairs, eps=1e-5, tied=tied, width=10,
    )  # fmt: skip


def torch_state(spec: Model, dtype: str, seed: int = 0) -> dict[str, torch.Tensor]:
    model = torch_model(spec, seed=seed)
    return {k: v.to(getattr(torch, dtype)) for k, v in model.state_dict().items()}


def pt_file(path: Path, spec: Model, state: dict[str, torch.Tensor]) -> Path:
    """A .pt of ours, as anybody could write it."""
    torch.save({"format": 1, "spec": to_json(spec), "state": state}, path)
    return path


def digests(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """sha256 of every tensor's bytes, without our code."""
    return {
        name: hashlib.sha256(bytes(value.contiguous().view(torch.uint8).numpy())).hexdigest()
        for name, value in state.items()
    }


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Every tensor, read."""
    return {name: tensor.read() for name, tensor in tensors.items()}


def notes_of(folder: Path) -> str:
    """The notes that opening a folder gives, one a line."""
    return "\n".join(open_source(folder).notes)


def halves(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The stored tensors of a folder in two parts, for two shards."""
    tensors = sorted(stored(folder).items())
    return dict(tensors[: len(tensors) // 2]), dict(tensors[len(tensors) // 2 :])
