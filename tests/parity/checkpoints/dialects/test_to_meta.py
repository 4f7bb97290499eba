"""Llamas written as Meta publishes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxtwin.configs import BadInput, Llama3, preset
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.dialects import from_meta, to_meta
from jaxtwin.parity.checkpoints.dialects.meta_llama import ffn_width
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.tests.helpers.folders import stored
from jaxtwin.tests.helpers.meta_files import PUBLISHED, model, state_of


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_is_metas(tmp_path: Path, tied: bool) -> None:
    """From transformers' folder: the tensors made by hand above, the head even where tied."""
    theirs = model(tied=tied)
    theirs.save_pretrained(tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "meta", "meta")
    state, found = state_of(theirs), torch.load(tmp_path / "meta" / "consolidated.00.pth")
    assert found.keys() == state.keys() | {"output.weight"}
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    assert ffn_width(params["dim"], params["ffn_dim_multiplier"], params["multiple_of"]) == 70
    assert "rope_theta" not in params  # base, eps and length are those of Llama 2
    assert not any("not all of Meta's code" in note for note in report["notes"])
    assert open_source(tmp_path / "meta").spec == open_source(tmp_path / "hf").spec
    convert(tmp_path / "meta", tmp_path / "back", "hf")
    for name, value in stored(tmp_path / "hf").items():
        np.testing.assert_array_equal(stored(tmp_path / "back")[name], value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_release_gets_the_params_that_it_was_published_with(name: str) -> None:
    published = {"n_kv_heads": PUBLISHED[name]["n_heads"], **PUBLISHED[name]}
    published |= {"vocab_size": preset(name).vocab}
    written = to_meta(preset(name), notes := [])
    assert {"ffn_dim_multiplier": None, **written} == {"ffn_dim_multiplier": None, **published}
    assert notes == []


def test_a_model_of_no_release_is_written_in_full() -> None:
    spec = preset("llama3.2-1b")
    (run,) = spec.runs
    (block,) = run.blocks
    rope = replace(block.attn.rope, scaling=Llama3(factor=4.0, low=1.0, high=3.0, original=8_192))
    block = replace(block, attn=replace(block.attn, rope=rope), ffn=replace(block.ffn, hidden=777))
    spec = replace(spec, max_len=99, runs=(replace(run, blocks=(block,)),))
    params = to_meta(spec, notes := [])
    assert (params["max_seq_len"], params["rope_scaling_factor"]) == (99, 4.0)
    assert ffn_width(spec.d, params["ffn_dim_multiplier"], params["multiple_of"]) == 777
    assert from_meta(params, {}, True, "params.json", []) == spec
    assert "params.json has max_seq_len and rope_scaling_factor" in notes[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "Meta's files are of Llamas"),
        ("qwen3-0.6b", "Meta's files say .*, and this model has "),
        ("gemma2-2b", "Meta's files say .*, and this model has "),
    ],
)
def test_what_is_no_llama_is_not_written(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        to_meta(preset(name), [])
