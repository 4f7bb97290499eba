"""All numbers of one tensor, and what is read from them: on arrays made wrong in a known way."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import ml_dtypes
import numpy as np
import pytest

from jaxtwin.configs import LEGEND
from jaxtwin.parity.report import details, metrics
from jaxtwin.parity.report.details import detail, reading
from jaxtwin.parity.report.results import plain
from jaxtwin.tests.helpers.reports import normal

NAN, INF = math.nan, math.inf
BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (2, 5, 4, 6)


def read(got: np.ndarray, want: np.ndarray, axes: str = "b t n h", dtype: str = "float64") -> str:
    return reading(detail("value", "layers.3.attn.q", got, want, axes, dtype))


def test_a_detail_holds_every_number() -> None:
    want = np.array([[1.0, 2.0], [2.0, 4.0]])
    got = np.array([[1.0, 2.0], [2.0, 4.5]])
    found = detail("gradient", "layers.0.ffn.up.weight", got, want, "f d", "float32")
    assert found.name == "grad layers.0.ffn.up.weight"
    assert plain(asdict(found)) == {
        "kind": "gradient",
        "place": "layers.0.ffn.up.weight",
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
        "local": False,
    }


def test_a_detail_of_logits_and_one_in_json() -> None:
    want = np.zeros((1, 3, 2))
    want[..., 0] = 5
    got = want.copy()
    got[0, 1] = [5, 6]
    got[0, 2, 0] = 700
    found = detail("logits", "", got, want, "b t v", "float64").logits
    assert found is not None
    assert (found.flips, found.positions, found.margin) == (1, 3, 5)
    assert found.margin_at == {"b": 0, "t": 1}
    # q over p is e^-695 there for the token of p = 1 / (1 + e^5).
    p = 1 / (1 + math.exp(5))
    assert found.kl == pytest.approx(p * (math.log(p) + 700) + (1 - p) * math.log(1 - p), rel=1e-12)
    assert found.kl_at == {"b": 0, "t": 2}
    assert detail("logits", "", got, got, "b t v", "float64").logits == details.Logits(
        0.0, {"b": 0, "t": 0}, 0, 3, 0.0, None
    )
    got[0, 0, 0] = INF
    text = json.dumps(
        plain(asdict(detail("logits", "", got, want, "b t v", "float64"))), allow_nan=False
    )
    assert json.loads(text)["largest"]["error"] == "inf"


def test_a_number_alone() -> None:
    found = detail("value", "scale", np.array(1.5), np.array(1.0), "", "float32")
    assert (found.relative_l2, found.ulp.max, found.ulp.at) == (0.5, 2**22, {})
    assert found.worst == {}


def test_what_a_detail_refuses() -> None:
    x = normal(2, 3)
    for got, want, axes, what in (
        (x, x.T, "t d", "shapes differ"),
        (x, x, "t", "does not name"),
        (x, x, "t t", "does not name"),
        (x, x, "t (n h)", "does not name"),
        (x[:0], x[:0], "t d", "no elements"),
    ):
        with pytest.raises(ValueError, match=f"attn: .*{what}"):
            detail("value", "attn", got, want, axes, "float64")


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
    # So many values that, sorted, any two such tensors are less than bfloat16's rounding apart.
    one, two = normal(2, 400, 500)
    assert metrics.sorted_l2(one, two) < 0.01
    assert read(one, two, "t d", "bfloat16") == ""


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
    square = np.array([[1.0, 2], [2, 1]])
    assert read(square[::-1], square, "t d") == said  # along t or along d: nobody can tell
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
    # 1.02 is near what bfloat16 rounds off: not clearly a scale.
    rounded = metrics.rounded(want * 1.02, BF16)
    assert read(rounded, want, dtype="bfloat16").startswith("the errors lean away")


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
    found = detail("value", "q", channel, want, "b t n h", "float64")
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
    assert read(want + 1e-13, want).startswith("the errors lean up")  # in float64 that is rounding
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
