"""GGUF files: weights as transformers reads them, and a tokenizer from metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxtwin.configs import BadInput, Llama3
from jaxtwin.parity.checkpoints import tokenizer
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.tests.helpers.folders import stored

# Multiples of 32, the block of the quantized types; 4 heads of 16, 2 of them for keys.
SIZES = {"d": 64, "layers": 2, "heads": 4, "kv": 2, "hidden": 96, "vocab": 320}
TEXTS = [
    "Hello world, it's 2024 and we'll count 1, 12, 123, 1234.",
    "def f(x):\n\treturn x ** 2  # twice   spaced\n\n\n",
    "naïve café, 日本語, ½ of ² and Ⅷ, 🙂🙂",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> after",
    " leading, trailing ",
    "Many words, naïve café and 🙂🙂, of\n\n several   kinds; we'll see.",
    "",
]


def trained() -> tokenizers.Tokenizer:
    """A byte-level tokenizer with SmolLM's steps, trained by the library on this file."""
    out = tokenizers.Tokenizer(models.BPE())
    out.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    out.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab"],
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    out.train_from_iterator([Path(__file__).read_text()], trainer)
    assert out.get_vocab_size() == SIZES["vocab"]
    return out


def write_gguf(
    path: Path,
    quant: str = "F32",
    *,
    tied: bool = False,
    kinds: Sequence[int] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    **changes: Any,
) -> Path:
    """A llama GGUF of random values, by the gguf package's own writer and quantizer."""
    s, rng = SIZES, np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(s["layers"])
    writer.add_context_length(48)
    writer.add_embedding_length(s["d"])
    writer.add_feed_forward_length(s["hidden"])
    writer.add_head_count(s["heads"])
    writer.add_head_count_kv(s["kv"])
    writer.add_rope_freq_base(changes.pop("base", 500.0))
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(s["vocab"])
    writer.add_name("a test")
    writer.add_tokenizer_model(changes.pop("model", "gpt2"))
    writer.add_tokenizer_pre(changes.pop("pre", "smollm"))
    reference = json.loads(trained().to_str())["model"]
    tokens = sorted(reference["vocab"], key=reference["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds or [3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(pair) for pair in reference["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(2)
    for key, value in changes.items():
        if isinstance(value, bool):
            writer.add_bool(key.replace("__", "."), value)
        else:
            writer.add_uint32(key.replace("__", "."), value)

    def put(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType[quant if len(shape) == 2 else "F32"]
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F64):
            writer.add_tensor(name, values.astype(kind.name.replace("F", "float")))
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    put("token_embd.weight", s["vocab"], s["d"])
    for i in range(s["layers"]):
        for norm in ("attn_norm", "ffn_norm"):
            put(f"blk.{i}.{norm}.weight", s["d"])
        put(f"blk.{i}.attn_q.weight", s["heads"] * 16, s["d"])
        put(f"blk.{i}.attn_k.weight", s["kv"] * 16, s["d"])
        put(f"blk.{i}.attn_v.weight", s["kv"] * 16, s["d"])
        put(f"blk.{i}.attn_output.weight", s["d"], s["heads"] * 16)
        put(f"blk.{i}.ffn_gate.weight", s["hidden"], s["d"])
        put(f"blk.{i}.ffn_up.weight", s["hidden"], s["d"])
        put(f"blk.{i}.ffn_down.weight", s["d"], s["hidden"])
    put("output_norm.weight", s["d"])
    if not tied:
        put("output.weight", s["vocab"], s["d"])
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def test_a_type_that_cannot_be_dequantized_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "F64")
    with pytest.raises(BadInput, match=r"cannot be dequantized:\n  F64: token_embd.weight"):
        open_source(path)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer 'llama' is not supported"),
        ({"pre": "qwen2"}, "pre-tokenizer 'qwen2' is not supported"),
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
        ({"tokenizer.ggml.tokens": [*tokens[:-1], tokens[0]]}, "1 tokens .* are there twice"),
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
