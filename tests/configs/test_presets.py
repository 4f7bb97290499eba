"""Every preset: the published figures, and a tiny twin of each family that passes the check."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from jaxtwin import jaxmodel, torchref
from jaxtwin.configs import (
    GQA,
    LN,
    RMS,
    Alibi,
    Learned,
    Linear,
    Llama3,
    Model,
    PostBlock,
    QKNorm,
    Rope,
    Sinusoidal,
    budget,
    preset,
)
from jaxtwin.configs.gemma import interleaved
from jaxtwin.jaxmodel import axes
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.table import bridge, decoder_table, tensors
from jaxtwin.tests.helpers.kit import torch_model

# As published, or, for the styles, by hand below.
PARAMETERS = {
    "gpt2": 124_439_808,
    "llama-7b": 6_738_415_616,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "gemma-2b": 2_506_172_416,
    "gemma2-2b": 2_614_341_888,
    "gemma3-1b": 999_885_952,
    "olmo2-1b": 1_484_916_736,
    "bloom-style": 559_214_592,  # bigscience/bloom-560m
    "transformer-2017": 37_000 * 512
    + 6 * (4 * 512**2 + 2 * 512 * 2_048 + 4 * 512 + 2_048 + 512 + 4 * 512),
    "grok-style": 32_000 * 768
    + 12 * (2 * 768**2 + 2 * 768 * 2 * 64 + 3 * 768 * 2_048 + 4 * 768)
    + 768,
}
TINY = {
    "gpt2-tiny": "gpt2",
    "transformer-tiny": "transformer-2017",
    "llama3-tiny": "llama3.1-8b",
    "mistral-tiny": "mistral-7b",
    "qwen2.5-tiny": "qwen2.5-0.5b",
    "qwen3-tiny": "qwen3-0.6b",
    "gemma-tiny": "gemma-2b",
    "gemma2-tiny": "gemma2-2b",
    "gemma3-tiny": "gemma3-1b",
    "grok-tiny": "grok-style",
    "bloom-tiny": "bloom-style",
    "olmo2-tiny": "olmo2-1b",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_published_count_four_ways(name: str) -> None:
    """The arithmetic, the table's rows, and the shapes of both mirrors; none takes memory."""
    spec = preset(name)
    with torch.device("meta"):
        src = sum(p.numel() for p in torchref.Decoder(spec).parameters())
    dst = axes.arrays(jaxmodel.abstract(spec))
    counts = {
        "budget": budget.parameters(spec).total,
        "table": sum(prod(move.dst_shape) for move in tensors.moves(decoder_table.rows(spec))),
        "jaxmodel": sum(prod(x.shape) for x in dst.values()),
        "torchref": src,
    }
    assert counts == dict.fromkeys(counts, PARAMETERS[name])


def rope(base: float, scaling: object = None) -> Rope:
    return Rope(base=base, pairs="half", scaling=scaling)


def only_layer(name: str):  # type: ignore[no-untyped-def]
    """The one kind of layer that the model has."""
    (layer,) = set(preset(name).layers)
    return layer


def test_gpt2() -> None:
    spec, layer = preset("gpt2"), only_layer("gpt2")
    assert (spec.d, len(spec.layers), spec.max_len, spec.vocab) == (768, 12, 1_024, 50_257)
    assert (spec.position, spec.tied, spec.norm) == (Learned(), True, LN(eps=1e-5))
    assert layer.attn == GQA(heads=12, kv=12, width=64, rope=None, bias=True, out_bias=True)
    assert (layer.ffn.hidden, layer.ffn.act, layer.ffn.bias) == (3_072, "gelu_tanh", True)
    assert (layer.pre_attn, layer.post_attn) == (LN(eps=1e-5), None)


def test_transformer_2017() -> None:
    spec, layer = preset("transformer-2017"), only_layer("transformer-2017")
    assert isinstance(layer, PostBlock)
    assert (layer.alpha, layer.post_attn, layer.post_ffn) == (1.0, LN(eps=1e-5), LN(eps=1e-5))
    assert (spec.position, spec.embed_scale, spec.norm) == (Sinusoidal(), 512**0.5, None)
    assert (layer.ffn.act, layer.ffn.bias, layer.attn.bias) == ("relu", True, True)
    assert layer.attn.rope is None


LLAMA3 = Llama3(factor=8.0, low=1.0, high=4.0, original=8_192)


@pytest.mark.parametrize(
    ("name", "heads", "width", "rotary", "max_len", "eps", "tied"),
    [
        ("llama-7b", (32, 32), 128, rope(1e4), 2_048, 1e-6, False),
        ("llama2-7b", (32, 32), 128, rope(1e4), 4_096, 1e-5, False),
        ("llama2-70b", (64, 8), 128, rope(1e4), 4_096, 1e-5, False),
        ("llama3-8b", (32, 8), 128, rope(5e5), 8_192, 1e-5, False),
        ("llama3.1-8b", (32, 8), 128, rope(5e5, LLAMA3), 131_072, 1e-5, False),
        ("llama3.2-1b", (32, 8), 64, rope(5e5, replace(LLAMA3, factor=32.0)), 131_072, 1e-5, True),
        ("mistral-7b", (32, 8), 128, rope(1e4), 32_768, 1e-5, False),
        ("qwen2.5-0.5b", (14, 2), 64, rope(1e6), 32_768, 1e-6, True),
        ("qwen3-0.6b", (16, 8), 128, rope(1e6), 40_960, 1e-6, True),
    ],
)
def test_llama_shapes(
    name: str,
    heads: tuple[int, int],
    width: int,
    rotary: Rope,
    max_len: int,
    eps: float,
    tied: bool,
) -> None:
    spec, layer = preset(name), only_layer(name)
    attn, norm = layer.attn, RMS(eps=eps)
    assert ((attn.heads, attn.kv), attn.width, attn.rope) == (heads, width, rotary)
    assert (spec.max_len, spec.tied, spec.norm) == (max_len, tied, norm)
    assert {layer.pre_attn, layer.pre_ffn} == {norm}
    assert {layer.post_attn, layer.post_ffn} == {None}
    assert attn.window == (4_096 if name == "mistral-7b" else None)
    assert (attn.bias, attn.out_bias) == (name == "qwen2.5-0.5b", False)
    assert attn.qk_norm == (QKNorm(norm=norm, over="head") if name == "qwen3-0.6b" else None)


@pytest.mark.parametrize("name", ["gemma-2b", "gemma2-2b", "gemma3-1b"])
def test_what_gemmas_share(name: str) -> None:
    spec, norm = preset(name), RMS(eps=1e-6, offset=True, cast="after")
    assert (spec.embed_scale, spec.tied, spec.norm) == (spec.d**0.5, True, norm)
    sandwich = None if name == "gemma-2b" else norm
    for layer in spec.layers:
        assert (layer.pre_attn, layer.pre_ffn, layer.ffn.act) == (norm, norm, "gelu_tanh")
        assert (layer.post_attn, layer.post_ffn) == (sandwich, sandwich)
        assert layer.attn.width == 256


def test_gemma2_alternates_and_caps() -> None:
    spec = preset("gemma2-2b")
    assert [layer.attn.window for layer in spec.layers] == [4_096, None] * 13
    assert {layer.attn.cap for layer in spec.layers} == {50.0}
    assert spec.cap == 30.0


def test_gemma3_has_five_local_layers_to_a_global_one() -> None:
    """Case 57, as the 1B has it: 22 local layers and 4 global ones, two bases, no scaling."""
    spec = preset("gemma3-1b")
    assert [(run.repeats, len(run.blocks)) for run in spec.runs] == [(4, 6), (2, 1)]
    whole = [i for i, layer in enumerate(spec.layers) if layer.attn.window is None]
    assert whole == [5, 11, 17, 23]
    for i, layer in enumerate(spec.layers):
        attn = layer.attn
        assert (attn.heads, attn.kv, attn.width, attn.scale, attn.cap) == (4, 1, 256, None, None)
        assert attn.qk_norm == QKNorm(norm=spec.norm, over="head")
        assert attn.rope == rope(1_000_000.0 if i in whole else 10_000.0)
        assert attn.window == (None if i in whole else 512)
    shapes = dict(tensors.src_shapes(decoder_table.rows(spec)))
    assert shapes["layers.0.attn.q.weight"] == (1_024, 1_152)  # 4 heads of 256, and not of 288


def test_every_sixth_layer_is_global_whatever_is_left_over() -> None:
    """Case 57: of 7 layers 0 to 4 and 6 are local; linear scaling is the global ones' alone."""
    local = GQA(heads=2, kv=1, width=4, rope=rope(10_000.0), window=3)
    whole = GQA(heads=2, kv=1, width=4, rope=rope(1_000_000.0, Linear(factor=8.0)))
    for layers in (1, 5, 6, 7, 12, 13):
        runs = interleaved(local, whole, layers, 6)
        flat = [attn for pattern, times in runs for attn in pattern * times]
        assert flat == [whole if i % 6 == 5 else local for i in range(layers)]


def test_bloom_style() -> None:
    spec, layer = preset("bloom-style"), only_layer("bloom-style")
    assert (spec.embed_norm, spec.position, spec.tied) == (LN(eps=1e-5), None, True)
    assert (layer.attn.relative, layer.attn.rope) == (Alibi(), None)
    assert (layer.attn.bias, layer.attn.out_bias, layer.ffn.bias) == (True, True, True)


def test_olmo2_norms_outputs_alone_and_whole_projections() -> None:
    spec, layer = preset("olmo2-1b"), only_layer("olmo2-1b")
    norm = RMS(eps=1e-6, cast="after")
    assert (spec.d, len(spec.layers), spec.max_len, spec.vocab) == (2_048, 16, 4_096, 100_352)
    assert (layer.pre_attn, layer.post_attn) == (layer.pre_ffn, layer.post_ffn) == (None, norm)
    assert (layer.attn.heads, layer.attn.kv, layer.attn.width) == (16, 16, 128)
    assert (layer.attn.rope, layer.attn.bias) == (rope(5e5), False)
    assert layer.attn.qk_norm == QKNorm(norm=norm, over="projection")
    assert (spec.tied, spec.norm, layer.ffn.act) == (False, norm, "silu")


def test_grok_style() -> None:
    spec, layer = preset("grok-style"), only_layer("grok-style")
    norms = {layer.pre_attn, layer.post_attn, layer.pre_ffn, layer.post_ffn, spec.norm}
    assert norms == {RMS(eps=1e-5)}
    assert (layer.attn.cap, spec.cap) == (30.0, 50.0)


# --- the cache


def test_a_token_of_8_key_heads_of_128() -> None:
    """Two bytes each: 4,096 a token and layer, and 128 KiB over the 32 layers of an 8B."""
    spec = preset("llama3-8b")
    assert budget.kv_cache_bytes(spec, 1, 1, 2) == 32 * 4_096 == 131_072
    assert budget.kv_cache_bytes(preset("llama-7b"), 1, 1, 2) == 4 * 131_072  # 32 key heads


def test_gemma3_1b_full_and_rolling() -> None:
    """22 local layers keep 512 of 32,768 tokens where the cache rolls, and else all."""
    spec = preset("gemma3-1b")
    full = budget.kv_cache_bytes(spec, 1, 32_768, 2)
    rolling = budget.kv_cache_bytes(spec, 1, 32_768, 2, rolling=True)
    assert (full, full / 2**30) == (872_415_232, 0.8125)
    assert rolling == 145_752_064
    assert round(rolling / 2**30, 5) == 0.13574
    short = [budget.kv_cache_bytes(spec, 3, 512, 2, rolling=roll) for roll in (False, True)]
    assert short[0] == short[1]


# --- the tiny twins


def likeness(spec: Model) -> set[object]:
    """What the layers are made of, sizes left out."""
    out: set[object] = {type(spec.position), spec.embed_norm, spec.embed_scale is None, spec.norm}
    for layer in spec.layers:
        attn = layer.attn
        scaling = None if attn.rope is None else type(attn.rope.scaling)
        out |= {type(layer), type(attn.relative), attn.qk_norm, attn.cap, ("rope", scaling)}
        out |= {layer.post_attn, ("window", attn.window is None), (attn.bias, attn.out_bias)}
        out |= {type(layer.ffn), layer.ffn.act, layer.ffn.bias, ("alone", attn.kv == attn.heads)}
    return out


@pytest.mark.parametrize(("tiny", "large"), TINY.items())
def test_a_tiny_twin_decides_as_the_large_one(tiny: str, large: str) -> None:
    assert likeness(preset(tiny)) == likeness(preset(large))
    assert budget.parameters(preset(tiny)).total < 70_000


@pytest.mark.full  # the sample of README's models is the same, by their specs shrunk
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_twin_is_equal_on_both_sides(name: str) -> None:
    spec = preset(name)
    weights = bridge.from_state(torch_model(spec).state_dict())
    report = decoder_check.check(spec, weights, dtypes=("float64", "float32"), tokens=64)
    assert report.equal, report
