"""Rotary positions on both mirrors: an example by hand, both pairings, phases in float32."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jaxtwin.configs import Rope
from jaxtwin.tests.helpers.parts import SIDES, JaxSide, TorchSide

Side = TorchSide | JaxSide


@pytest.fixture(params=SIDES, ids=lambda side: side.name)
def side(request: pytest.FixtureRequest) -> Side:
    return request.param


def rotated(side: Side, spec: Rope, vector: np.ndarray, position: int, **more) -> np.ndarray:
    """One head of one token at the position."""
    x = np.asarray(vector)[None, None, None, :]
    return side.rotate(spec, x, np.array([[position]]), **more)[0, 0, 0]


@pytest.mark.parametrize("pairs", ["adjacent", "half"])
def test_two_dimensions_by_hand(side: Side, pairs: str) -> None:
    """q=(2,1) and k=(1,-1) at an eighth of a turn a step: only the distance counts."""
    spec = Rope(base=10_000.0, pairs=pairs)

    def at(vector: list[float], position: int) -> np.ndarray:
        return rotated(side, spec, np.array(vector), position, frequency=[np.pi / 4])

    q, k = [2.0, 1.0], [1.0, -1.0]
    assert at(q, 0) @ at(k, 0) == 1
    np.testing.assert_allclose(at(q, 2), [-1, 2], atol=1e-15)
    np.testing.assert_allclose(at(q, 2) @ at(k, 0), -3, rtol=1e-14)
    np.testing.assert_allclose(at(q, 3) @ at(k, 1), -3, rtol=1e-14)
    for position in (0, 1, 2, 3, 100):
        np.testing.assert_allclose(np.linalg.norm(at(q, position)), 5**0.5, rtol=1e-15)
        np.testing.assert_allclose(np.linalg.norm(at(k, position)), 2**0.5, rtol=1e-15)


@pytest.mark.parametrize("pairs", ["adjacent", "half"])
def test_each_pair_is_a_complex_number_turned(side: Side, pairs: str) -> None:
    """Pair p times exp(i position base^(-2p/h)), which shares no code with either mirror."""
    h, base = 8, 500.0
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 2, h))
    positions = np.array([[0, 1, 5], [7, 1_000, 65_537]])
    got = side.rotate(Rope(base=base, pairs=pairs), x, positions)

    frequency = base ** (-np.arange(0, h, 2) / h)
    turn = np.exp(1j * positions[:, :, None, None] * frequency)
    if pairs == "adjacent":
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        expected = np.stack((z.real, z.imag), -1).reshape(x.shape)
    else:
        z = (x[..., : h // 2] + 1j * x[..., h // 2 :]) * turn
        expected = np.concatenate((z.real, z.imag), -1)
    assert got.dtype == np.float64
    # An angle of 65537 is itself only good to 65537 * 2^-53.
    np.testing.assert_allclose(got, expected, atol=4e-11)
    np.testing.assert_allclose(got[0], expected[0], atol=1e-14)


def test_pairings_are_one_permutation_apart(side: Side) -> None:
    """Rows moved as the other pairing needs them: the same scores. Not moved: other scores."""
    q, k = np.random.default_rng(0).normal(size=(2, 8))
    moved = np.arange(8).reshape(4, 2).T.reshape(-1)  # (p c) -> (c p): 0 2 4 6 1 3 5 7

    def score(pairs: str, q: np.ndarray, k: np.ndarray, position: int) -> float:
        spec = Rope(base=10_000.0, pairs=pairs)
        return float(rotated(side, spec, q, position) @ rotated(side, spec, k, 0))

    for position in (0, 5):
        same = score("adjacent", q, k, position)
        assert score("half", q[moved], k[moved], position) == pytest.approx(same, rel=1e-14)
    assert abs(score("half", q, k, 5) - score("adjacent", q, k, 5)) > 0.01
    assert score("half", q, k, 0) == pytest.approx(score("adjacent", q, k, 0), rel=1e-14)


@pytest.mark.parametrize(
    ("position", "as_bfloat16"),
    [(257, 256), (259, 260), (513, 512), (4_095, 4_096), (15_962, 15_936)],
)
def test_bfloat16_keeps_its_phase(side: Side, position: int, as_bfloat16: int) -> None:
    """Case 60: the angle stays float32, cosine and sine are cast; positions are no bfloat16."""
    bf16, h, base = ml_dtypes.bfloat16, 8, 10_000.0
    spec = Rope(base=base, pairs="half")
    x = np.array([1, 1, 1, 1, 0, 0, 0, 0], bf16)  # so that the result is (cos, sin) themselves
    got = rotated(side, spec, x, position)
    assert got.dtype == bf16

    def phases(position: float) -> np.ndarray:
        frequency = (base ** (-np.arange(0, h, 2) / h)).astype(np.float32)
        angle = (np.float32(position) * frequency).astype(np.float64)
        return np.concatenate((np.cos(angle), np.sin(angle))).astype(bf16)

    np.testing.assert_array_equal(got.astype(np.float64), phases(position).astype(np.float64))
    lost = float(np.array(position, bf16))
    assert lost == as_bfloat16
    assert np.any(phases(lost) != phases(position))


def test_position_zero_turns_nothing(side: Side) -> None:
    x = np.random.default_rng(0).normal(size=8)
    for pairs in ("adjacent", "half"):
        np.testing.assert_array_equal(rotated(side, Rope(base=100.0, pairs=pairs), x, 0), x)


def test_absent(side: Side) -> None:
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 5))
    np.testing.assert_array_equal(side.rotate(None, x, np.array([[3, 4]])), x)
