"""Attention sinks: by hand, by the other formula for the same thing, and against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxtwin.configs.llama import llama
from jaxtwin.configs.spec import Model, Run
from jaxtwin.jaxmodel import axes
from jaxtwin.jaxmodel.attention import SinkSoftmax as JaxSinks
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.checkpoints.dialects.base import Dialect
from jaxtwin.parity.checkpoints.dialects.hf_keys import LLAMA_LAYER, LLAMA_NAMES, PRE_NORMS, layer
from jaxtwin.parity.sides import witness
from jaxtwin.parity.table.tensors import Tensor, forward
from jaxtwin.torchref.attention import SinkSoftmax as TorchSinks

SCORES, SINK = np.array([1.0, 2.0, 3.0]), 2.5
VALUES = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
# softmax([1, 2, 3, 2.5]) without its last entry, times the values; in the same digits as
# softmax([1, 2, 3]) times the values times sigmoid(logsumexp([1, 2, 3]) - 2.5).
MIXED = [0.538139, 0.648362]


def in_torch() -> np.ndarray:
    part = TorchSinks(1).double()
    part.sinks.data.fill_(SINK)
    return part(torch.from_numpy(SCORES).view(1, 1, 1, 3)).detach().numpy().reshape(3)


def in_jax() -> np.ndarray:
    part = JaxSinks(axes.Maker(jax.random.key(0), jnp.dtype("float64"), 0.02, 0.02, {"n": 1}))
    part.sinks.set_value(jnp.array([SINK]))
    return np.asarray(part(jnp.asarray(SCORES).reshape(1, 1, 1, 1, 3))).reshape(3)


@pytest.mark.parametrize("side", [in_torch, in_jax])
def test_by_hand(side: Any, x64: None) -> None:
    weights = side()
    np.testing.assert_allclose(weights @ VALUES, MIXED, atol=5e-7)
    scale = 1 / (1 + np.exp(SINK - np.log(np.exp(SCORES).sum())))
    plain = np.exp(SCORES) / np.exp(SCORES).sum()
    np.testing.assert_allclose(weights, plain * scale, rtol=1e-14)


THETAS = (100.0, 100.0, 0.0)  # 0: no rotation in that layer
SINKS = layer(("attn.softmax.sinks", "self_attn.sinks", "n -> n"))
GRANITE = Dialect("hf-granite-swa", LLAMA_NAMES + PRE_NORMS + LLAMA_LAYER + SINKS, "half")


def granite() -> Any:
    """A tiny Granite with windows and sinks, and none of its multipliers but the scores' scale."""
    config = transformers.GraniteSWAConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_multiplier=0.4,
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        layer_rope_theta=list(THETAS),
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.GraniteSWAForCausalLM(config).eval()
    for name, param in model.named_parameters():
        if name.endswith("sinks"):
            param.data.normal_(0, 2)
        elif param.ndim == 1:
            param.data.uniform_(0.5, 1.5)
        else:
            param.data.normal_(0, param.shape[1] ** -0.5)
    return model


def spec() -> Model:
    base = llama(
        vocab=61,
        d=32,
        layers=1,
        heads=4,
        kv=2,
        hidden=40,
        max_len=64,
        base=100.0,
        pairs="half",
        eps=1e-5,
        tied=True,
    )
    block = base.layers[0]
    blocks = []
    for i, theta in enumerate(THETAS):
        attn = replace(
            block.attn,
            scale=0.4,
            sinks=True,
            window=9 if i else None,
            rope=replace(block.attn.rope, base=theta) if theta else None,
        )
        blocks.append(replace(block, attn=attn))
    return replace(base, runs=(Run(blocks=tuple(blocks), repeats=1),))


@pytest.mark.slow
def test_against_transformers() -> None:
    """float64 between the mirrors; logits and every gradient of Granite's within the budget."""
    model, sinks = granite(), spec()
    rows = GRANITE.rows(sinks)
    state = {name: Tensor.of(p.detach().numpy()) for name, p in model.named_parameters()}
    tensors = {name: Tensor.of(t.read()) for name, t in forward(rows, state, "Granite").items()}

    def run(inputs: Any) -> Any:
        return witness.run(model, rows, inputs)

    report = decoder_check.check(sinks, tensors, witness=run, tokens=40, diagnose=False)
    assert report.equal, [c for c in report.checks if not c.ok]
    names = {c.name for c in report.checks}
    assert "transformers: logits" in names
    assert "transformers: grad layers.2.attn.softmax.sinks" in names
