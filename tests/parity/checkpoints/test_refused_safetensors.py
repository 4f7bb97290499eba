"""Safetensors files that are refused: lying headers, dtypes of no weights, names that are paths."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.tests.helpers.folders import hf_folder, store, stored


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "model")


def malformed() -> dict[str, bytes]:
    """Case 47: headers that lie."""

    def file(header: Any, data: bytes = b"\0" * 16) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    def one(dtype: str, shape: list[int], at: list[int]) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": at}

    good = one("F32", [4], [0, 16])
    text = json.dumps({"x": good}).encode()
    return {
        "endless": struct.pack("<Q", 2**63) + b"{}",
        "twice": file(text[:-1] + b"," + text[1:]),
        "overlap": file({"x": one("F32", [3], [0, 12]), "y": one("F32", [2], [8, 16])}),
        "gap": file({"x": one("F32", [1], [0, 4]), "y": one("F32", [1], [12, 16])}),
        "long": file({"x": one("F32", [400], [0, 1600])}),
        "overflow": file({"x": one("F32", [2**32, 2**32], [0, 16])}),
        "dtype": file({"x": one("F33", [4], [0, 16])}),
        "truncated": file({"x": good}, b"\0" * 7),
        "empty": b"",
        "no json": file(b"not json at all"),
    }


@pytest.mark.parametrize("kind", malformed())
def test_a_header_that_lies_is_refused(folder: Path, kind: str) -> None:
    (folder / "model.safetensors").write_bytes(malformed()[kind])
    message = "gives x more than once" if kind == "twice" else "is not a sound safetensors file"
    with pytest.raises(BadInput, match=message):
        open_source(folder)


def test_a_dtype_that_holds_no_weights_is_refused(folder: Path) -> None:
    """Case 49: eight-bit floats mean nothing without their scales."""
    raw = np.zeros((23, 24), ml_dtypes.float8_e4m3fn)
    store(folder, {**stored(folder), "lm_head.weight": raw})
    with pytest.raises(BadInput, match=r"not of a supported dtype[^$]*lm_head.weight: F8_E4M3"):
        open_source(folder)


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a\\b", "model..x"])
def test_a_name_that_is_a_path_is_refused(folder: Path, name: str) -> None:
    """Case 45: the library accepts such a name."""
    store(folder, {**stored(folder), name: np.zeros(2, np.float32)})
    with pytest.raises(BadInput, match="is no name of a tensor but a path"):
        open_source(folder)
