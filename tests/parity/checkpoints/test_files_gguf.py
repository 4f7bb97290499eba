"""GGUF files: weights as transformers reads them, and a tokenizer from metadata."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from jaxtwin.configs import BadInput, Llama3
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.tests.helpers.folders import stored
from jaxtwin.tests.helpers.gguf_files import SIZES, trained, write_gguf

TEXTS = [
    "Hello world, it's 2024 and we'll count 1, 12, 123, 1234.",
    "def f(x):\n\treturn x ** 2  # twice   spaced\n\n\n",
    "naïve café, 日本語, ½ of ² and Ⅷ, 🙂🙂",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> after",
    " leading, trailing ",
    "Many words, naïve café and 🙂🙂, of\n\n several   kinds; we'll see.",
    "",
]


def read(path: Path) -> dict[str, np.ndarray]:
    """Our reading, under Hugging Face's names."""
    convert(path, path.parent / "hf", "hf")
    return stored(path.parent / "hf")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_tensor_is_what_transformers_reads(tmp_path: Path, quant: str, tied: bool) -> None:
    """Bit for bit, Q and K rows in half-split order, and the config it takes from the metadata."""
    path = write_gguf(tmp_path / "x.gguf", quant, tied=tied)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="x.gguf", dtype=torch.float32
    )
    expected = {name: p.detach().numpy() for name, p in theirs.named_parameters()}
    ours = read(path)
    assert ours.keys() == expected.keys()
    for name, x in ours.items():
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x.view(np.uint32), expected[name].view(np.uint32))
    source = open_source(path)
    spec, config = source.spec, theirs.config
    attn = spec.layers[0].attn
    assert (attn.heads, attn.kv, attn.width) == (4, 2, 16)
    assert attn.rope.base == config.rope_parameters["rope_theta"]
    assert (spec.tied, spec.max_len) == (config.tie_word_embeddings, 48)
    assert np.float32(spec.norm.eps) == np.float32(config.rms_norm_eps)
    assert (source.kind, source.dialect) == ("gguf", "gguf-llama")


def test_tensors_are_proven_like_any_other(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", extra={"blk.0.attn_q.bias": np.ones(64, np.float32)})
    with pytest.raises(BadInput, match=r"blk.0.attn_q.bias: unexpected"):
        open_source(path)


def test_frequency_factors_of_one_change_nothing_and_odd_ones_are_refused(tmp_path: Path) -> None:
    """rope_freqs.weight is how llama.cpp stores Llama 3's scaled frequencies."""
    ones = {"rope_freqs.weight": np.ones(8, np.float32)}
    source = open_source(write_gguf(tmp_path / "x.gguf", extra=ones))
    assert "rotary tables agree" in "".join(source.notes)
    assert "rope_freqs.weight" not in source.published
    eight = {"rope_freqs.weight": np.full(8, 8, np.float32)}
    with pytest.raises(BadInput, match=r"stored in rope_freqs\.weight are not"):
        open_source(write_gguf(tmp_path / "y.gguf", extra=eight))


@pytest.mark.parametrize("factor", [8.0, 32.0, 16.0])
def test_llama3_scaling_is_told_by_what_is_stored(tmp_path: Path, factor: float) -> None:
    """Cases 12 and 50: divisors as llama.cpp's converter makes them, in float32 and a loop.

    Those of a factor that no Llama was published with are refused: nothing says how it was made.
    """
    frequencies = 1.0 / (500_000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16))
    divisors = []
    for wave in (2 * np.pi / frequencies).tolist():
        if wave < 8_192 / 4.0:
            divisors.append(1.0)
        elif wave > 8_192 / 1.0:
            divisors.append(factor)
        else:
            smooth = (8_192 / wave - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    assert 1 < sorted(divisors)[4] < factor  # there is one on the ramp
    extra = {"rope_freqs.weight": np.array(divisors, np.float32)}
    path = write_gguf(tmp_path / "x.gguf", extra=extra, base=500_000.0)
    if factor == 16.0:
        with pytest.raises(BadInput, match=r"stored in rope_freqs\.weight are not"):
            open_source(path)
        return
    source = open_source(path)
    wanted = Llama3(factor=factor, low=1.0, high=4.0, original=8_192)
    assert {b.attn.rope.scaling for b in source.spec.layers} == {wanted}
    assert "rope_freqs.weight" not in source.published
    assert f"Llama 3.1's scaled frequencies, by {factor}" in "".join(source.notes)


def test_settings_that_nothing_reads_are_noted_or_refused(tmp_path: Path) -> None:
    source = open_source(write_gguf(tmp_path / "x.gguf", somebody__note=1))
    assert source.notes == ("metadata that nothing reads: somebody.note",)
    with pytest.raises(BadInput, match="expert_count: 8 is not supported"):
        open_source(write_gguf(tmp_path / "y.gguf", llama__expert_count=8))


# --- the tokenizer


def test_the_tokenizer_is_the_one_that_was_stored(tmp_path: Path) -> None:
    """The same ids as the trained one on digits, spaces, scripts and special tokens; and back."""
    source = open_source(write_gguf(tmp_path / "x.gguf", tied=True))
    reference, ours = trained(), source.tokenizer()
    assert ours is not None
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == reference.encode(text).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.encode("<|im_start|>").ids == [1]
    assert ours.decode([1, 40, 0]) == ours.decode([40])
    assert ours.get_vocab_size() == SIZES["vocab"]


def test_an_exported_folder_loads_with_its_tokenizer(tmp_path: Path) -> None:
    """GGUF -> jax -> HF: AutoTokenizer gives the same ids, roles and chat."""
    path = write_gguf(tmp_path / "x.gguf")
    convert(path, tmp_path / "jax")
    convert(tmp_path / "jax", tmp_path / "hf", "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    reference = trained()
    for text in TEXTS:
        assert theirs(text)["input_ids"] == reference.encode(text).ids, text
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert (theirs.bos_token, theirs.eos_token) == ("<|im_start|>", "<|endoftext|>")
    assert theirs.pad_token == "<|im_end|>"
    for name in ("x.gguf", "jax", "hf"):
        source = open_source(tmp_path / name)
        assert source.eos == (0,)  # id 0 is an id
        assert source.ids == {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 2}


def test_transformers_reads_the_same_tokens_but_for_digits_of_several_bytes(tmp_path: Path) -> None:
    """Its reading of a GGUF has no step for digits (see tokenizer._digits_then_bytes)."""
    path = write_gguf(tmp_path / "x.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    ours = open_source(path).tokenizer()
    plain = [text for text in TEXTS if not any(c.isnumeric() for c in text)]
    assert len(plain) == 4
    for text in plain:
        assert theirs(text)["input_ids"] == ours.encode(text).ids
    digits, words = json.loads(ours.to_str())["pre_tokenizer"]["pretokenizers"]
    assert digits == {"type": "Digits", "individual_digits": True}
    assert words == json.loads(theirs.backend_tokenizer.to_str())["pre_tokenizer"]


def test_user_defined_tokens_are_kept_whole_and_shown(tmp_path: Path) -> None:
    kinds = [3, 3, 4] + [1] * (SIZES["vocab"] - 3)
    ours = open_source(write_gguf(tmp_path / "x.gguf", kinds=kinds)).tokenizer()
    assert ours.encode("a<|im_end|>").ids[-1] == 2
    assert ours.decode([0, 1, 2]) == "<|im_end|>"


def test_a_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", tokenizer__ggml__add_bos_token=True)
    ours = open_source(path).tokenizer()
    assert ours.encode("a").ids == [1, *ours.encode("a", add_special_tokens=False).ids]
