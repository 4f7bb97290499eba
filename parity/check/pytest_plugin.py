"""The pytest plugin: it is loaded in every run, so it imports no framework until a test asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from jaxtwin import assert_parity

if TYPE_CHECKING:
    from jaxtwin.parity.report.results import Report

__all__ = ["assert_parity", "parity_check"]


@pytest.fixture
def parity_check() -> Callable[..., Report]:
    """`parity_check("./my-llama", tokens=64)` fails the test where the two are not equal."""
    return assert_parity
