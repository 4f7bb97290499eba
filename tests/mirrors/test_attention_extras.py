"""What attention may have besides: windows, caps, scales, biases, norms of heads; NumPy loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxtwin.configs import GQA, LN, RMS, Alibi, QKNorm, T5Bias
from jaxtwin.tests.helpers.parts import SIDES, JaxSide, TorchSide

Side = TorchSide | JaxSide
T, D = 6, 5
SLOPES = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]  # of four heads
PLAIN = GQA(heads=4, kv=2, width=4, rope=None)


@pytest.fixture(params=SIDES, ids=lambda side: side.name)
def side(request: pytest.FixtureRequest) -> Side:
    return request.param


def drawn(spec: GQA) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    n, k = spec.heads * spec.width, spec.kv * spec.width
    shapes = {"q.weight": (n, D), "k.weight": (k, D), "v.weight": (k, D), "o.weight": (D, n)}
    if spec.bias:
        shapes |= {"q.bias": (n,), "k.bias": (k,), "v.bias": (k,)}
    if spec.out_bias:
        shapes["o.bias"] = (D,)
    if spec.qk_norm is not None:
        whole = spec.qk_norm.over == "projection"
        for name, size in (("q_norm", n), ("k_norm", k)):
            shapes[f"{name}.norm.weight"] = (size if whole else spec.width,)
            if isinstance(spec.qk_norm.norm, LN):
                shapes[f"{name}.norm.bias.weight"] = shapes[f"{name}.norm.weight"]
    if isinstance(spec.relative, T5Bias):
        shapes["relative.weight"] = (spec.relative.buckets, spec.heads)
    return {name: rng.normal(size=s) for name, s in shapes.items()}, rng.normal(size=(T, D))


def normed(spec: GQA, w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """x (t, heads * width) normed by heads or as a whole."""
    if spec.qk_norm is None:
        return x
    norm = spec.qk_norm.norm
    size = x.shape[1] if spec.qk_norm.over == "projection" else spec.width
    y = x.reshape(len(x), -1, size)
    if isinstance(norm, LN):
        y = y - y.mean(-1, keepdims=True)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + norm.eps)
    scale = w[f"{name}.norm.weight"] + (isinstance(norm, RMS) and norm.offset)
    return (y * scale + w.get(f"{name}.norm.bias.weight", 0)).reshape(x.shape)


def by_hand(spec: GQA, w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Head by head and token by token."""
    h = spec.width
    q, k, v = (x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0) for name in "qkv")
    q, k = normed(spec, w, "q_norm", q), normed(spec, w, "k_norm", k)
    out = np.zeros((T, spec.heads * h))
    for j in range(spec.heads):
        own = slice(j * h, (j + 1) * h)
        shared = j * spec.kv // spec.heads
        theirs = slice(shared * h, (shared + 1) * h)
        for i in range(T):
            seen = range(max(0, i - (spec.window or T) + 1), i + 1)
            scores = np.array([q[i, own] @ k[s, theirs] for s in seen])
            scores *= h**-0.5 if spec.scale is None else spec.scale
            if spec.cap is not None:
                scores = spec.cap * np.tanh(scores / spec.cap)
            if isinstance(spec.relative, Alibi):
                scores -= SLOPES[j] * np.array([i - s for s in seen])
            if isinstance(spec.relative, T5Bias):  # two buckets of one, and one of all beyond
                scores += [w["relative.weight"][min(i - s, 2), j] for s in seen]
            weights = np.exp(scores - scores.max())
            out[i, own] = (weights / weights.sum()) @ v[list(seen), theirs]
    return out @ w["o.weight"].T + w.get("o.bias", 0)


CASES = {
    "plain": PLAIN,
    "biases": replace(PLAIN, bias=True, out_bias=True),
    "q, k and v have a bias alone": replace(PLAIN, bias=True),
    "a scale": replace(PLAIN, scale=24**-0.5),  # case 72: query_pre_attn_scalar, not the width
    "a cap": replace(PLAIN, cap=1.5),
    "a window of 1": replace(PLAIN, window=1),
    "a window of 2": replace(PLAIN, window=2),
    "a window of 3": replace(PLAIN, window=3),
    "a window of all": replace(PLAIN, window=T),
    "ALiBi": replace(PLAIN, relative=Alibi()),
    "T5": replace(PLAIN, relative=T5Bias(buckets=3, longest=2)),
    "heads normed": replace(PLAIN, qk_norm=QKNorm(norm=RMS(eps=1e-3), over="head")),
    "heads normed by 1 + w": replace(
        PLAIN, qk_norm=QKNorm(norm=RMS(eps=1e-3, offset=True), over="head")
    ),
    "projections normed": replace(PLAIN, qk_norm=QKNorm(norm=LN(eps=1e-3), over="projection")),
    "all at once": replace(
        PLAIN,
        bias=True,
        out_bias=True,
        scale=0.3,
        cap=2.0,
        window=3,
        relative=Alibi(),
        qk_norm=QKNorm(norm=RMS(eps=1e-3), over="projection"),
    ),
}


def run(side: Side, spec: GQA, w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    mask = np.tril(np.ones((1, T, T), bool))
    return side.attention(spec, w, x[None], np.arange(T)[None], mask)[0]


@pytest.mark.parametrize("name", CASES)
def test_attention_is_its_formula(side: Side, name: str) -> None:
    """Case 70 among them: a window of 2 sees the token itself and the one before, no more."""
    spec = CASES[name]
    w, x = drawn(spec)
    expected = by_hand(spec, w, x)
    np.testing.assert_allclose(run(side, spec, w, x), expected, atol=1e-13)
    if name not in ("plain", "a window of all"):  # and it does something
        assert np.abs(expected - by_hand(PLAIN, drawn(PLAIN)[0], drawn(PLAIN)[1])).max() > 1e-2


def test_a_cap_on_scores_far_from_zero(side: Side) -> None:
    """Case 71: scores up to 200, cap 50, window 4; capped before the mask, or all would be seen."""
    spec = replace(PLAIN, cap=50.0, window=4)
    w, x = drawn(spec)
    w["q.weight"] *= 40
    got = run(side, spec, w, x)
    np.testing.assert_allclose(got, by_hand(spec, w, x), atol=1e-12)
    assert np.abs(got - by_hand(replace(spec, cap=None), w, x)).max() > 1e-2


def test_a_row_that_sees_nothing_is_the_mean_and_no_nan(side: Side) -> None:
    """Case 75: all scores are the same lowest number, so all values weigh the same."""
    w, x = drawn(PLAIN)
    w["o.weight"] = np.eye(16)[:D]
    mask = np.tril(np.ones((1, T, T), bool))
    mask[0, 2] = False
    got = side.attention(PLAIN, w, x[None], np.arange(T)[None], mask)[0]
    values = (x @ w["v.weight"].T).mean(0)
    np.testing.assert_allclose(got[2], np.repeat(values.reshape(2, 4), 2, 0).reshape(-1)[:D])
    assert np.isfinite(got).all()
