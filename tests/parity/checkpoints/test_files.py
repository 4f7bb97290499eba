"""Files as they come: sound ones read bit for bit, unsound ones refused before anything is done."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints import files
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.tests.helpers.folders import bits, edit_config, hf_folder, store, store_shards, stored

Folder = Path


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return hf_folder(tmp_path / "model")


@pytest.fixture
def tied(tmp_path: Path) -> Folder:
    return hf_folder(tmp_path / "model", tied=True)


def read(tensors: Any) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in tensors.items()}


def said(folder: Path) -> str:
    return "\n".join(open_source(folder).notes)


def halves(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    whole = sorted(stored(folder).items())
    return dict(whole[: len(whole) // 2]), dict(whole[len(whole) // 2 :])


# --- safetensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shard", ["50GB", "8KB"])
def test_a_folder_of_transformers_is_read_bit_for_bit(
    tmp_path: Path, dtype: str, shard: str
) -> None:
    folder = hf_folder(tmp_path / "model", dtype, max_shard_size=shard)
    assert len(list(folder.glob("*.safetensors"))) > 1 or shard == "50GB"
    source = open_source(folder)
    assert bits(read(source.published)) == bits(stored(folder))
    assert (source.kind, source.dialect, str(source.dtype)) == ("hf", "hf-llama", dtype)
    assert source.notes == ()


def test_bfloat16_survives_with_every_bit(tmp_path: Path) -> None:
    """Case 41: signed zero, infinity, a NaN's payload, and a value that float16 has not."""
    raw = np.array([0x3F80, 0x8000, 0x4049, 0x7F80, 0x7FC1, 0x0001], np.uint16)
    store(tmp_path, {"x": raw.view(ml_dtypes.bfloat16)})
    tensor = files.safetensors_file(tmp_path / "model.safetensors")["x"]
    assert str(tensor.dtype) == "bfloat16"
    np.testing.assert_array_equal(tensor.read().view(np.uint16), raw)
    assert [float(x) for x in tensor.read()[:4]] == [1.0, -0.0, 3.140625, float("inf")]
    torch.save({"x": torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)}, tmp_path / "x.bin")
    tensor = files.torch_file(tmp_path / "x.bin")["x"]
    assert str(tensor.dtype) == "bfloat16"
    np.testing.assert_array_equal(tensor.read().view(np.uint16), raw)


def malformed() -> dict[str, bytes]:
    """Case 47: headers that lie."""

    def file(header: Any, data: bytes = b"\0" * 16) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    def one(dtype: str, shape: list[int], at: list[int]) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": at}

    good = one("F32", [4], [0, 16])
    text = json.dumps({"x": good}).encode()
    return {
        "endless": struct.pack("<Q", 2**63) + b"{}",
        "twice": file(text[:-1] + b"," + text[1:]),
        "overlap": file({"x": one("F32", [3], [0, 12]), "y": one("F32", [2], [8, 16])}),
        "gap": file({"x": one("F32", [1], [0, 4]), "y": one("F32", [1], [12, 16])}),
        "long": file({"x": one("F32", [400], [0, 1600])}),
        "overflow": file({"x": one("F32", [2**32, 2**32], [0, 16])}),
        "dtype": file({"x": one("F33", [4], [0, 16])}),
        "truncated": file({"x": good}, b"\0" * 7),
        "empty": b"",
        "no json": file(b"not json at all"),
    }


@pytest.mark.parametrize("kind", malformed())
def test_a_header_that_lies_is_refused(folder: Folder, kind: str) -> None:
    (folder / "model.safetensors").write_bytes(malformed()[kind])
    message = "gives x more than once" if kind == "twice" else "is not a sound safetensors file"
    with pytest.raises(BadInput, match=message):
        open_source(folder)


def test_a_dtype_that_holds_no_weights_is_refused(folder: Folder) -> None:
    """Case 49: eight-bit floats mean nothing without their scales."""
    raw = np.zeros((23, 24), ml_dtypes.float8_e4m3fn)
    store(folder, {**stored(folder), "lm_head.weight": raw})
    with pytest.raises(BadInput, match=r"not of a supported dtype[^$]*lm_head.weight: F8_E4M3"):
        open_source(folder)


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a\\b", "model..x"])
def test_a_name_that_is_a_path_is_refused(folder: Folder, name: str) -> None:
    """Case 45: the library accepts such a name."""
    store(folder, {**stored(folder), name: np.zeros(2, np.float32)})
    with pytest.raises(BadInput, match="is no name of a tensor but a path"):
        open_source(folder)


# --- what is there and what is not


def without(key: str) -> Callable[[dict], dict]:
    return lambda t: {k: v for k, v in t.items() if k != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.norm.weight"), "model.norm.weight: missing, expected shape"),
        (without("lm_head.weight"), "lm_head.weight: missing, expected shape"),
        (
            lambda t: {**t, "model.layers.3.mlp.up_proj.weight": t["lm_head.weight"]},
            "model.layers.3.mlp.up_proj.weight: unexpected, shape",
        ),
        (
            lambda t: {**t, "model.layers.0.self_attn.q_proj.bias": np.ones(60, np.float32)},
            "q_proj.bias: unexpected",
        ),
        (
            lambda t: {**t, "model.layers.1.mlp.down_proj.weight": np.ones((20, 24), np.float32)},
            r"down_proj.weight: shape \(20, 24\), expected \(24, 20\)",
        ),
    ],
)
def test_a_tensor_too_many_too_few_or_of_another_shape(
    folder: Folder, change: Any, message: str
) -> None:
    """Cases 16 and 35 among them: the head of an untied model is not made up."""
    store(folder, change(stored(folder)))
    with pytest.raises(BadInput, match=message):
        open_source(folder)


def test_a_missing_head_is_an_error_where_the_file_does_not_speak_of_tying(tied: Folder) -> None:
    """Case 35: the key is absent, and a Llama's default is untied."""
    edit_config(tied, tie_word_embeddings=...)
    with pytest.raises(BadInput, match=r"lm_head\.weight: missing"):
        open_source(tied)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """Case 42."""
    folder = hf_folder(tmp_path / "model", max_shard_size="8KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(BadInput, match=rf"lacks 1 of the \d+ shards [^$]*{gone.name}"):
        open_source(folder)


def test_index_and_shards_must_agree(folder: Folder) -> None:
    """Case 43: (a) in no shard, (b) in another, (c) in both; and one that the index leaves out."""
    one, two = halves(folder)
    true = {**dict.fromkeys(one, "a.safetensors"), **dict.fromkeys(two, "b.safetensors")}
    first, last = min(one), max(two)

    def refused(message: str, a: dict, b: dict, where: dict) -> None:
        store_shards(folder, {"a.safetensors": a, "b.safetensors": b}, where)
        with pytest.raises(BadInput, match=f"shards disagree[^$]*{message}"):
            open_source(folder)

    refused(f"{last}: in no shard, b.safetensors acc", one, without(last)(two), true)
    refused(f"{first}: in a.safetensors, b.safet", one, two, {**true, first: "b.safetensors"})
    refused(f"{first}: in a.safetensors, b.safet", one, {**two, first: one[first] + 1}, true)
    refused(f"{first}: in a.safetensors, not in the index", one, two, without(first)(true))
    store_shards(folder, {"a.safetensors": one, "b.safetensors": two}, true)
    assert bits(read(open_source(folder).published)) == bits({**one, **two})


@pytest.mark.parametrize("shard", ["../model.safetensors", "sub/x.safetensors", "x.exe", "/x.bin"])
def test_an_index_that_leads_elsewhere_is_refused(folder: Folder, shard: str) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(BadInput, match="names shards that are no files beside it"):
        open_source(folder)


def test_a_stale_single_file_is_left_alone_and_said_so(folder: Folder) -> None:
    """Case 48: the index counts; consolidated and adapter files are not merged in."""
    one, two = halves(folder)
    store_shards(folder, {"a.safetensors": one, "b.safetensors": two})
    zeros = {name: np.zeros_like(x) for name, x in {**one, **two}.items()}
    store(folder, zeros)
    store(folder, zeros, "consolidated.00.safetensors")
    store(folder, {"lora": np.ones(2, np.float32)}, "adapter_model.safetensors")
    torch.save({}, folder / "optimizer.pt")
    source = open_source(folder)
    assert bits(read(source.published)) == bits({**one, **two})
    notes = "\n".join(source.notes)
    assert "model.safetensors is not read: model.safetensors.index.json names the shards" in notes
    assert "not read: adapter_model.safetensors, consolidated.00.safetensors, optimizer.pt" in notes


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_the_prefixes_of_wrappers_are_removed(folder: Folder, prefix: str) -> None:
    """Case 27."""
    bare = stored(folder)
    store(folder, {prefix + name: x for name, x in bare.items()})
    source = open_source(folder)
    assert bits(read(source.published)) == bits(bare)
    assert f"{len(bare)} names had a wrapper's prefix" in "\n".join(source.notes)


def test_a_prefixed_and_a_bare_copy_collide(folder: Folder) -> None:
    bare = stored(folder)
    store(folder, {**bare, "module.lm_head.weight": bare["lm_head.weight"] + 1})
    with pytest.raises(BadInput, match=r"lm_head.weight' and .* are the same tensor twice"):
        open_source(folder)


# --- torch files


def test_a_pytorch_bin_is_read_like_its_safetensors(folder: Folder) -> None:
    """Single, sharded with an index, and of the kind that torch wrote before its zip files."""
    whole = {k: torch.from_numpy(v) for k, v in stored(folder).items()}
    expected = bits(stored(folder))
    (folder / "model.safetensors").unlink()
    for zipped in (True, False):
        path = folder / "pytorch_model.bin"
        torch.save(whole, path, _use_new_zipfile_serialization=zipped)
        assert bits(read(open_source(folder).published)) == expected
    names = sorted(whole)
    parts = {"a.bin": names[:9], "b.bin": names[9:]}
    for file, part in parts.items():
        torch.save({n: whole[n] for n in part}, folder / file)
    where = {n: file for file, part in parts.items() for n in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    path.unlink()
    assert bits(read(open_source(folder).published)) == expected


class Evil:
    """A pickle that runs code when it is loaded: it would leave a file behind."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle 2", "pickle 4"])
def test_code_in_a_pickle_does_not_run(folder: Folder, form: str) -> None:
    """Case 46."""
    marker, path = folder / "marker", folder / "pytorch_model.bin"
    bare = {k: torch.from_numpy(v) for k, v in stored(folder).items()}
    (folder / "model.safetensors").unlink()
    state = {**bare, "evil": Evil(marker)}
    if form.startswith("pickle"):
        path.write_bytes(pickle.dumps({"evil": Evil(marker)}, protocol=int(form[-1])))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(BadInput, match="so nothing was loaded"):
        open_source(folder)
    assert not marker.exists()
    ours = folder / "ours.pt"
    torch.save({"format": 1, "spec": {}, "state": state}, ours)
    with pytest.raises(BadInput, match="so nothing was loaded"):
        open_source(ours)
    assert not marker.exists()
    if form == "torch":  # the trap does spring where somebody steps on it
        torch.load(path, weights_only=False)
        assert marker.exists()


@pytest.mark.parametrize("what", [{"a": 1}, {1: torch.ones(2)}, {"i": torch.ones(2).int()}, [1]])
def test_a_torch_file_of_something_else_is_refused(folder: Folder, what: Any) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(what, folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match="is not a plain state dict"):
        open_source(folder)


def test_a_damaged_torch_file_is_refused(folder: Folder) -> None:
    path = folder / "pytorch_model.bin"
    torch.save({"x": torch.ones(1000)}, path)
    (folder / "model.safetensors").unlink()
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(BadInput, match="cannot be read as a torch file"):
        open_source(folder)
