"""Hugging Face folders that are refused: tensors, shards, configs and token ids at odds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxtwin.configs import BadInput, Run
from jaxtwin.configs.spec import to_json
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.table import bridge
from jaxtwin.tests.helpers.folders import (
    arrays,
    bits,
    edit_config,
    from_config,
    halves,
    hf_folder,
    spec_of,
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
    folder: Path, change: Any, message: str
) -> None:
    """Cases 16 and 35 among them: the head of an untied model is not made up."""
    store(folder, change(stored(folder)))
    with pytest.raises(BadInput, match=message):
        open_source(folder)


def test_a_missing_head_is_an_error_where_the_file_does_not_speak_of_tying(tied: Path) -> None:
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


def test_index_and_shards_must_agree(folder: Path) -> None:
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
    assert bits(arrays(open_source(folder).published)) == bits({**one, **two})


@pytest.mark.parametrize("shard", ["../model.safetensors", "sub/x.safetensors", "x.exe", "/x.bin"])
def test_an_index_that_leads_elsewhere_is_refused(folder: Path, shard: str) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(BadInput, match="names shards that are no files beside it"):
        open_source(folder)


def test_a_prefixed_and_a_bare_copy_collide(folder: Path) -> None:
    bare = stored(folder)
    store(folder, {**bare, "module.lm_head.weight": bare["lm_head.weight"] + 1})
    with pytest.raises(BadInput, match=r"lm_head.weight' and .* are the same tensor twice"):
        open_source(folder)


def test_a_head_that_differs_from_its_tied_embedding_is_refused(tied: Path) -> None:
    """Case 37: one bit is enough, and so is the sign of a zero."""
    bare = stored(tied)
    embed = bare["model.embed_tokens.weight"]
    embed[0, 0] = 0.0
    head = embed.copy()
    head[0, 0] = -0.0
    store(tied, {**bare, "lm_head.weight": head})
    with pytest.raises(
        BadInput, match=r"ties the embeddings, and lm_head\.weight is in the file and diff"
    ):
        open_source(tied)
    store(tied, {**bare, "lm_head.weight": embed.astype(np.float16)})
    with pytest.raises(BadInput, match="is in the file and differs"):
        open_source(tied)


def test_a_key_given_twice_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", '{"hidden_size": 48,', 1))
    with pytest.raises(BadInput, match="gives hidden_size more than once"):
        open_source(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "\ufeff", '{"model_type": "llama"'])
def test_a_config_that_is_no_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(BadInput, match=r"config.json (cannot be read as JSON|must hold a JSON)"):
        open_source(folder)


def test_tensors_of_one_stack_must_share_a_dtype(folder: Path) -> None:
    from jaxtwin.parity.checkpoints.convert import convert

    one = {"model.layers.1.mlp.up_proj.weight": np.ones((20, 24), np.float16)}
    store(folder, {**stored(folder), **one})
    with pytest.raises(BadInput, match=r"stacked layers need one .--layout unroll"):
        convert(folder, folder.parent / "out")
    assert not (folder.parent / "out").exists()
    convert(folder, folder.parent / "out", layout="unroll")


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(BadInput, match="without an index model-00001-of"):
        open_source(folder)


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
