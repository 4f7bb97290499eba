"""Specs drawn at random: both mirrors agree in float64, whatever the axes are set to together."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxtwin.configs import (
    GQA,
    LN,
    RMS,
    Alibi,
    Block,
    DynamicNTK,
    Glu,
    Learned,
    Linear,
    Llama3,
    LongRope,
    Mlp,
    Model,
    PostBlock,
    QKNorm,
    Rope,
    Run,
    Sinusoidal,
    T5Bias,
    Yarn,
    budget,
)
from jaxtwin.configs.shrink import shrunk
from jaxtwin.configs.spec import from_json, to_json
from jaxtwin.parity.sides.terms import Watch, relative
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensor, backward, forward, src_shapes
from jaxtwin.tests.helpers import kit

SMALL = st.sampled_from


def some_norm(eps: list[float]) -> Any:
    rms = st.builds(RMS, eps=SMALL(eps), offset=st.booleans(), cast=SMALL(["before", "after"]))
    # The variance of a layer's few values may be near zero, where the mean square is not.
    return rms | st.builds(LN, eps=SMALL([1e-2]), bias=st.booleans())


norms = st.none() | some_norm([0.0, 1e-6, 1e-2])
sure_norms = some_norm([1e-6, 1e-2])
factors = st.floats(1.0, 4.0)


@st.composite
def ropes(draw: Any, width: int) -> Rope:
    turned = draw(SMALL([None, *range(2, width + 1, 2)] if width % 2 == 0 else [width - 1]))
    pairs = (turned or width) // 2
    lists = st.lists(factors, min_size=pairs, max_size=pairs).map(tuple)
    length = SMALL([4, 32])  # the input passes the one and not the other
    scalings = [
        st.none(),
        st.builds(Linear, factor=factors),
        st.builds(
            Yarn,
            factor=factors,
            original=SMALL([16, 256]),
            fast=SMALL([8.0, 32.0]),
            truncate=st.booleans(),
            magnitude=factors,
        ),
        st.builds(Llama3, factor=factors, low=SMALL([1.0]), high=SMALL([4.0]), original=length),
        st.builds(LongRope, short=lists, long=lists, original=length, magnitude=factors),
    ]
    if pairs > 1:
        scalings.append(st.builds(DynamicNTK, factor=factors, original=length))
    return Rope(
        base=draw(SMALL([2.0, 100.0, 1e6])),
        pairs=draw(SMALL(["adjacent", "half"])),
        width=turned,
        scaling=draw(st.one_of(scalings)),
    )


relatives = (
    st.none()
    | st.just(Alibi())
    | st.builds(T5Bias, buckets=SMALL([2, 4, 5]), longest=SMALL([4, 8]))
)


@st.composite
def attentions(draw: Any) -> GQA:
    kv, groups = draw(SMALL([1, 2, 3])), draw(SMALL([1, 2, 3]))
    turning = draw(st.booleans())
    widths = [4, 6] if turning else [4, 5]
    if kv * groups > 1:
        widths = [2, *widths] if turning else [2, 3, *widths]
    width = draw(SMALL(widths))
    # A norm over very few values may divide by something near zero.
    over = draw(SMALL(["head", "projection"] if width > 3 else ["projection"]))
    return GQA(
        heads=kv * groups,
        kv=kv,
        width=width,
        rope=draw(ropes(width)) if turning else None,
        relative=draw(relatives),
        bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        qk_norm=draw(st.none() | st.builds(QKNorm, norm=some_norm([1e-2]), over=st.just(over))),
        scale=draw(st.none() | st.floats(0.1, 1.0)),
        cap=draw(st.none() | st.floats(1.0, 20.0)),
        window=draw(st.none() | SMALL([1, 2, 3, 9, 10])),
    )


ffns = st.builds(
    Glu,
    hidden=SMALL([4, 5, 8]),
    act=SMALL(["silu", "gelu", "gelu_tanh"]),
    bias=st.booleans(),
) | st.builds(
    Mlp, hidden=SMALL([4, 5, 8]), act=SMALL(["relu", "gelu", "gelu_tanh"]), bias=st.booleans()
)


# Well-conditioned, so that a gap is a fault: a layer that reads the stream without a norm has one
# behind it (else its outputs grow from layer to layer, and rounding with them), and no norm divides
# by something near zero (as it would behind a head or a hidden layer of width 1).
@st.composite
def blocks(draw: Any) -> Block | PostBlock:
    attn, ffn = draw(attentions()), draw(ffns)
    if draw(SMALL([False, False, True])):
        return PostBlock(
            attn=attn,
            post_attn=draw(sure_norms),
            ffn=ffn,
            post_ffn=draw(sure_norms),
            alpha=draw(SMALL([1.0, 1.7])),
        )
    pre_attn, pre_ffn = draw(norms), draw(norms)
    return Block(
        pre_attn=pre_attn,
        attn=attn,
        post_attn=draw(norms if pre_attn else sure_norms),
        pre_ffn=pre_ffn,
        ffn=ffn,
        post_ffn=draw(norms if pre_ffn else sure_norms),
    )


@st.composite
def models(draw: Any) -> Model:
    runs = draw(
        st.lists(
            st.builds(
                Run,
                blocks=st.lists(blocks(), min_size=1, max_size=2).map(tuple),
                repeats=SMALL([1, 2, 3]),
            ),
            min_size=1,
            max_size=2,
        )
    )
    position = draw(st.none() | st.just(Learned()) | st.just(Sinusoidal()))
    return Model(
        d=draw(SMALL([8, 12] if isinstance(position, Sinusoidal) else [7, 8, 12])),
        vocab=draw(SMALL([5, 11])),
        max_len=10,
        embed_scale=draw(st.none() | SMALL([0.5, 3.0])),
        position=position,
        embed_norm=draw(st.none() | sure_norms),
        runs=tuple(runs),
        norm=draw(norms),
        tied=draw(st.booleans()),
        cap=draw(st.none() | SMALL([5.0, 30.0])),
    )


def agree(spec: Model, layout: str, seed: int) -> None:
    """Logits within 1e-13, every gradient within 1e-12, on two packed rows."""
    model = kit.torch_model(spec, seed=seed)
    count = sum(p.numel() for p in model.parameters())
    assert count == budget.parameters(spec).total
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, spec.vocab, (2, 10))
    where = {
        "positions": np.stack((np.arange(10), np.r_[0:6, 0:4])),
        "segments": np.stack((np.zeros(10, np.int64), np.repeat([0, 1], [6, 4]))),
    }
    with Watch(model) as watch:
        logits, loss, grads = kit.torch_run(model, ids, **where)
    terms = watch.terms()
    with jax.enable_x64(True):
        got = kit.jax_run(kit.jax_model(model, layout), ids, **where)
    assert kit.apart(got[0], logits) <= 1e-13
    assert got[1] == pytest.approx(loss, rel=1e-13)
    dst = {name: Tensor.of(grad) for name, grad in got[2].items()}
    back = backward(decoder_table.rows(spec, layout), dst, "the gradients")
    assert back.keys() == grads.keys()
    errors = {n: relative(back[n].read(), grad, terms.get(n)) for n, grad in grads.items()}
    assert max(errors.values()) <= 1e-12, errors


@hypothesis.given(spec=models(), layout=SMALL(["scan", "unroll"]), seed=st.integers(0, 99))
@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
def test_any_spec(spec: Model, layout: str, seed: int) -> None:
    agree(spec, layout, seed)


@pytest.mark.full
@hypothesis.given(spec=models(), layout=SMALL(["scan", "unroll"]), seed=st.integers(100, 199))
@hypothesis.settings(max_examples=20, phases=[hypothesis.Phase.generate])
def test_many_specs(spec: Model, layout: str, seed: int) -> None:
    agree(spec, layout, seed)


@hypothesis.given(spec=models())
@hypothesis.settings(max_examples=30)
def test_a_spec_shrinks_and_its_weights_go_both_ways(spec: Model) -> None:
    """Through either layout of the table and back, bit for bit; and no decision is lost."""
    small = shrunk(spec)
    for src, dst in ((a, b) for a, b in zip(spec.runs, small.runs, strict=True)):
        kinds = [decisions(block) for block in src.blocks]
        assert kinds == [decisions(block) for block in dst.blocks]
    assert shrunk(small) == small
    rng = np.random.default_rng(0)
    named = src_shapes(decoder_table.rows(small, "unroll"))
    weights = {name: Tensor.of(rng.normal(size=shape)) for name, shape in named}
    for layout in ("scan", "unroll"):
        rows = decoder_table.rows(small, layout)
        back = backward(rows, forward(rows, weights, "here"), "there")
        assert back.keys() == weights.keys()
        assert all(np.array_equal(back[n].read(), weights[n].read()) for n in weights)


def decisions(spec: Any) -> Any:
    """A spec without its numbers: what is there, and of which kind."""
    if not dataclasses.is_dataclass(spec):
        return type(spec).__name__ if isinstance(spec, int | float | tuple) else spec
    parts = {f.name: decisions(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
    return type(spec).__name__, parts


@hypothesis.given(spec=models())
@hypothesis.settings(max_examples=50)
def test_a_spec_comes_back_from_its_json(spec: Model) -> None:
    assert from_json(to_json(spec), "the test") == spec
