"""Parameter and byte counts: the formula, the table and both mirrors held against each other."""

from __future__ import annotations

import dataclasses
from math import prod

import pytest
import torch

from jaxtwin import jaxmodel, torchref
from jaxtwin.configs import PRESETS, Model, Run, budget, preset
from jaxtwin.configs.llama import llama
from jaxtwin.jaxmodel import axes
from jaxtwin.parity.table import decoder_table, tensors

LAYOUTS = ("scan", "unroll")
# Unrolled, the large ones take seconds each: tests/configs/test_presets.py counts those.
SMALL = ["reference-100m", *sorted(name for name in PRESETS if name.endswith("-tiny"))]


def changed(name: str, **sizes: int) -> Model:
    """The preset with other attention or feed-forward sizes in every block."""
    model = preset(name)
    (run,) = model.runs
    (block,) = run.blocks
    attn = {k: v for k, v in sizes.items() if k in ("heads", "kv", "width")}
    ffn = {k: v for k, v in sizes.items() if k == "hidden"}
    block = dataclasses.replace(
        block,
        attn=dataclasses.replace(block.attn, **attn),
        ffn=dataclasses.replace(block.ffn, **ffn),
    )
    return dataclasses.replace(model, runs=(Run(blocks=(block,), repeats=run.repeats),))


def in_table(spec: Model, layout: str) -> int:
    return sum(prod(move.dst_shape) for move in tensors.moves(decoder_table.rows(spec, layout)))


def in_jax(spec: Model, layout: str) -> int:
    model = jaxmodel.abstract(spec, layout=layout)
    return sum(prod(x.shape) for x in axes.arrays(model).values())


def in_torch(spec: Model) -> int:
    with torch.device("meta"):
        model = torchref.Decoder(spec)
    return sum(p.numel() for p in model.parameters())


def test_reference_100m() -> None:
    count = budget.parameters(preset("reference-100m"))
    assert count.total == 100_092_672
    assert count.decayed == 100_073_472
    assert count.not_decayed == 19_200


def test_reference_100m_part_by_part() -> None:
    """The figures of the system's own table, from the shapes that jaxmodel declares."""
    model = jaxmodel.abstract(preset("reference-100m"), layout="unroll")
    size = {path: prod(x.shape) for path, x in axes.arrays(model).items()}
    assert size["embed/weight"] == 24_576_000
    for i in range(12):
        layer = f"stack/layers/{i}/"
        assert sum(size[f"{layer}attn/{p}"] for p in "qkv") == 983_040
        assert size[f"{layer}attn/o"] == 589_824
        assert sum(size[f"{layer}ffn/{p}"] for p in ("gate", "up", "down")) == 4_718_592
        assert sum(size[f"{layer}{n}/weight"] for n in ("pre_attn", "pre_ffn")) == 1_536
    assert size["norm/weight"] == 768
    assert len(size) == 1 + 12 * 9 + 1
    assert sum(size.values()) == 100_092_672


def test_smollm2() -> None:
    assert budget.parameters(preset("smollm2-135m")).total == 134_515_008


@pytest.mark.parametrize("name", SMALL)
def test_formula_table_and_both_mirrors_count_alike(name: str) -> None:
    spec = preset(name)
    counts = {"budget": budget.parameters(spec).total, "torchref": in_torch(spec)}
    for layout in LAYOUTS:
        counts[f"table {layout}"] = in_table(spec, layout)
        counts[f"jaxmodel {layout}"] = in_jax(spec, layout)
    assert len(set(counts.values())) == 1, counts


@pytest.mark.parametrize("name", SMALL)
def test_table_has_the_names_and_shapes_of_both_mirrors(name: str) -> None:
    spec = preset(name)
    with torch.device("meta"):
        src = torchref.Decoder(spec).state_dict()
    src = {name: tuple(value.shape) for name, value in src.items()}
    for layout in LAYOUTS:
        moves = tensors.moves(decoder_table.rows(spec, layout))
        dst = axes.arrays(jaxmodel.abstract(spec, layout=layout))
        assert {m.dst: m.dst_shape for m in moves} == {k: v.shape for k, v in dst.items()}
        assert {name: m.src_shape for m in moves for name in m.src} == src


@pytest.mark.parametrize("kv", [1, 2, 3, 4, 6, 12])
def test_every_number_of_kv_heads(kv: int) -> None:
    """2 d^2 + 2 d k h a layer for attention; everything else stays."""
    spec = changed("reference-100m", kv=kv)
    per_layer = 2 * 768 * 768 + 2 * 768 * kv * 64
    expected = 24_576_000 + 12 * (per_layer + 4_718_592 + 1_536) + 768
    assert budget.parameters(spec).total == expected
    assert in_jax(spec, "scan") == in_torch(spec) == expected


def test_untying_adds_one_embedding() -> None:
    tied = preset("reference-100m")
    untied = dataclasses.replace(tied, tied=False)
    for count in (lambda s: budget.parameters(s).total, in_torch, lambda s: in_jax(s, "scan")):
        assert count(untied) - count(tied) == 32_000 * 768 == 24_576_000
    assert budget.parameters(untied).decayed - budget.parameters(tied).decayed == 24_576_000


def test_a_wider_ffn_adds_what_it_must() -> None:
    wide = changed("reference-100m", hidden=3_072)
    narrow = preset("reference-100m")
    for count in (lambda s: budget.parameters(s).total, in_torch, lambda s: in_jax(s, "scan")):
        assert count(wide) - count(narrow) == 28_311_552


def heads_of_128(layers: int) -> Model:
    return llama(
        vocab=32_000,
        d=4_096,
        layers=layers,
        heads=32,
        kv=8,
        hidden=14_336,
        max_len=8_192,
        base=500_000.0,
        pairs="half",
        eps=1e-5,
        tied=False,
    )


def test_kv_cache_counts_kv_heads() -> None:
    """32 query heads over 8 K/V heads of 128, two bytes each: 4,096 a token and layer."""
    assert budget.kv_cache_bytes(heads_of_128(1), 1, 1, 2) == 4_096
    assert budget.kv_cache_bytes(heads_of_128(32), 1, 1, 2) == 131_072 == 128 * 2**10
    assert budget.kv_cache_bytes(heads_of_128(32), 3, 1_000, 2) == 3 * 1_000 * 131_072


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SMALL)
def test_kv_cache_is_what_the_formula_says(name: str, layout: str) -> None:
    import jax

    spec = preset(name)
    cache = jax.eval_shape(lambda: jaxmodel.abstract(spec, layout=layout).start(2, 64).layers)
    held = sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert held == budget.kv_cache_bytes(spec, 2, 64, 4)


@pytest.mark.parametrize(("itemsize", "gib"), [(4, 3.72529), (2, 1.86265), (1, 0.93132)])
def test_a_billion_weights(itemsize: int, gib: float) -> None:
    """Bytes per parameter, in GiB of 2^30, from the preset's own bytes scaled to 10^9."""
    spec = preset("reference-100m")
    held = budget.weight_bytes(spec, itemsize)
    assert held == 100_092_672 * itemsize
    assert held / 100_092_672 * 10**9 / 2**30 == pytest.approx(gib, abs=5e-6)


def test_several_runs_and_absent_norms_are_counted() -> None:
    """By hand: two different blocks, one repeated pattern, norms that are not there."""
    from jaxtwin.configs import GQA, RMS, Block, Glu

    plain = Block(
        pre_attn=None,
        attn=GQA(heads=2, kv=1, width=3, rope=None),
        pre_ffn=RMS(eps=1e-6),
        ffn=Glu(hidden=5),
        post_ffn=RMS(eps=1e-6),
    )
    other = dataclasses.replace(plain, ffn=Glu(hidden=7), post_ffn=None)
    spec = Model(
        d=4,
        vocab=11,
        max_len=16,
        runs=(Run(blocks=(plain, other), repeats=2), Run(blocks=(other,), repeats=1)),
        norm=None,
        tied=False,
    )
    attention = 2 * (4 * 2 * 3) + 2 * (4 * 1 * 3)
    matrices = 2 * 44 + 5 * attention + 2 * 3 * 4 * 5 + 3 * 3 * 4 * 7
    scales = 2 * (4 + 4) + 3 * 4
    assert budget.parameters(spec) == budget.Count(decayed=matrices, not_decayed=scales)
    assert in_torch(spec) == matrices + scales
    for layout in LAYOUTS:
        assert in_table(spec, layout) == in_jax(spec, layout) == matrices + scales
