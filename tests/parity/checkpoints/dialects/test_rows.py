"""The rows of every dialect: names that others write, and Q and K in their own order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxtwin.configs import Block
from jaxtwin.configs.spec import Rope, Run
from jaxtwin.parity.checkpoints.dialects import DIALECTS, GGUF_LLAMA, HF_LLAMA, REFERENCE
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensor, backward, forward, moves
from jaxtwin.tests.helpers.folders import from_config as read
from jaxtwin.tests.helpers.folders import hf_model

# Those with a place for a Llama's tensors.
LLAMAS = {n: d for n, d in DIALECTS.items() if n not in ("hf-gpt2", "hf-bloom", "hf-olmo2")}


def attn(spec: Any) -> Any:
    return spec.layers[0].attn


def permuted_as_llama_cpp(w: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp's converter stores a Hugging Face Q or K: half-split to adjacent."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


@pytest.mark.parametrize("ours", ["half", "adjacent"])
@pytest.mark.parametrize("dialect", LLAMAS.values(), ids=LLAMAS)
def test_only_q_and_k_rows_move_and_only_between_pairings(dialect: Any, ours: str) -> None:
    """Against llama.cpp's own permutation of Hugging Face weights, written out above."""
    spec = read()
    block: Block = spec.layers[0]
    rope = Rope(base=500.0, pairs=ours)  # type: ignore[arg-type]
    block = replace(block, attn=replace(block.attn, rope=rope))
    spec = replace(spec, runs=(Run(blocks=(block,), repeats=3),))
    rng = np.random.default_rng(0)
    half = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in [(m.dst, m.dst_shape) for m in moves(dialect.rows(spec))]
    }
    heads = {"attn.q.weight": 6, "attn.k.weight": 2}

    def stored(pairs: str) -> dict[str, np.ndarray]:
        if pairs == "half":
            return half
        return {
            name: permuted_as_llama_cpp(w, heads[name[9:]]) if name[9:] in heads else w
            for name, w in half.items()
        }

    names = {m.dst: m.src[0] for m in moves(dialect.rows(spec))}
    src = {names[n]: Tensor.of(w) for n, w in stored(dialect.pairs).items()}
    dst = forward(dialect.rows(spec), src, "the test")
    for name, w in stored(ours).items():
        np.testing.assert_array_equal(dst[name].read(), w)
    back = backward(dialect.rows(spec), dst, "the test")
    assert back.keys() == src.keys()
    for name, tensor in src.items():
        np.testing.assert_array_equal(back[name].read(), tensor.read())


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_that_others_write(tied: bool) -> None:
    """transformers' own state dict, and the gguf package's own table of names."""
    import gguf

    spec = read(tie_word_embeddings=tied)
    theirs = {
        name: tuple(p.shape) for name, p in hf_model(tied=tied).named_parameters()
    }  # a tied head is named once
    assert {m.src[0]: m.src_shape for m in moves(HF_LLAMA.rows(spec))} == theirs
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    for hf, ours in zip(moves(HF_LLAMA.rows(spec)), moves(GGUF_LLAMA.rows(spec)), strict=True):
        stem = known.get_name(hf.src[0].removesuffix(".weight"))
        assert f"{stem}.weight" == ours.src[0]


def test_a_layer_without_positions_has_nothing_to_reorder() -> None:
    """Case 20: Q and K of a layer that does not turn are stored as they are, odd widths too."""
    spec = read()
    block = replace(spec.layers[0], attn=replace(attn(spec), rope=None, width=5))
    spec = replace(spec, runs=(Run(blocks=(block,), repeats=2),))
    for dialect in (REFERENCE, GGUF_LLAMA):
        rows = {row.dst: row.pattern for row in dialect.rows(spec)}
        assert rows["layers.{l}.attn.q.weight"] == "(n h) d -> (n h) d"
        assert moves(dialect.rows(spec))[2].src_shape == (30, 24)


def test_every_tensor_of_the_table_is_named_once_in_every_dialect() -> None:
    spec = read()
    ours = sorted(n for m in moves(decoder_table.rows(spec)) for n in m.src)
    for dialect in LLAMAS.values():
        assert sorted(m.dst for m in moves(dialect.rows(spec))) == ours
