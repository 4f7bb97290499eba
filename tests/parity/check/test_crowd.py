"""No false alarm: right models of all families, in every dtype (`tests/helpers/crowd.py`)."""

from __future__ import annotations

import pytest

from jaxtwin.tests.helpers import crowd
from jaxtwin.tests.helpers.levels import full, slow

EVERY = 200
QUICK, SAMPLE = (5,), (0, 1, 2, 15, 46, 77, 110)  # of each kind; biases, two norms, tied heads


def level(number: int) -> object:
    if number in QUICK:
        return number
    return slow(number) if number in SAMPLE else full(number)


@pytest.mark.parametrize("number", [level(n) for n in range(EVERY)])
def test_a_right_model_is_called_equal(number: int) -> None:
    one, report = crowd.checked(number)
    assert report.equal, crowd.told(one, report)


def test_the_crowd_has_every_family_in_both_ways() -> None:
    """Names alone: the models are not made."""
    numbers = {0: set(), 2: set()}
    for n in range(EVERY):
        if n % 3 != 1:
            numbers[n % 3].add(sorted(crowd.PRESETS)[n // 3 % len(crowd.PRESETS)])
    assert numbers[0] == numbers[2] == set(crowd.PRESETS)
