"""The metrics and the details, on arrays whose numbers are worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import ml_dtypes
import numpy as np
import pytest

from configs import LEGEND
from parity import details, metrics
from parity.details import detail, reading
from parity.findings import plain

NAN, INF = math.nan, math.inf
BF16 = np.dtype(ml_dtypes.bfloat16)
F32, F64, F16 = (np.dtype(t) for t in (np.float32, np.float64, np.float16))
KINDS = [(F64, 52), (F32, 23), (F16, 10), (BF16, 7)]  # with the bits behind the point


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


# ---- metrics ------------------------------------------------------------------------------------


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
    assert metrics.worst_slice(got, want, 1) == (1, pytest.approx(middle, rel=1e-15))
    assert metrics.worst_slice(got, want, -1)[0] == 3
    assert metrics.relative_l2_along(got, want, 0).shape == (2,)
    one = np.array([1.0, 2.0, 4.0])
    assert metrics.relative_l2_along(one * [1, 1, 1.5], one, 0).tolist() == [0, 0, 0.5]


def test_relative_l2_along_keeps_zero_inf_and_nan_apart() -> None:
    want = np.array([[0.0, 0], [0, 0], [1, 1], [1e-200, 0]])
    got = np.array([[0.0, 0], [1e-200, 0], [1, NAN], [2e-200, 0]])
    slices = metrics.relative_l2_along(got, want, 0)
    assert slices[[0, 1, 3]].tolist() == [0, INF, 1]
    assert math.isnan(slices[2])
    index, error = metrics.worst_slice(got, want, 0)
    assert index == 2
    assert math.isnan(error)


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
    got = np.array([[[1.9, 2.0, 0], [1, 5, 4], [2, 1, 3], [9, 1, 0]]], np.float32)
    assert metrics.flips(got, want) == metrics.Flips(3, 4, 9.0, (0, 3))
    assert metrics.flips(got[:, :1], want[:, :1]) == metrics.Flips(1, 1, 2**-20, (0, 0))
    assert metrics.flips(got[:, :3], want[:, :3]) == metrics.Flips(2, 3, 1.0, (0, 2))
    assert metrics.flips(want, want) == metrics.Flips(0, 4, 0.0, None)
    broken = want.copy()
    broken[0, 1, 1] = NAN  # where the top token is: NumPy's argmax is still the same
    found = metrics.flips(broken, want)
    assert (found.count, found.at) == (1, (0, 1))
    assert math.isnan(found.margin)


# ---- details ------------------------------------------------------------------------------------

SHAPE = (2, 5, 4, 6)


def read(got: np.ndarray, want: np.ndarray, axes: str = "b t n h", dtype: str = "float64") -> str:
    return reading(detail("layers.3.attn.q", got, want, axes, dtype))


def test_a_detail_holds_every_number() -> None:
    want = np.array([[1.0, 2.0], [2.0, 4.0]])
    got = np.array([[1.0, 2.0], [2.0, 4.5]])
    found = detail("layers.0.ffn.up.weight", got, want, "f d", "float32")
    assert plain(asdict(found)) == {
        "name": "layers.0.ffn.up.weight",
        "axes": "f d",
        "shape": [2, 2],
        "dtype": "float32",
        "relative_l2": 0.1,
        "worst": {
            "f": {"index": 1, "relative_l2": pytest.approx(0.5 / math.sqrt(20)), "others": 0.0},
            "d": {"index": 1, "relative_l2": pytest.approx(0.5 / math.sqrt(20)), "others": 0.0},
        },
        "scale": pytest.approx(27 / 25),
        # got - 1.08 want = (-0.08, -0.16, -0.16, 0.18)
        "residual": pytest.approx(math.sqrt(0.09) / (1.08 * 5)),
        "ulp": {"max": 0.5 * 2**21, "at": {"f": 1, "d": 1}},
        "bias": {"signed": 1.0, "outward": 1.0},
        "nonfinite": {"got": 0, "want": 0, "unlike": 0, "alike": 0, "at": None},
        "sorted_l2": 0.1,
        "reordered": [],
        "largest": {"error": 0.5, "at": {"f": 1, "d": 1}, "got": 4.5, "want": 4.0},
        "logits": None,
    }


def test_a_detail_of_logits_and_one_in_json() -> None:
    want = np.zeros((1, 3, 2))
    want[..., 0] = 5
    got = want.copy()
    got[0, 1] = [5, 6]
    got[0, 2, 0] = 700
    found = detail("head", got, want, "b t v", "float64").logits
    assert found is not None
    assert (found.flips, found.positions, found.margin) == (1, 3, 5)
    assert found.margin_at == {"b": 0, "t": 1}
    # q over p is e^-695 there for the token of p = 1 / (1 + e^5).
    p = 1 / (1 + math.exp(5))
    assert found.kl == pytest.approx(p * (math.log(p) + 700) + (1 - p) * math.log(1 - p), rel=1e-12)
    assert found.kl_at == {"b": 0, "t": 2}
    assert detail("head", got, got, "b t v", "float64").logits == details.Logits(
        0.0, {"b": 0, "t": 0}, 0, 3, 0.0, None
    )
    got[0, 0, 0] = INF
    text = json.dumps(plain(asdict(detail("head", got, want, "b t v", "float64"))), allow_nan=False)
    assert json.loads(text)["largest"]["error"] == "inf"


def test_a_number_alone() -> None:
    found = detail("scale", np.array(1.5), np.array(1.0), "", "float32")
    assert (found.relative_l2, found.ulp.max, found.ulp.at) == (0.5, 2**22, {})
    assert found.worst == {}


def test_what_a_detail_refuses() -> None:
    x = normal(2, 3)
    for got, want, axes, what in (
        (x, x.T, "t d", "shapes differ"),
        (x, x, "t", "does not name"),
        (x, x, "t t", "does not name"),
        (x, x, "t z", "does not name"),
        (x, x, "t (n h)", "does not name"),
        (x[:0], x[:0], "t d", "no elements"),
    ):
        with pytest.raises(ValueError, match=f"attn: .*{what}"):
            detail("attn", got, want, axes, "float64")


def test_every_letter_has_a_word() -> None:
    assert details.WORDS.keys() == LEGEND.keys()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_nothing_is_read_into_rounding(dtype: str) -> None:
    want = normal(*SHAPE)
    one = want.copy()
    one[1, 2, 3, 4] += abs(one[1, 2, 3, 4]) * float(ml_dtypes.finfo(np.dtype(dtype)).eps)
    for got in (want, metrics.rounded(want, np.dtype(dtype)), one):
        assert read(got, want, dtype=dtype) == ""


def test_nothing_is_read_into_a_wrong_tensor() -> None:
    """Other values of the same distribution, and each pair of channels turned by an angle."""
    want = normal(*SHAPE)
    turned = want[..., ::-1] * 0.6 + want * 0.8
    for dtype in ("float64", "float32", "bfloat16"):
        assert read(normal(3, *SHAPE)[2], want, dtype=dtype) == ""
        assert read(turned, want, dtype=dtype) == ""
        assert read(normal(3, *SHAPE)[2], np.abs(want), dtype=dtype) == ""


def test_reading_values_in_another_order() -> None:
    want = normal(*SHAPE)
    said = "the same values in another order"
    for dtype in ("float64", "float32", "bfloat16"):
        heads = want[:, :, [2, 1, 0, 3]]
        assert read(heads, want, dtype=dtype) == said + " along n"
    assert read(want[..., ::-1], want) == said + " along h"
    assert read(want.ravel()[::-1].reshape(SHAPE), want) == said
    interleaved = want.reshape(2, 5, 6, 4).swapaxes(2, 3).reshape(SHAPE)
    assert read(interleaved, want) == said
    inside = want.copy()
    inside[:, :, 2] = inside[:, :, 2, ::-1]
    assert read(inside, want) == said + " along h, all of it in head 2"
    # With float32's own rounding on top, and then with values that are not the same.
    assert read(want[..., ::-1] * (1 + 1e-7 * normal(*SHAPE)), want, dtype="float32") == (
        said + " along h"
    )
    assert read(want[..., ::-1] * (1 + 1e-7 * normal(*SHAPE)), want) == ""


def test_reading_a_scale() -> None:
    want = normal(*SHAPE)
    assert read(want * 0.125, want) == "the values times 0.125, to 0e+00"
    assert read(-want, want) == "the values times -1, to 0e+00"
    assert read(want * 1.001, want).startswith("the values times 1.001, to ")
    rounded = metrics.rounded(want / 3, BF16)
    assert read(rounded, want, dtype="bfloat16").startswith("the values times 0.33")
    assert read(rounded, want) == ""  # in float64 that is more than rounding


def test_reading_zeros() -> None:
    want = normal(*SHAPE)
    assert read(want * 0, want) == "all zero where the reference is not"
    assert read(want, want * 0) == "not zero where the reference is all zero"
    assert read(want * 0, want * 0) == ""


def test_reading_one_slice() -> None:
    want = normal(*SHAPE)
    head, token, both, channel = (want.copy() for _ in range(4))
    head[:, :, 2] = normal(2, 5, 6)
    assert read(head, want) == "all of it in head 2"
    token[:, 4] += 1e-3 * normal(2, 4, 6)
    assert read(token, want, dtype="float32") == "all of it in token 4"
    both[1, 0, 3] = normal(6)
    assert read(both, want) == "all of it in sequence 1, token 0, head 3"
    channel[..., 5] *= 1 + 1e-3
    found = detail("q", channel, want, "b t n h", "float64")
    worst = found.worst["h"]
    assert (worst.index, worst.others) == (5, 0)
    assert worst.relative_l2 == pytest.approx(1e-3, rel=1e-9)
    assert reading(found) == "all of it in head channel 5"
    channel[..., 4] *= 1 + 1e-4
    assert read(channel, want) == ""  # in two channels
    # An axis of one index says nothing.
    assert read(head[:1], want[:1]) == "all of it in head 2"
    expert = np.stack([want[0], want[1] * 2])
    assert read(expert, want, "e d f h") == "all of it in expert 1"


def test_reading_what_is_not_finite() -> None:
    want = normal(*SHAPE)
    off = want.copy()
    off[1, 3, 2, :2] = NAN
    first = "the first at b 1, t 3, n 2, h 0"
    assert read(off, want) == f"2 not finite where the reference is, {first}"
    assert read(want, off) == f"2 finite where the reference is not, {first}"
    other = off.copy()
    other[1, 3, 2, :2] = [INF, NAN]
    assert read(other, off) == f"1 do not agree with the reference on NaN and Inf, {first}"
    assert read(off, off) == ""
    infinite = want.copy()
    infinite[0, 0, 0, 1] = -INF
    assert read(-infinite, infinite).startswith("1 do not agree")


def test_reading_bias() -> None:
    want = normal(*SHAPE)
    assert read(want + 0.1, want) == "the values plus 0.1"
    assert read(want - 3, want) == "the values minus 3"
    assert read((want - 3)[0, 0, :2, :3], want[0, 0, :2, :3], "n h") == ""  # six values: too few
    noise = 1e-3 * np.abs(normal(*SHAPE))[..., ::-1]
    # mean / rms of |x| is sqrt(2 / pi) = 0.80 for normal values, and the root of 240 is 15.5: 12.
    assert read(want + noise, want).startswith("the errors lean up (z = 1")
    assert read(want - noise, want).startswith("the errors lean down (z = -1")
    out = np.sign(want) * noise
    assert read(want + out, want).startswith("the errors lean away from zero (z = 1")
    said = read(want - out, want)
    assert said.startswith("the errors lean toward zero (z = -1")
    assert said.endswith(")")  # by far more than truncation


def test_reading_truncation() -> None:
    want = normal(*SHAPE)
    bits = np.asarray(want, np.float32).view(np.uint32) & 0xFFFF0000  # bfloat16 without rounding
    said = read(bits.view(np.float32), want, dtype="bfloat16")
    assert said.startswith("the errors lean toward zero (z = -1")
    assert said.endswith("as those of truncation do")
