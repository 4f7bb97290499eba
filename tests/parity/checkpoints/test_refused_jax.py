"""jaxtwin's own JAX folders that are refused: odd headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxtwin.configs import BadInput
from jaxtwin.configs.spec import to_json
from jaxtwin.jaxmodel import checkpoint
from jaxtwin.tests.helpers.folders import (
    spec_of,
)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layout", ["scan"], "a layout of"),
        ("layout", {}, "a layout of"),
        ("format", True, "format True is not known"),
        ("format", 1.0, r"format 1\.0 is not known"),
    ],
)
def test_an_odd_header_of_ours_is_refused(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    data = {"format": 1, "spec": to_json(spec_of()), "layout": "scan", key: value}
    (tmp_path / "jaxtwin.json").write_text(json.dumps(data))
    with pytest.raises(BadInput, match=message):
        checkpoint.header(tmp_path)


def test_a_header_of_ours_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jaxtwin.json").write_text("[" * 100_000)
    with pytest.raises(BadInput, match=r"jaxtwin\.json cannot be read: "):
        checkpoint.header(tmp_path)
