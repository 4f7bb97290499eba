"""Float8 weights with a scale for each block: the exact product, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints import files, float8
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.tests.helpers.folders import store

FP8 = ml_dtypes.float8_e4m3fn
W = np.arange(15).reshape(5, 3).astype(FP8)
SCALES = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
WANTED = [[0, 1, 4], [3, 4, 10], [18, 21, 32], [27, 30, 44], [60, 65, 84]]


def config(**changes: Any) -> dict[str, Any]:
    """The quantization_config of DeepSeek and Qwen with keys set."""
    stated = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return {"quantization_config": {**stated, "weight_block_size": [2, 2], **changes}}


def folder(path: Path, **arrays: np.ndarray) -> dict[str, Tensor]:
    """The tensors of a Hugging Face folder with these, by names with _ for the dots."""
    path.mkdir(exist_ok=True)
    store(path, {name.replace("__", "."): x for name, x in arrays.items()})
    return files.folder_tensors(path)[0]


def test_the_product_of_each_block(tmp_path: Path) -> None:
    """Case 49: neither axis is whole blocks."""
    other = np.ones(3, ml_dtypes.bfloat16)
    opened = folder(tmp_path, x__weight=W, x__weight_scale_inv=SCALES, n__weight=other)
    notes: list[str] = []
    out = float8.dequantized(opened, config(), "here", notes)
    assert out.keys() == {"x.weight", "n.weight"}
    assert (out["x.weight"].dtype, out["x.weight"].shape) == (np.float32, (5, 3))
    assert out["x.weight"].read().tolist() == WANTED
    assert out["x.weight"].read().dtype == np.float32
    assert out["n.weight"].read().dtype == ml_dtypes.bfloat16
    assert notes == ["1 float8 tensors are given as float32: each value times its block's scale"]


def test_every_float8_value_comes_out_of_the_file(tmp_path: Path) -> None:
    """All 256 of them, NaN and minus zero too, behind other tensors in the file."""
    raw = np.arange(256, dtype=np.uint8).reshape(16, 16)
    opened = folder(tmp_path, a=np.ones(3, np.float32), b=raw.view(FP8), c=np.ones((2, 2), FP8))
    got = opened["b"].read()
    assert got.dtype == FP8
    np.testing.assert_array_equal(got.view(np.uint8), raw)
    part = opened["b"].part((slice(3, 5), slice(7, 9)))
    np.testing.assert_array_equal(part.view(np.uint8), raw[3:5, 7:9])


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.data())
def test_any_shape_and_block(r: int, c: int, b0: int, b1: int, data: st.DataObject) -> None:
    """Against one multiplication for each entry; and a part is the whole's."""
    rng = np.random.default_rng(r * c)
    w = rng.normal(size=(r, c)).astype(FP8)
    s = rng.normal(size=(-(-r // b0), -(-c // b1))).astype(np.float32)
    tensors = {"w": Tensor.of(w), "w_scale_inv": Tensor.of(s)}
    tensor = float8.dequantized(tensors, config(weight_block_size=[b0, b1]), "here", [])["w"]
    wanted = [[np.float32(w[i, j]) * s[i // b0, j // b1] for j in range(c)] for i in range(r)]
    np.testing.assert_array_equal(tensor.read(), np.array(wanted, np.float32))
    rows, columns = (sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in (r, c))
    index = (slice(*rows), slice(*columns))
    np.testing.assert_array_equal(tensor.part(index), tensor.read()[index])


def test_scales_may_be_bfloat16(tmp_path: Path) -> None:
    s = SCALES.astype(ml_dtypes.bfloat16)
    opened = {"w": Tensor.of(W), "w_scale_inv": Tensor.of(s)}
    assert float8.dequantized(opened, config(), "here", [])["w"].read().tolist() == WANTED


def test_what_is_not_float8_is_left_alone() -> None:
    opened = {"w": Tensor.of(np.ones((2, 2), np.float32))}
    notes: list[str] = []
    assert float8.dequantized(opened, {}, "here", notes) == opened
    assert notes == []


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x.weight": W}, "x.weight: float8 without a scale x.weight_scale_inv$"),
        ({"x.weight": W, "x.scale": SCALES}, r"without a scale .*; x\.scale is not known to be"),
        (
            {"x.weight": W, "x.weight_scale": SCALES},
            r"without a scale .*; x\.weight_scale is not known to be its scale",
        ),
        (
            {"x.weight": W, "x.weight_scale_inv": SCALES.T},
            r"x.weight_scale_inv: float32 \(2, 3\), expected floats \(3, 2\), one for each block "
            r"of 2 x 2 of \(5, 3\)",
        ),
        ({"x.weight": W, "x.weight_scale_inv": SCALES.astype(FP8)}, "expected floats"),
        ({"x.weight": W[0], "x.weight_scale_inv": SCALES}, r"shape \(3,\); blocks are of two axes"),
        (
            {"x.weight": W.astype(np.float32), "x.weight_scale_inv": SCALES},
            "x.weight_scale_inv: a scale, and x.weight is not float8",
        ),
    ],
)
def test_what_cannot_be_scaled_is_refused(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        float8.dequantized({k: Tensor.of(v) for k, v in tensors.items()}, config(), "here", [])
    assert str(error.value).startswith("here holds float8 tensors that cannot be scaled")


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({}, "without the quantization_config that would say how they are scaled:\n  w: F8_E4M3"),
        ({"quantization_config": "int4"}, "quantized by .int4., only fp8"),
        (config(quant_method="awq"), "quantized by 'awq', only fp8"),
        (config(fmt="e5m2"), "only fp8 .e4m3. is supported"),
        (config(weight_block_size=None), "must be two positive integers, got None"),
        (config(weight_block_size=[128]), "must be two positive integers"),
        (config(weight_block_size=[128, 0]), "must be two positive integers"),
        (config(weight_block_size=[2.0, 2]), "must be two positive integers"),
    ],
)
def test_another_way_of_scaling_is_refused(stated: dict[str, Any], message: str) -> None:
    opened = {"w": Tensor.of(W), "w_scale_inv": Tensor.of(SCALES)}
    with pytest.raises(BadInput, match=f"^here.*{message}"):
        float8.dequantized(opened, stated, "here", [])


def test_float8_is_no_dtype_of_other_folders(tmp_path: Path) -> None:
    """Of E5M2 nobody states scales."""
    with pytest.raises(BadInput, match=r"(?s)not of a supported dtype .*x: F8_E5M2"):
        folder(tmp_path, x=W.astype(ml_dtypes.float8_e5m2))


@pytest.mark.parametrize("change", ["cut", "gone"])
def test_a_file_that_changed_since_it_was_opened_is_refused(tmp_path: Path, change: str) -> None:
    """Read whole, in part, and scaled."""
    opened = folder(tmp_path, x__weight=W, x__weight_scale_inv=SCALES)
    scaled = float8.dequantized(opened, config(), "here", [])["x.weight"]
    file = tmp_path / "model.safetensors"
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-20])
    else:
        file.unlink()
    message = {"cut": "has become shorter since it was opened", "gone": "cannot be read: No such"}
    for read in (
        opened["x.weight"].read,
        lambda: opened["x.weight"].part((slice(0, 1), slice(0, 1))),
        scaled.read,
    ):
        with pytest.raises(BadInput, match=message[change]):
            read()
