"""The metrics, on arrays whose numbers are worked out by hand."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from jaxtwin.parity.report import metrics
from jaxtwin.tests.helpers.reports import normal

NAN, INF = math.nan, math.inf
BF16 = np.dtype(ml_dtypes.bfloat16)
F32, F64, F16 = (np.dtype(t) for t in (np.float32, np.float64, np.float16))
KINDS = [(F64, 52), (F32, 23), (F16, 10), (BF16, 7)]  # with the bits behind the point


def test_tiny_and_huge_values_are_compared_too() -> None:
    """Their squares vanish or overflow, and 0 / 0 and x / inf must not look equal."""
    one, two = np.array([1.0, 2.0]), np.array([2.0, 2.0])
    for unit in (1e-300, 1e-170, 1.0, 1e170, 1e300):
        got, want = two * unit, one * unit
        assert metrics.relative_l2(got, want) == pytest.approx(1 / math.sqrt(5), rel=1e-15)
        assert metrics.worst_row(got, want) == pytest.approx(1 / math.sqrt(5), rel=1e-15)
    assert metrics.relative_l2(np.array([1e-200]), np.zeros(1)) == INF
    assert math.isnan(metrics.relative_l2(np.array([INF]), np.array([INF])))
    assert math.isnan(metrics.relative_l2(np.ones(1), np.array([INF])))
    assert metrics.relative_l2(np.array([INF]), np.ones(1)) == INF


def test_worst_row_of_other_shapes() -> None:
    """Shapes that would broadcast are not compared as if they were equal."""
    assert metrics.worst_row(np.ones((1, 4)), np.ones((3, 4))) == INF


def test_relative_l2_along_an_axis() -> None:
    want = np.full((2, 3, 4), 2.0)
    got = want.copy()
    got[:, 1] *= 1.25
    got[0, :, 3] += 1
    # Along axis 1, 8 elements a slice, |want| = 2 sqrt(8). Slice 1: six are off by 0.5, one by 0.5
    # and one by 1.5: see the sum. Slices 0 and 2: one element is off by 1.
    other = 1 / math.sqrt(32)
    middle = math.sqrt((7 * 0.25 + 2.25) / 32)
    np.testing.assert_allclose(
        metrics.relative_l2_along(got, want, 1), [other, middle, other], rtol=1e-15
    )
    assert metrics.relative_l2_along(got, want, 0).shape == (2,)
    one = np.array([1.0, 2.0, 4.0])
    assert metrics.relative_l2_along(one * [1, 1, 1.5], one, 0).tolist() == [0, 0, 0.5]


def test_relative_l2_along_keeps_zero_inf_and_nan_apart() -> None:
    want = np.array([[0.0, 0], [0, 0], [1, 1], [1e-200, 0]])
    got = np.array([[0.0, 0], [1e-200, 0], [1, NAN], [2e-200, 0]])
    slices = metrics.relative_l2_along(got, want, 0)
    assert slices[[0, 1, 3]].tolist() == [0, INF, 1]
    assert math.isnan(slices[2])


@pytest.mark.parametrize(("dtype", "bits"), KINDS)
def test_ulp_of_one_element_moved_by_k(dtype: np.dtype, bits: int) -> None:
    want = np.array([[1.0, 1.5], [-3.0, 1.0]]).astype(dtype)
    for k in (1, 3):
        got = want.copy()
        got[1, 0] += dtype.type(k * 2.0 ** (1 - bits))  # in [2, 4) the spacing is 2^(1 - bits)
        assert metrics.ulp(got, want, dtype) == (k, (1, 0))
    assert metrics.ulp(want, want, dtype) == (0, (0, 0))


def test_ulp_below_the_rms_is_that_of_the_rms() -> None:
    """want's RMS is sqrt((4 + 4 + 4 + 4 + 1e-24) / 5) = 1.79: a spacing of 2^-23 in float32."""
    want = np.array([2.0, -2.0, 2.0, -2.0, 1e-12])
    got = want + np.array([0, 0, 0, 0, 5 * 2.0**-23])
    units, at = metrics.ulp(got, want, F32)
    assert at == (4,)
    assert units == pytest.approx(5, rel=1e-9)


def test_ulp_of_small_numbers_stops_at_the_smallest() -> None:
    """float16's smallest step is 2^-24; all of `want` is zero, so nothing else gives a unit."""
    assert metrics.ulp(np.array([0.0, 2.0**-24]), np.zeros(2), F16) == (1, (1,))
    assert metrics.ulp(np.array([3 * 5e-324]), np.array([5e-324]), F64) == (2, (0,))


def test_ulp_does_not_skip_what_is_not_finite() -> None:
    want = np.ones(4)
    assert metrics.ulp(np.array([1, 1, INF, 1]), want, F32) == (INF, (2,))
    units, at = metrics.ulp(np.array([1, 9, 1, NAN]), want, F32)
    assert math.isnan(units)
    assert at == (3,)
    units, at = metrics.ulp(np.array([1, INF]), np.array([1, INF]), F32)
    assert math.isnan(units)


def test_bias_of_a_constant_is_the_root_of_n() -> None:
    want = normal(100)
    signed, outward = metrics.bias(want - 0.25, want)
    assert signed == pytest.approx(-10, rel=1e-12)
    # Away from zero for negative values and toward it for positive ones.
    assert outward == pytest.approx(10 * -np.sign(want).mean(), rel=1e-12, abs=1e-12)
    assert metrics.bias(want, want) == (0, 0)
    one = want.copy()
    one[7] += 1e-200 + 1
    assert metrics.bias(one, want)[0] == pytest.approx(1, rel=1e-12)
    assert metrics.bias(np.full(9, 2e-300), np.full(9, 1e-300))[0] == pytest.approx(3)
    assert math.isnan(metrics.bias(np.array([NAN, 1]), np.ones(2))[0])


@pytest.mark.parametrize(("dtype", "bits"), [(F32, 23), (BF16, 7)])
def test_bias_tells_truncation_from_rounding(dtype: np.dtype, bits: int) -> None:
    """Of 10,000 values of both signs the signed mean shows nothing: |z| is at most 100."""
    want = normal(10_000)
    fraction, exponent = np.frexp(want)
    cut = np.ldexp(np.trunc(fraction * 2.0 ** (bits + 1)), exponent - bits - 1)
    assert (cut == metrics.rounded(cut, dtype)).all()
    signed, outward = metrics.bias(cut, want)
    assert abs(signed) < 4
    assert -90 < outward < -60
    nearest = metrics.bias(metrics.rounded(want, dtype), want)
    assert max(map(abs, nearest)) < 4
    down = np.minimum(cut, np.where(want < 0, cut - np.ldexp(1.0, exponent - bits - 1), cut))
    assert metrics.bias(down, want)[0] < -60


def test_nonfinite() -> None:
    want = np.array([[1, NAN, INF, -INF], [NAN, INF, 1, 0]])
    got = np.array([[1, NAN, INF, INF], [INF, 1, NAN, -INF]])
    # alike: NaN and Inf. Unlike: -Inf against Inf, NaN against Inf.
    found = metrics.nonfinite(got, want)
    assert found == metrics.NonFinite(got=2, want=1, unlike=2, alike=2, at=(0, 3))
    assert not found.agrees
    same = metrics.nonfinite(want, want)
    assert same == metrics.NonFinite(0, 0, 0, 5, None)
    assert same.agrees


def test_sorted_l2_of_permuted_values() -> None:
    want = np.array([[1.0, 2, 3], [4, 5, 6]])
    got = np.array([[4.0, 5, 6], [1, 2, 3]])
    assert metrics.relative_l2(got, want) == pytest.approx(math.sqrt(54 / 91), rel=1e-15)
    assert metrics.sorted_l2(got, want) == 0
    assert metrics.sorted_l2(got, want, 0) == 0
    assert metrics.sorted_l2(got, want, 1) == metrics.relative_l2(got, want)
    assert metrics.sorted_l2(want[:, ::-1], want, 1) == 0
    # One value that was not there: 1 became 2, and sorted 1 2 3 ... is 2 2 3 ...
    got[1, 0] = 2
    assert metrics.sorted_l2(got, want) == pytest.approx(1 / math.sqrt(91), rel=1e-15)
    got[1, 0] = NAN
    assert math.isnan(metrics.sorted_l2(got, want))


def test_largest() -> None:
    want = np.array([[1.0, 2], [3, 4]])
    got = np.array([[1.25, 2], [3, 3.5]], np.float32)
    assert metrics.largest(got, want) == metrics.Largest(0.5, (1, 1), 3.5, 4.0)
    got[0, 1] = NAN
    found = metrics.largest(got, want)
    assert found.at == (0, 1)
    assert math.isnan(found.error)
    assert metrics.largest(-np.array([INF]), np.array([INF])).error == INF
    assert math.isnan(metrics.largest(np.array([INF]), np.array([INF])).error)


def test_kl_of_every_position() -> None:
    half, sure, skew = [0.5, 0.5], [1.0, 0.0], [0.25, 0.75]
    with np.errstate(divide="ignore"):
        want, got = np.log([[sure, half, half, half]]), np.log([[half, half, skew, sure]])
    found = metrics.kl(got + 3, want)  # (b t)
    assert found.shape == (1, 4)
    # ln 2; 0; ln(0.5 / sqrt(0.25 * 0.75)) = ln(4 / 3) / 2; and a token that cannot be: inf
    assert found[0, 0] == pytest.approx(math.log(2), rel=1e-15)
    assert found[0, 1] == pytest.approx(0, abs=1e-30)
    assert found[0, 2] == pytest.approx(math.log(4 / 3) / 2, rel=1e-12)
    assert found[0, 3] == INF
    assert metrics.worst_kl(got, want) == INF
    got[0, 1, 0] = NAN
    assert math.isnan(metrics.worst_kl(got, want))


def test_kl_is_a_sum_and_survives_a_gap_beyond_float64() -> None:
    """Of two tokens p = (1, e^-1000), q = (1/2, 1/2): ln 2, though e^1000 is no number.

    A vocabulary 1000 times as large, of tokens at -Inf on both sides, changes nothing.
    """
    want, got = np.array([0.0, -1000]), np.zeros(2)
    assert metrics.worst_kl(got, want) == pytest.approx(math.log(2), rel=1e-15)
    spare = np.full(2000, -INF)
    more = metrics.worst_kl(np.append(got, spare), np.append(want, spare))
    assert more == pytest.approx(math.log(2), rel=1e-15)


def test_flips_and_their_margin() -> None:
    want = np.array([[[2.0, 2.0 - 2**-20, 0], [1, 5, 2], [3, 1, 2], [0, 1, 9]]])
    got = np.array([[[1.9, 2.0, 0], [1, 5, 4], [2, 1, 3], [7, 1, 0]]], np.float32)
    assert metrics.flips(got, want) == metrics.Flips(3, 4, 9.0, (0, 3))
    assert metrics.flips(got[:, :1], want[:, :1]) == metrics.Flips(1, 1, 2**-20, (0, 0))
    assert metrics.flips(got[:, :3], want[:, :3]) == metrics.Flips(2, 3, 1.0, (0, 2))
    assert metrics.flips(want, want) == metrics.Flips(0, 4, 0.0, None)
    broken = want.copy()
    broken[0, 1, 1] = NAN  # where the top token is: NumPy's argmax is still the same
    found = metrics.flips(broken, want)
    assert (found.count, found.at) == (1, (0, 1))
    assert math.isnan(found.margin)
