"""Folders as people have them: side files, masks of any dtype, bare names, a vision part beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import jaxtwin
from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints import opened
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.dialects import META_LLAMA
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.table.bridge import to_torch
from jaxtwin.parity.table.tensors import backward
from jaxtwin.tests.helpers import hf_models
from jaxtwin.tests.helpers.folders import edit_config, hf_folder

SIDE = {
    "tekken.json": b"{}",
    "additional_chat_templates/rag.jinja": b"{{ x }}\n",
    "spiece.model": b"\x00\x01",
    "tokenizer.model.v3": b"v3",
    "vocab.bpe": b"a b\n",
    "README.md": "über".encode(),
}


def with_sides(folder: Path) -> Path:
    for name, data in SIDE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def held(folder: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in opened.beside(folder, []).items()}


@pytest.mark.parametrize("between", ["jax", "torch"])
def test_side_files_travel_byte_for_byte_both_ways(tmp_path: Path, between: str) -> None:
    folder = with_sides(hf_folder(tmp_path / "hf"))
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("x")
    (folder / "flax_model.msgpack").write_bytes(b"x")
    middle = tmp_path / ("middle" if between == "jax" else "middle.pt")
    convert(folder, middle, between)
    convert(middle, tmp_path / "back", "hf")
    assert held(folder).items() >= SIDE.items()
    assert held(tmp_path / "back") == held(folder)
    assert not (tmp_path / "back" / "flax_model.msgpack").exists()


def test_what_is_too_large_to_be_a_side_file_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "LARGEST", 4)
    folder = with_sides(hf_folder(tmp_path / "hf"))
    notes = open_source(folder).notes
    assert any("too large to travel along: README.md" in note for note in notes)


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


IDS = np.array([[1, 5, 9, 13, 2, 8, 60, 33]])


def near(one: np.ndarray, other: np.ndarray) -> bool:
    """Float32 against float32, in relative L2: a wrong part is off by 1e-2 and more."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32, torch.int64])
def test_masks_of_any_dtype_are_left_out(tmp_path: Path, dtype: torch.dtype) -> None:
    """GPT-2's: a mask of any dtype, and the number that stands for never."""
    model = hf_models.model("gpt2")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(path)
    n = model.config.n_positions
    for i in range(model.config.n_layer):
        state[f"transformer.h.{i}.attn.bias"] = torch.ones(n, n).tril().view(1, 1, n, n).to(dtype)
        state[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    safetensors.torch.save_file(state, path)
    assert near(np.asarray(jaxtwin.load(tmp_path)(IDS)), logits(model, IDS))
    assert any("stored causal masks" in note for note in open_source(tmp_path).notes)


def test_an_integer_that_is_no_mask_is_refused(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    state = safetensors.torch.load_file(folder / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.int64)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"no dtype of weights:\n  model.norm.weight: int64"):
        open_source(folder)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_names_of_the_body_alone(tmp_path: Path, kind: str) -> None:
    """As AutoModel writes them (Qwen3-Embedding): no `model.` before them, and no head."""
    whole = hf_models.model(kind, tie_word_embeddings=True)
    whole.base_model.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    assert not stated["architectures"][0].endswith(("CausalLM", "LMHeadModel"))
    keys = safetensors.torch.load_file(tmp_path / "model.safetensors").keys()
    assert not any(key.startswith(("model.", "transformer.")) for key in keys)
    assert near(np.asarray(jaxtwin.load(tmp_path)(IDS)), logits(whole, IDS))
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(BadInput, match=r"lm_head.weight: missing"):
        open_source(tmp_path)


def gemma3_with_vision() -> Any:
    text = hf_models.json_config("gemma3_text")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, image_token_index=60, mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def mistral3_with_vision() -> Any:
    text = hf_models.json_config("mistral")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
              "model_type": "pixtral"}  # fmt: skip
    config = transformers.Mistral3Config(
        text_config={**text, "model_type": "mistral"}, vision_config=vision, image_token_index=60
    )
    return transformers.Mistral3ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [gemma3_with_vision, mistral3_with_vision])
def test_the_text_part_of_a_model_of_text_and_images_is_read(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2)
    model.save_pretrained(tmp_path / "both")
    got = np.asarray(jaxtwin.load(tmp_path / "both")(IDS[:, :6]))
    assert near(got, logits(model, IDS[:, :6]))
    notes = open_source(tmp_path / "both").notes
    assert any("the decoder alone is read" in note for note in notes)
    jaxtwin.convert(tmp_path / "both", tmp_path / "text", "hf")
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert near(logits(alone, IDS[:, :6]), logits(model, IDS[:, :6]))


def test_a_head_that_a_wrapper_lacks_is_not_tied_in_silence(tmp_path: Path) -> None:
    """Case 35: neither flag ties, and the file has no head."""
    gemma3_with_vision().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"lm_head.weight: missing"):
        open_source(tmp_path)


def test_mistrals_own_format(tmp_path: Path) -> None:
    """As mistral-inference reads it: Meta's names, adjacent pairs, tekken.json beside."""
    theirs = hf_models.model("mistral")
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "same.pt", "torch")
    source = open_source(tmp_path / "same.pt")
    rows = META_LLAMA.rows(source.spec)
    state = {n: to_torch(t.read()) for n, t in backward(rows, source.tensors, "x").items()}
    own = tmp_path / "own"
    own.mkdir()
    safetensors.torch.save_file(state, own / "consolidated.safetensors")
    (own / "tekken.json").write_text("{}")
    c = theirs.config
    params = {
        "dim": c.hidden_size,
        "n_layers": c.num_hidden_layers,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": c.head_dim,
        "hidden_dim": c.intermediate_size,
        "norm_eps": 1e-5,
        "vocab_size": 61,
        "rope_theta": 500.0,
        "sliding_window": c.sliding_window,
    }
    (own / "params.json").write_text(json.dumps(params))
    assert near(np.asarray(jaxtwin.load(own)(IDS)), logits(theirs, IDS))
    assert "tekken.json" in open_source(own).carry
    assert any("no max_seq_len" in note for note in open_source(own).notes)
    (own / "params.json").write_text(json.dumps(params | {"moe": {"num_experts": 8}}))
    with pytest.raises(BadInput, match=r"moe: .* is not supported"):
        open_source(own)


def test_what_is_another_kind_of_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"is an adapter .* merge it into its base model first"):
        open_source(tmp_path)
    folder = hf_folder(tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    (folder / "flax_model.msgpack").write_bytes(b"x")
    with pytest.raises(BadInput, match=r"flax_model.msgpack, weights of transformers' former"):
        open_source(folder)
