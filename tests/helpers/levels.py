"""Which cases of a test `make test` leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def full(*values: Any) -> Any:
    """A case for `make test-all`: another of its kind stays in `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.full)


def slow(*values: Any) -> Any:
    """A case for `make test-slow`: another of its kind stays in `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)
