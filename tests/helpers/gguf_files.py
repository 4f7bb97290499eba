"""A small llama GGUF of random values, with a tokenizer of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

# Multiples of 32, the block of the quantized types; 4 heads of 16, 2 of them for keys.
SIZES = {"d": 64, "layers": 2, "heads": 4, "kv": 2, "hidden": 96, "vocab": 320}
WIDTH = 16


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
    """A llama GGUF of random values, by the gguf package's own writer and quantizer.

    `quant` is the type of its matrices, `kinds` the types of its tokens, `extra` further tensors.
    `changes`: base, model and pre of the tokenizer, and further settings ("__" stands for ".").
    """
    writer = gguf.GGUFWriter(path, "llama")
    _add_sizes(writer, changes.pop("base", 500.0))
    _add_tokenizer(writer, changes.pop("model", "gpt2"), changes.pop("pre", "smollm"), kinds)
    for key, value in changes.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(key.replace("__", "."), value)
    rng = np.random.default_rng(0)
    for name, shape in _shapes(tied):
        values = rng.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType[quant if len(shape) == 2 else "F32"]
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F64):
            writer.add_tensor(name, values.astype(kind.name.replace("F", "float")))
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, base: float) -> None:
    writer.add_block_count(SIZES["layers"])
    writer.add_context_length(48)
    writer.add_embedding_length(SIZES["d"])
    writer.add_feed_forward_length(SIZES["hidden"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv"])
    writer.add_rope_freq_base(base)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(SIZES["vocab"])
    writer.add_name("a test")


def _add_tokenizer(
    writer: gguf.GGUFWriter, model: str, pre: str, kinds: Sequence[int] | None
) -> None:
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    bpe = json.loads(trained().to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds or [3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(2)


def _shapes(tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, hidden = SIZES["d"], SIZES["hidden"]
    yield "token_embd.weight", (SIZES["vocab"], d)
    for i in range(SIZES["layers"]):
        yield f"blk.{i}.attn_norm.weight", (d,)
        yield f"blk.{i}.ffn_norm.weight", (d,)
        yield f"blk.{i}.attn_q.weight", (SIZES["heads"] * WIDTH, d)
        yield f"blk.{i}.attn_k.weight", (SIZES["kv"] * WIDTH, d)
        yield f"blk.{i}.attn_v.weight", (SIZES["kv"] * WIDTH, d)
        yield f"blk.{i}.attn_output.weight", (d, SIZES["heads"] * WIDTH)
        yield f"blk.{i}.ffn_gate.weight", (hidden, d)
        yield f"blk.{i}.ffn_up.weight", (hidden, d)
        yield f"blk.{i}.ffn_down.weight", (d, hidden)
    yield "output_norm.weight", (d,)
    if not tied:
        yield "output.weight", (SIZES["vocab"], d)
