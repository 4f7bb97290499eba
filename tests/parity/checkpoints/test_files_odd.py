"""Odd and damaged files, one BadInput each; what they hold that is not used is said."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch

from jaxtwin.configs import BadInput, Run
from jaxtwin.configs.spec import to_json
from jaxtwin.jaxmodel import checkpoint
from jaxtwin.parity.checkpoints import files, source, tokenizer
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.table import bridge
from jaxtwin.tests.helpers.folders import (
    edit_config,
    from_config,
    hf_folder,
    pt_file,
    spec_of,
    store,
    stored,
    torch_state,
)
from jaxtwin.tests.helpers.kit import DATA
from jaxtwin.tests.parity.checkpoints.test_files_gguf import write_gguf

GGML = "tokenizer.ggml."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "hf")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A .pt of ours, whose fields a test replaces."""
    return pt_file(tmp_path / "a.pt", spec_of(), torch_state(spec_of(), "float32"))


def replaced(path: Path, **fields: Any) -> Path:
    data = {**torch.load(path), **fields}
    torch.save(data, path)
    return path


# --- the border


@pytest.mark.parametrize(
    "error",
    [TypeError, ValueError, IndexError, KeyError, OverflowError, NotImplementedError, OSError],
)
def test_whatever_a_file_makes_a_library_raise_is_one_bad_input(
    ours: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def stumble(path: Path) -> Any:
        raise error("odd")

    monkeypatch.setitem(source.FILES, ".pt", stumble)
    with pytest.raises(BadInput, match=rf"a\.pt cannot be read: {error.__name__}: .?odd") as caught:
        open_source(ours)
    assert isinstance(caught.value.__cause__, error)


def test_a_preset_that_fails_is_our_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: Any) -> Any:
        raise TypeError("ours")

    monkeypatch.setattr(source, "_preset", stumble)
    for name in ("smollm2-tiny", "random:smollm2-tiny"):
        with pytest.raises(TypeError, match="ours"):
            open_source(name)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", ["llama"], r"model_type \['llama'\] is not supported"),
        ("model_type", {}, r"model_type \{\} is not supported"),
        ("hidden_act", ["silu"], "hidden_act: must be 'silu'"),
        ("rope_theta", 10**400, "rotary base must be a number above 0"),
        ("rms_norm_eps", 10**400, "rms_norm_eps: must be a number"),
    ],
)
def test_an_odd_config_is_refused_by_key(folder: Path, key: str, value: Any, message: str) -> None:
    edit_config(folder, rope_parameters=..., rope_scaling=..., **{"rope_theta": 5.0, key: value})
    with pytest.raises(BadInput, match=message):
        open_source(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layout", ["scan"], "a layout of"),
        ("layout", {}, "a layout of"),
        ("format", True, "format True is not known"),
        ("format", 1.0, r"format 1\.0 is not known"),
    ],
)
def test_an_odd_header_of_ours_is_refused(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    data = {"format": 1, "spec": to_json(spec_of()), "layout": "scan", key: value}
    (tmp_path / "jaxtwin.json").write_text(json.dumps(data))
    with pytest.raises(BadInput, match=message):
        checkpoint.header(tmp_path)


def test_a_header_of_ours_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jaxtwin.json").write_text("[" * 100_000)
    with pytest.raises(BadInput, match=r"jaxtwin\.json cannot be read: "):
        checkpoint.header(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": True}, "format True is not known"),
        ({"format": torch.ones(2)}, "format tensor.* is not known"),
        ({"spec": torch.ones(2)}, "spec must be plain data"),
        ({"spec": {"d": torch.ones(2)}}, "spec must be plain data"),
        ({"files": {"a": torch.ones(2, dtype=torch.bfloat16)}}, "files must hold byte tensors"),
        ({"files": {"a": torch.ones(2)}}, "files must hold byte tensors"),
        ({"files": {"a": "text"}}, "files must hold byte tensors"),
        ({"files": [1]}, "files must hold byte tensors"),
        ({3: 1, "x": 2}, "what nothing would read: 3, x"),
    ],
)
def test_an_odd_field_of_a_pt_is_refused(ours: Path, fields: Any, message: str) -> None:
    torch.save({**torch.load(ours), **fields}, ours)
    with pytest.raises(BadInput, match=message):
        open_source(ours)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x: x.to_sparse(), "sparse_coo"),
        (lambda x: x.to("meta"), "on the device meta"),
        (lambda x: torch._neg_view(x), "a view that negates"),
    ],
)
def test_tensors_of_a_pt_are_dense_and_on_the_cpu(
    ours: Path, change: Callable[[torch.Tensor], torch.Tensor], what: str
) -> None:
    state = torch.load(ours)["state"]
    state["norm.weight"] = change(state["norm.weight"])
    with pytest.raises(
        BadInput, match=rf"(?s)dense tensors on the CPU only.*norm\.weight: .*{what}"
    ):
        files.torch_tensors(state, ours)


def test_a_pt_with_a_sparse_tensor_is_refused_when_opened(ours: Path) -> None:
    state = torch.load(ours)["state"]
    replaced(ours, state={**state, "norm.weight": state["norm.weight"].to_sparse()})
    with pytest.raises(BadInput, match="dense tensors on the CPU only"):
        open_source(ours)


def test_carried_files_that_are_not_known_are_noted(ours: Path) -> None:
    texts = {
        "LICENSE": torch.zeros(3, dtype=torch.uint8),
        "x.md": torch.zeros(1, dtype=torch.uint8),
    }
    opened = open_source(replaced(ours, files=texts))
    assert opened.carry.keys() == {"LICENSE"}
    assert opened.notes == ("files that are not known and do not travel along: x.md",)


# --- GGUF


def changed(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """The writer adds these instead of its own ids."""
    names = {"pad_token_id": "padding_token_id", "tokenizer_pre": "pre"}
    kinds = {str: "add_string", bool: "add_bool", int: "add_int32", list: "add_array"}

    def adder(key: str, value: Any) -> Callable[..., None]:
        return lambda writer, _: getattr(writer, kinds[type(value)])(key, value)

    for role, value in values.items():
        instead = adder(GGML + names.get(role, role), value)
        monkeypatch.setattr(gguf.GGUFWriter, f"add_{role}", instead)


@pytest.mark.parametrize("value", ["0", True, [0, 1]])
@pytest.mark.parametrize("role", ["eos_token_id", "bos_token_id", "pad_token_id"])
def test_a_gguf_id_that_is_no_integer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, value: Any
) -> None:
    changed(monkeypatch, **{role: value})
    name = role.replace("pad_", "padding_")
    with pytest.raises(BadInput, match=rf"x\.gguf: {GGML}{name} must be "):
        open_source(write_gguf(tmp_path / "x.gguf"))


def test_gguf_ids_outside_the_vocabulary_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, eos_token_id=999, bos_token_id=-1)
    opened = open_source(write_gguf(tmp_path / "x.gguf"))
    assert opened.eos == ()
    assert opened.ids == {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 2}
    assert sum("outside the vocabulary of 320 are left out" in note for note in opened.notes) == 2
    config = json.loads(source._bytes(opened.carry["tokenizer_config.json"]))
    assert not {"eos_token", "bos_token"} & config.keys()


def test_a_bos_to_be_added_that_is_no_token_costs_the_tokenizer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, bos_token_id=999)
    opened = open_source(write_gguf(tmp_path / "x.gguf", tokenizer__ggml__add_bos_token=True))
    assert not opened.carry
    assert "bos_token_id is 999, which is none of its 320 tokens" in opened.notes[-1]


def test_a_list_of_pre_tokenizers_costs_the_tokenizer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, tokenizer_pre=["smollm"])
    opened = open_source(write_gguf(tmp_path / "x.gguf"))
    assert not opened.carry
    assert "pre-tokenizer ['smollm'] is not supported" in opened.notes[-1]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", [1, 2], "tokens of its tokenizer must be a list of str"),
        ("tokens", "ab", "tokens of its tokenizer must be a list of str"),
        ("merges", ["ab"], "'ab' is no merge of two tokens"),
        ("token_type", 3, "token_type of its tokenizer must be a list of int"),
    ],
)
def test_odd_tokenizer_metadata_is_refused(key: str, value: Any, message: str) -> None:
    good = {"model": "gpt2", "pre": "smollm", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    metadata = {GGML + name: said for name, said in {**good, key: value}.items()}
    with pytest.raises(BadInput, match=message):
        tokenizer.from_gguf(metadata, "x")


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused() -> None:
    good = {"model": "gpt2", "pre": "smollm", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    metadata = {GGML + name: said for name, said in good.items()}
    assert "tokenizer.json" in tokenizer.files_from_gguf(metadata, "x", 3)
    with pytest.raises(BadInput, match="has 3 tokens, and its model only 2"):
        tokenizer.files_from_gguf(metadata, "x", 2)


# --- ids of a config


ODD_IDS = ["7", 7.0, True, {"a": 1}, [7, "8"]]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("eos_token_id", value) for value in ODD_IDS),
        *((key, value) for key in ("bos_token_id", "pad_token_id") for value in ["7", True, [7]]),
    ],
)
def test_an_id_that_is_no_integer_is_refused(folder: Path, key: str, value: Any) -> None:
    edit_config(folder, **{key: value})
    with pytest.raises(BadInput, match=rf"config\.json: {key} must be "):
        open_source(folder)


@pytest.mark.parametrize("value", ODD_IDS)
def test_a_generation_config_id_that_is_no_integer_is_refused(folder: Path, value: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(BadInput, match=r"generation_config\.json of .*: eos_token_id must be "):
        open_source(folder)


def test_ids_outside_the_vocabulary_are_left_out(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit_config(folder, bos_token_id=-1, eos_token_id=[5, 999], pad_token_id=999)
    opened = open_source(folder)
    assert opened.ids == {"bos_token_id": None, "eos_token_id": [5], "pad_token_id": None}
    assert opened.eos == (5,)
    assert sum("outside the vocabulary of 23 are left out" in note for note in opened.notes) == 3


# --- recorded results


def spoiled(tmp_path: Path, **arrays: np.ndarray) -> Path:
    with np.load(DATA / "reference_gqa_tied.npz") as file:
        data = dict(file) | {name.replace("__", "/"): x for name, x in arrays.items()}
    np.savez(tmp_path / "x.npz", **data)
    return tmp_path / "x.npz"


def golden_cases() -> list[Any]:
    with np.load(DATA / "reference_gqa_tied.npz") as file:
        d = dict(file)
    eight, full = d["generate/greedy8_from_first4"], d["generate/greedy_to_context"]
    other = (eight + 1) % 23
    return [
        ("loss", np.ones(2), "one float"),
        ("loss", np.array(3), "one float"),
        ("loss", np.array("x"), "one float"),
        ("config", np.array([1.0]), "one string"),
        ("ids", d["ids"][0], r"integers \(batch, time\)"),
        ("ids", d["ids"] * 1.0, r"integers \(batch, time\)"),
        ("ids", d["ids"] - 23, "ids from 0 to 22"),
        ("ids", d["ids"] + 23, "ids from 0 to 22"),
        ("ids", np.concatenate([d["ids"], d["ids"]], 1), r"\(batch, 4 to 16\)"),
        ("ids", d["ids"][:, :3], r"\(batch, 4 to 16\)"),
        ("ids", d["ids"][:0], r"\(batch, 4 to 16\)"),
        ("logits", d["logits"][:, :-1], r"floats \(2, 16, 23\)"),
        ("logits", d["logits"].astype(int), r"floats \(2, 16, 23\)"),
        ("generate__eos_id", np.array(23), "one integer"),
        ("generate__eos_id", np.array([2]), "one integer"),
        ("generate__eos_id", np.array(2.0), "one integer"),
        ("generate__greedy8_from_first4", eight[:, :-1], r"\(2, 12\), the prompt included"),
        ("generate__greedy8_with_eos", eight[:, :-1], r"\(2, 12\), the prompt included"),
        ("generate__greedy8_from_first4", eight[:1], r"\(2, 12\), the prompt included"),
        ("generate__greedy_to_context", full[:, :-1], r"\(2, 16\), the prompt included"),
        ("generate__greedy8_with_eos", other, "a continuation of the first 4 ids"),
        ("generate__greedy8_with_eos", eight * 1.0, r"integers \(batch, time\)"),
        ("generate__greedy_to_context", full + 23, "ids from 0 to 22"),
        ("generate__greedy_to_context", full[0], r"integers \(batch, time\)"),
    ]


@pytest.mark.parametrize(("name", "array", "message"), golden_cases())
def test_a_record_that_its_model_cannot_have_is_refused(
    tmp_path: Path, name: str, array: np.ndarray, message: str
) -> None:
    with pytest.raises(BadInput, match=rf"{name.replace('__', '/')} must be .*{message}.*; it is"):
        open_source(spoiled(tmp_path, **{name: array}))


def test_a_gradient_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"(?s)the gradients of .*norm\.weight: shape \(31,\)"):
        open_source(spoiled(tmp_path, **{"grad__norm.weight": np.ones(31)}))


def test_a_loss_that_is_not_finite_is_a_record(tmp_path: Path) -> None:
    opened = open_source(spoiled(tmp_path, loss=np.array(np.inf)))
    assert opened.golden is not None
    assert opened.golden["loss"] == np.inf


# --- dtypes


def test_float16_beside_bfloat16_is_held_by_float32(folder: Path) -> None:
    tensors = {name: x.astype(np.float16) for name, x in stored(folder).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(ml_dtypes.bfloat16)
    from safetensors.torch import save_file

    save_file(
        {name: bridge.to_torch(x) for name, x in tensors.items()}, folder / "model.safetensors"
    )
    opened = open_source(folder)
    assert opened.dtype == np.float32
    assert "the tensors mix bfloat16 and float16" in opened.notes


def test_a_tied_head_of_another_dtype_is_said_to_be_that(tmp_path: Path) -> None:
    tied = hf_folder(tmp_path / "hf", tied=True)
    bare = stored(tied)
    head = bare["model.embed_tokens.weight"].astype(np.float16)
    store(tied, {**bare, "lm_head.weight": head})
    with pytest.raises(BadInput, match=r"in dtype \(float16, not float32\)") as caught:
        open_source(tied)
    assert "tie_word_embeddings" not in str(caught.value)


# --- sizes


def test_more_layers_than_anybody_has_are_refused_at_once(folder: Path) -> None:
    block = spec_of().layers[0]
    assert Run(blocks=(block,), repeats=10_000)
    start = time.monotonic()
    for layers in (10_001, 200_000, 10**9):
        with pytest.raises(BadInput, match=f"repeats={layers} is more than 10000 repetitions"):
            open_source(edit_config(folder, num_hidden_layers=layers))
        data = to_json(from_config())
        data["runs"][0]["repeats"] = layers
        header = {"format": 1, "spec": data, "layout": "scan"}
        (folder.parent / "jaxtwin.json").write_text(json.dumps(header))
        with pytest.raises(BadInput, match=f"repeats={layers} is more than 10000 repetitions"):
            open_source(folder.parent)
    assert time.monotonic() - start < 10
