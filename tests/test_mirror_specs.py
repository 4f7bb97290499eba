"""Specs drawn at random: both mirrors agree in float64, whatever the axes are set to together."""

from __future__ import annotations

from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from configs import GQA, LN, RMS, Block, Glu, Model, Rope, Run, budget
from configs.spec import from_json, to_json
from tests import kit

SMALL = st.sampled_from


def some_norm(eps: list[float]) -> Any:
    rms = st.builds(RMS, eps=SMALL(eps), offset=st.booleans(), cast=SMALL(["before", "after"]))
    # The variance of a layer's few values may be near zero, where the mean square is not.
    return rms | st.builds(LN, eps=SMALL([1e-2]), bias=st.booleans())


norms = st.none() | some_norm([0.0, 1e-6, 1e-2])
sure_norms = some_norm([1e-6, 1e-2])
ropes = st.none() | st.builds(
    Rope, base=SMALL([2.0, 100.0, 1e6]), pairs=SMALL(["adjacent", "half"])
)


@st.composite
def attentions(draw: Any) -> GQA:
    kv, groups = draw(SMALL([1, 2, 3])), draw(SMALL([1, 2, 3]))
    rope = draw(ropes)
    widths = [4, 6] if rope else [4, 5]
    if kv * groups > 1:
        widths = [2, *widths] if rope else [2, 3, *widths]
    return GQA(heads=kv * groups, kv=kv, width=draw(SMALL(widths)), rope=rope)


# Well-conditioned, so that a gap is a fault: a layer that reads the stream without a norm has one
# behind it (else its outputs grow from layer to layer, and rounding with them), and no norm divides
# by something near zero (as it would behind a head or a hidden layer of width 1).
@st.composite
def blocks(draw: Any) -> Block:
    pre_attn, pre_ffn = draw(norms), draw(norms)
    return Block(
        pre_attn=pre_attn,
        attn=draw(attentions()),
        post_attn=draw(norms if pre_attn else sure_norms),
        pre_ffn=pre_ffn,
        ffn=Glu(hidden=draw(SMALL([4, 5, 8])), act=draw(SMALL(["silu", "gelu", "gelu_tanh"]))),
        post_ffn=draw(norms if pre_ffn else sure_norms),
    )


@st.composite
def models(draw: Any) -> Model:
    runs = draw(
        st.lists(
            st.builds(
                Run,
                blocks=st.lists(blocks(), min_size=1, max_size=2).map(tuple),
                times=SMALL([1, 2, 3]),
            ),
            min_size=1,
            max_size=2,
        )
    )
    return Model(
        d=draw(SMALL([7, 8, 12])),
        vocab=draw(SMALL([5, 11])),
        max_len=10,
        runs=tuple(runs),
        norm=draw(norms),
        tied=draw(st.booleans()),
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
    logits, loss, grads = kit.torch_run(model, ids, **where)
    with jax.enable_x64(True):
        got = kit.jax_run(kit.jax_model(model, layout), ids, **where)
    assert kit.apart(got[0], logits) <= 1e-13
    assert got[1] == pytest.approx(loss, rel=1e-13)
    wanted = kit.to_jax(spec, {k: torch.from_numpy(v) for k, v in grads.items()}, layout)
    assert got[2].keys() == wanted.keys()
    errors = {name: kit.apart(got[2][name], grad) for name, grad in wanted.items()}
    assert max(errors.values()) <= 1e-12, errors


@hypothesis.given(spec=models(), layout=SMALL(["scan", "unroll"]), seed=st.integers(0, 99))
@hypothesis.settings(max_examples=6, phases=[hypothesis.Phase.generate])
def test_any_spec(spec: Model, layout: str, seed: int) -> None:
    agree(spec, layout, seed)


@pytest.mark.slow
@hypothesis.given(spec=models(), layout=SMALL(["scan", "unroll"]), seed=st.integers(100, 199))
@hypothesis.settings(max_examples=40, phases=[hypothesis.Phase.generate])
def test_many_specs(spec: Model, layout: str, seed: int) -> None:
    agree(spec, layout, seed)


@hypothesis.given(spec=models())
@hypothesis.settings(max_examples=50)
def test_a_spec_comes_back_from_its_json(spec: Model) -> None:
    assert from_json(to_json(spec), "the test") == spec
