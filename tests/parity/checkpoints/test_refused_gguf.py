"""GGUF files that are refused, in part or altogether: tensors, settings, ids and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints import source, tokenizer
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.tests.helpers.gguf_files import write_gguf


def test_a_type_that_cannot_be_dequantized_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "F64")
    with pytest.raises(BadInput, match=r"cannot be dequantized:\n  F64: token_embd.weight"):
        open_source(path)


@pytest.mark.parametrize("damage", ["truncated", "magic", "counts", "empty"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = write_gguf(tmp_path / "x.gguf")
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        del data[len(data) // 2 :]
    elif damage == "magic":
        data[:4] = b"GGML"
    elif damage == "counts":
        data[8:16] = (2**63).to_bytes(8, "little")
    else:
        data = bytearray()
    path.write_bytes(data)
    with pytest.raises(BadInput, match="cannot be read as GGUF"):
        open_source(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer 't5' is not supported"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"tokenizer__ggml__add_space_prefix": True}, "add_space_prefix is not supported"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_and_its_weights_are_not(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "x.gguf", **changes)
    source = open_source(path)
    assert f"no tokenizer travels along: {path}: {message}" in "".join(source.notes)
    assert source.tokenizer() is None
    with pytest.raises(BadInput, match=message):
        tokenizer.from_gguf(_metadata(path), "the file")


def _metadata(path: Path) -> dict[str, Any]:
    return {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items()}


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    good = _metadata(write_gguf(tmp_path / "x.gguf"))
    tokens = good["tokenizer.ggml.tokens"]
    for changes, message in [
        ({"tokenizer.ggml.tokens": [*tokens[:-1], tokens[0]]}, "1 tokens .* appear twice"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "cannot be built"),
        ({"tokenizer.ggml.merges": []}, "lacks merges"),
        ({"tokenizer.ggml.model": None}, "tokenizer None"),
    ]:
        with pytest.raises(BadInput, match=message):
            tokenizer.from_gguf(good | changes, "the file")
    with pytest.raises(BadInput, match="carries no tokenizer"):
        tokenizer.from_gguf({}, "the file")
    with pytest.raises(BadInput, match="is not a sound tokenizer"):
        tokenizer.from_json(b'{"a": 1}', "the file")


GGML = "tokenizer.ggml."


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
    config = json.loads(source.content(opened.carry["tokenizer_config.json"]))
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
    metadata = {GGML + name: entry for name, entry in {**good, key: value}.items()}
    with pytest.raises(BadInput, match=message):
        tokenizer.from_gguf(metadata, "x")


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused() -> None:
    good = {"model": "gpt2", "pre": "smollm", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    metadata = {GGML + name: entry for name, entry in good.items()}
    assert "tokenizer.json" in tokenizer.files_from_gguf(metadata, "x", 3)
    with pytest.raises(BadInput, match="has 3 tokens, and its model only 2"):
        tokenizer.files_from_gguf(metadata, "x", 2)
