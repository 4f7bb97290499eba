"""Attention on both mirrors against loops over heads and tokens, written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from jaxtwin.configs import GQA, Rope
from jaxtwin.tests.helpers.parts import SIDES, JaxSide, TorchSide

Side = TorchSide | JaxSide


@pytest.fixture(params=SIDES, ids=lambda side: side.name)
def side(request: pytest.FixtureRequest) -> Side:
    return request.param


def turned(x: np.ndarray, position: int, base: float) -> np.ndarray:
    """Adjacent pairs as complex numbers."""
    z = x[0::2] + 1j * x[1::2]
    z = z * np.exp(1j * position * base ** (-np.arange(0, len(x), 2) / len(x)))
    return np.stack((z.real, z.imag), -1).reshape(-1)


def by_hand(spec: GQA, w: dict[str, np.ndarray], x: np.ndarray, serve) -> np.ndarray:
    """Head by head and token by token; `serve(j)` is the K/V head of query head j."""
    t, h = len(x), spec.width

    def head(name: str, j: int, i: int, turn: bool) -> np.ndarray:
        out = w[f"{name}.weight"][j * h : (j + 1) * h] @ x[i]
        return turned(out, i, spec.rope.base) if turn and spec.rope else out

    out = np.zeros((t, spec.heads * h))
    for j in range(spec.heads):
        for i in range(t):
            q = head("q", j, i, True)
            scores = [q @ head("k", serve(j), s, True) / h**0.5 for s in range(i + 1)]
            weights = np.exp(np.array(scores) - max(scores))
            weights /= weights.sum()
            values = [head("v", serve(j), s, False) for s in range(i + 1)]
            out[i, j * h : (j + 1) * h] = sum(a * v for a, v in zip(weights, values, strict=True))
    return out @ w["o.weight"].T


def drawn(spec: GQA, d: int, t: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "q.weight": (spec.heads * spec.width, d),
        "k.weight": (spec.kv * spec.width, d),
        "v.weight": (spec.kv * spec.width, d),
        "o.weight": (d, spec.heads * spec.width),
    }
    return {k: rng.normal(size=s) for k, s in shapes.items()}, rng.normal(size=(t, d))


def run(side: Side, spec: GQA, w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    positions = np.arange(len(x))[None]
    mask = np.tril(np.ones((1, len(x), len(x)), bool))
    return side.attention(spec, w, x[None], positions, mask)[0]


@pytest.mark.parametrize(("heads", "kv"), [(4, 2), (6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("rope", [Rope(base=100.0, pairs="adjacent"), None], ids=["rope", "nope"])
def test_query_heads_meet_their_own_kv_head(
    side: Side, heads: int, kv: int, rope: Rope | None
) -> None:
    """Case 68: K/V head j serves query heads j n/k ... (repeat), and not j, j + k, ... (tile)."""
    spec = GQA(heads=heads, kv=kv, width=4, rope=rope)
    w, x = drawn(spec, 5, 7)
    got = run(side, spec, w, x)
    expected = by_hand(spec, w, x, lambda j: j // (heads // kv))
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, atol=1e-13 * np.abs(expected).max())
    if 1 < kv < heads:  # neither MHA nor MQA can tell the two apart
        tiled = by_hand(spec, w, x, lambda j: j % kv)
        assert np.abs(got - tiled).max() > 0.5


def test_only_what_the_mask_admits(side: Side) -> None:
    """A query that may see one key alone returns that key's value."""
    spec = GQA(heads=2, kv=1, width=4, rope=None)
    w, x = drawn(spec, 8, 3)
    w["o.weight"] = np.eye(8)
    mask = np.zeros((1, 3, 3), bool)
    mask[0, [0, 1, 2], [2, 0, 1]] = True
    got = side.attention(spec, w, x[None], np.zeros((1, 3), np.int64), mask)[0]
    values = x @ w["v.weight"].T
    np.testing.assert_allclose(got, np.tile(values[[2, 0, 1]], 2), rtol=1e-14)


def test_scores_far_from_zero(side: Side) -> None:
    """Scores in the thousands neither overflow nor lose the largest."""
    spec = GQA(heads=1, kv=1, width=4, rope=None)
    w, x = drawn(spec, 4, 6)
    w["q.weight"] *= 1e4
    got = run(side, spec, w, x)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, by_hand(spec, w, x, lambda j: 0), atol=1e-11)
