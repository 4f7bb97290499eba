"""Tokenizers rebuilt from GGUF metadata: pieces with scores, and Llama 3's and Qwen's bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints import tokenizer
from jaxtwin.tests.helpers import ROOT

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
FIRST = 3 + len(BYTES)  # the id of the first piece


def pieces(scored: dict[str, float], kinds: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """Metadata of a llama tokenizer with these pieces after <unk>, <s>, </s> and the bytes."""
    ggml = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *BYTES, *scored],
        "scores": [0.0] * FIRST + list(scored.values()),
        "token_type": [UNKNOWN, CONTROL, CONTROL]
        + [BYTE] * 256
        + (kinds or [NORMAL] * len(scored)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}


# --- pieces with scores


def test_the_highest_score_joins_first() -> None:
    """By hand: b and c join before a and b can, though "ab" stands first in the list."""
    letters = {"\u2581": -9.0, "a": -9.0, "b": -9.0, "c": -9.0}
    scored = {"ab": -2.0, "bc": -1.0, "\u2581a": -3.0, **letters}
    out = tokenizer.from_gguf(pieces(scored, add_bos_token=False), "x")
    ids = {token: FIRST + i for i, token in enumerate(scored)}
    assert out.encode("abc").ids == [ids["\u2581a"], ids["bc"]]
    assert out.encode("ab").ids == [ids["\u2581"], ids["ab"]]
    assert out.encode(" a").ids == [ids["\u2581"], ids["\u2581a"]]
    assert out.encode("\u00e9").ids == [ids["\u2581"], 3 + 0xC3, 3 + 0xA9]  # spelled in bytes
    for text in ("abc", " a", "\u00e9 b", "a\n"):
        assert out.decode(out.encode(text).ids) == text


def test_what_begins_a_text() -> None:
    """<s> unless the file says otherwise; a space, and one after a special token as well."""
    scored = {"\u2581": -9.0, "a": -9.0, "\u2581a": -1.0}
    a = FIRST + 2
    assert tokenizer.from_gguf(pieces(scored), "x").encode("a").ids == [1, a]
    off = pieces(scored, add_bos_token=False)
    assert tokenizer.from_gguf(off, "x").encode("a</s>a").ids == [a, 2, a]
    gemma = off | {"tokenizer.ggml.add_space_prefix": False}
    assert tokenizer.from_gguf(gemma, "x").encode("a</s> a").ids == [FIRST + 1, 2, a]


def test_a_token_of_the_user_is_found_before_any_piece() -> None:
    """Gemma's runs of spaces are stored so."""
    scored = {"\u2581": -9.0, "a": -9.0, "  ": 0.0}
    metadata = pieces(scored, [NORMAL, NORMAL, USER], add_bos_token=False, add_space_prefix=False)
    assert tokenizer.from_gguf(metadata, "x").encode("a  a").ids == [
        FIRST + 1,
        FIRST + 2,
        FIRST + 1,
    ]


def test_the_ids_are_sentencepieces_own() -> None:
    """A vocabulary of 460 that sentencepiece trained, and what it made of some texts."""
    golden = json.loads((ROOT / "tests/golden/sentencepiece.json").read_text())
    ggml = {"model": "llama", "add_bos_token": False, "unknown_token_id": 0}
    ggml |= {key: golden[key] for key in ("tokens", "scores", "token_type")}
    out = tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in ggml.items()}, "x")
    assert len(golden["texts"]) == 10
    for text, ids in golden["texts"]:
        assert out.encode(text).ids == ids, text
        assert out.decode(ids) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": []}, "its tokenizer lacks scores"),
        ({"scores": [0.0]}, "has 260 tokens and 1 scores"),
        ({"scores": [0] * 260}, "scores of its tokenizer must be a list of float"),
        ({"scores": [math.nan] * 260}, "must be numbers, and one is NaN"),
        ({"token_type": [1]}, "has 260 tokens and 1 token_type"),
        ({"unknown_token_id": 300}, "unknown_token_id is 300, which is none of its 260 tokens"),
        ({"bos_token_id": 300}, "bos_token_id is 300, which is none of its 260 tokens"),
        ({"add_eos_token": True}, "add_eos_token is not supported"),
    ],
)
def test_odd_pieces_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        tokenizer.from_gguf(pieces({"a": -1.0}, **changes), "x")


# --- bytes, cut into words as Llama 3 and Qwen do


def trained(split: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer trained on this file, its words cut by `split`."""
    out = tokenizers.Tokenizer(models.BPE())
    out.pre_tokenizer = split
    out.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    out.train_from_iterator([Path(__file__).read_text(), "12 123 1234 " * 9], trainer)
    bpe = json.loads(out.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    ggml = {"model": "gpt2", "tokens": tokens, "merges": [" ".join(m) for m in bpe["merges"]]}
    return {f"tokenizer.ggml.{k}": v for k, v in ggml.items()}


TEXTS = [
    "Hello world, it's 2024 and WE'LL count 1, 12, 123, 1234, 1234567.",
    "def f(x):\n\treturn x ** 2  # twice   spaced\n\n\n",
    "na\u00efve caf\u00e9, \u65e5\u672c\u8a9e, \u00bd of \u00b2 and \u2167, \U0001f642\U0001f642",
    " leading, trailing ",
    "",
]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_bytes_are_what_transformers_reads(tmp_path: Path, pre: str) -> None:
    """Its table of pre-tokenizers is its own."""
    metadata = trained(tokenizer.PRE[pre]()) | {"tokenizer.ggml.pre": pre}
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types([NORMAL] * len(metadata["tokenizer.ggml.tokens"]))
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    ours = tokenizer.from_gguf(metadata, "x")
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text).ids) == text


@pytest.mark.parametrize(
    ("pre", "words"),
    [("llama-bpe", ["123", "45", "!!"]), ("qwen2", ["1", "2", "3", "4", "5", "!!"])],
)
def test_digits_by_hand(pre: str, words: list[str]) -> None:
    cut = tokenizer.PRE[pre]().pre_tokenize_str("12345!!")
    assert [word for word, _ in cut] == words


def test_a_word_that_is_a_token_is_that_token() -> None:
    """Llama 3's ignore_merges: "abc" cannot be reached by the one merge that there is."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc"]
    ggml = {"model": "gpt2", "tokens": tokens, "merges": ["a b"]}
    ids = {}
    for pre in ("llama-bpe", "qwen2"):
        metadata = {f"tokenizer.ggml.{k}": v for k, v in {**ggml, "pre": pre}.items()}
        ids[pre] = tokenizer.from_gguf(metadata, "x").encode("abc").ids
    assert ids == {"llama-bpe": [257], "qwen2": [256, tokens.index("c")]}


def test_qwens_text_is_composed() -> None:
    """An e and an accent are the one letter, as in its tokenizer.json."""
    metadata = trained(tokenizer.PRE["qwen2"]()) | {"tokenizer.ggml.pre": "qwen2"}
    out = tokenizer.from_gguf(metadata, "x")
    assert out.encode("e\u0301").ids == out.encode("\u00e9").ids
