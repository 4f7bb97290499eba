"""Files as they come: sound ones read bit for bit, unsound ones refused before anything is done."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from jaxtwin.parity.checkpoints import files
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.tests.helpers.folders import (
    arrays,
    bits,
    halves,
    hf_folder,
    store,
    store_shards,
    stored,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "model")


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "model", tied=True)


# --- safetensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shard", ["50GB", "8KB"])
def test_a_folder_of_transformers_is_read_bit_for_bit(
    tmp_path: Path, dtype: str, shard: str
) -> None:
    folder = hf_folder(tmp_path / "model", dtype, max_shard_size=shard)
    assert len(list(folder.glob("*.safetensors"))) > 1 or shard == "50GB"
    source = open_source(folder)
    assert bits(arrays(source.published)) == bits(stored(folder))
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


# --- what is there and what is not


def test_a_stale_single_file_is_left_alone_and_said_so(folder: Path) -> None:
    """Case 48: the index counts; consolidated and adapter files are not merged in."""
    one, two = halves(folder)
    store_shards(folder, {"a.safetensors": one, "b.safetensors": two})
    zeros = {name: np.zeros_like(x) for name, x in {**one, **two}.items()}
    store(folder, zeros)
    store(folder, zeros, "consolidated.00.safetensors")
    store(folder, {"lora": np.ones(2, np.float32)}, "adapter_model.safetensors")
    torch.save({}, folder / "optimizer.pt")
    source = open_source(folder)
    assert bits(arrays(source.published)) == bits({**one, **two})
    notes = "\n".join(source.notes)
    assert "model.safetensors is not read: model.safetensors.index.json names the shards" in notes
    assert "not read: adapter_model.safetensors, consolidated.00.safetensors, optimizer.pt" in notes


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_the_prefixes_of_wrappers_are_removed(folder: Path, prefix: str) -> None:
    """Case 27."""
    bare = stored(folder)
    store(folder, {prefix + name: x for name, x in bare.items()})
    source = open_source(folder)
    assert bits(arrays(source.published)) == bits(bare)
    assert f"{len(bare)} names had a wrapper's prefix" in "\n".join(source.notes)


# --- torch files


def test_a_pytorch_bin_is_read_like_its_safetensors(folder: Path) -> None:
    """Single, sharded with an index, and of the kind that torch wrote before its zip files."""
    state = {k: torch.from_numpy(v) for k, v in stored(folder).items()}
    expected = bits(stored(folder))
    (folder / "model.safetensors").unlink()
    for zipped in (True, False):
        path = folder / "pytorch_model.bin"
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        assert bits(arrays(open_source(folder).published)) == expected
    names = sorted(state)
    parts = {"a.bin": names[:9], "b.bin": names[9:]}
    for file, part in parts.items():
        torch.save({n: state[n] for n in part}, folder / file)
    where = {n: file for file, part in parts.items() for n in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    path.unlink()
    assert bits(arrays(open_source(folder).published)) == expected
