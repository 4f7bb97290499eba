"""Rotary frequencies as scalings change them, on both mirrors: the case book's numbers, and HF's.

transformers is the oracle where it has the scaling; numbers worked out by hand stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxtwin.configs import DynamicNTK, Linear, Llama3, LongRope, Rope, Yarn
from jaxtwin.jaxmodel.position import rotary
from jaxtwin.torchref.position import Rotary

Frequencies = Callable[[Rope, int, int], np.ndarray]


def in_torch(rope: Rope, width: int, longest: int) -> np.ndarray:
    return np.array(Rotary(rope, width).frequency(longest))


def in_jax(rope: Rope, width: int, longest: int) -> np.ndarray:
    with jax.enable_x64(True):
        part = rotary(rope, width)
        at = jax.jit(lambda longest: part.frequencies(longest, jnp.float64))(longest)
        return np.asarray(at)


@pytest.fixture(params=[in_torch, in_jax], ids=["torchref", "jaxmodel"])
def frequencies(request: pytest.FixtureRequest) -> Frequencies:
    return request.param


def rope(scaling: Any, base: float = 10_000.0, **more: Any) -> Rope:
    return Rope(base=base, pairs="half", scaling=scaling, **more)


def test_llama3(frequencies: Frequencies) -> None:
    """Llama 3.2's: 15 fast pairs stay, three go over, the others are divided by 32 (case 50)."""
    scaling = Llama3(factor=32.0, low=1.0, high=4.0, original=8_192)
    plain = frequencies(rope(None, 500_000.0), 64, 1)
    ratio = frequencies(rope(scaling, 500_000.0), 64, 1) / plain
    np.testing.assert_array_equal(ratio[:15], 1)
    np.testing.assert_allclose(ratio[15:18], [0.60557, 0.30374, 0.10345], atol=5e-6)
    np.testing.assert_allclose(ratio[18:], 1 / 32, rtol=1e-14)


def test_llama31_is_not_llama32(frequencies: Frequencies) -> None:
    """The factor is the file's own: 8 and 32 give other tables (case 12)."""
    both = [
        frequencies(rope(Llama3(factor=f, low=1.0, high=4.0, original=8_192), 5e5), 64, 1)
        for f in (8.0, 32.0)
    ]
    np.testing.assert_allclose(both[0][18:] / both[1][18:], 4, rtol=1e-14)


@pytest.mark.parametrize(("truncate", "second"), [(True, 0.217407), (False, 0.169172)])
def test_yarn_truncates_or_does_not(
    frequencies: Frequencies, truncate: bool, second: float
) -> None:
    """Case 53."""
    scaling = Yarn(factor=16.0, original=64, truncate=truncate, magnitude=1.0)
    assert frequencies(rope(scaling), 16, 1)[1] == pytest.approx(second, abs=5e-7)


def test_linear_is_positions_divided(frequencies: Frequencies) -> None:
    """Gemma 3's global layers: base 1e6, positions over 8 (case 57)."""
    plain, scaled = (frequencies(rope(s, 1e6), 256, 1) for s in (None, Linear(factor=8.0)))
    np.testing.assert_allclose(scaled, plain / 8, rtol=1e-15)


def test_dynamic_ntk_follows_the_length_and_comes_back(frequencies: Frequencies) -> None:
    """Up to 64 tokens nothing, then more with each token, and a short text after it (case 56)."""
    scaled = rope(DynamicNTK(factor=2.0, original=64))
    lengths = {10: 0.316228, 64: 0.316228, 65: 0.314841, 128: 0.270296, 11: 0.316228}
    for length, second in lengths.items():
        assert frequencies(scaled, 16, length)[1] == pytest.approx(second, abs=5e-7)


def test_longrope_has_two_lists(frequencies: Frequencies) -> None:
    scaling = LongRope(short=(1.0, 2.0), long=(4.0, 8.0), original=10, magnitude=1.0)
    plain = frequencies(rope(None), 4, 1)
    np.testing.assert_allclose(frequencies(rope(scaling), 4, 10), plain / [1, 2], rtol=1e-15)
    np.testing.assert_allclose(frequencies(rope(scaling), 4, 11), plain / [4, 8], rtol=1e-15)


HF: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (Linear(factor=4.0), {"factor": 4.0}),
    "yarn": (
        Yarn(factor=16.0, original=64, magnitude=0.1 * math.log(16) + 1),
        {"factor": 16.0, "original_max_position_embeddings": 64},
    ),
    "yarn, its own bounds": (
        Yarn(factor=4.0, original=32, fast=8.0, slow=2.0, truncate=False, magnitude=1.5),
        {
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "truncate": False,
            "attention_factor": 1.5,
        },
    ),
    "llama3": (
        Llama3(factor=8.0, low=1.0, high=4.0, original=64),
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "dynamic": (DynamicNTK(factor=2.0, original=256), {"factor": 2.0}),
    "longrope": (
        LongRope(
            short=tuple(1 + i / 10 for i in range(8)),
            long=tuple(2.0 + i for i in range(8)),
            original=64,
            magnitude=math.sqrt(1 + math.log(4) / math.log(64)),
        ),
        {
            "factor": 4.0,
            "short_factor": [1 + i / 10 for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
            "original_max_position_embeddings": 64,
        },
    ),
}


@pytest.mark.parametrize("length", [50, 300])
@pytest.mark.parametrize("name", HF)
def test_transformers_has_the_same(frequencies: Frequencies, name: str, length: int) -> None:
    """In float32, as it computes them."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling, settings = HF[name]
    kind = name.split(",")[0]
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **settings},
    )
    want, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    got = frequencies(rope(scaling), 16, length)
    np.testing.assert_allclose(got, want.numpy(), rtol=4e-6)
    assert getattr(scaling, "magnitude", 1.0) == pytest.approx(magnitude, rel=1e-12)
