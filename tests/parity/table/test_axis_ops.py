"""The one operation of every conversion, against einops."""

from __future__ import annotations

import itertools
import math

import einops
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtwin.parity.table import axis_ops

LETTERS = "abcde"


@st.composite
def patterns(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """Any split, permutation and merge of up to five axes."""
    letters = LETTERS[: draw(st.integers(1, 5))]

    def side(order: list[str]) -> str:
        cuts = [draw(st.booleans()) for _ in order[1:]]
        groups = [[order[0]]]
        for letter, cut in zip(order[1:], cuts, strict=True):
            groups.append([letter]) if cut else groups[-1].append(letter)
        return " ".join("(" + " ".join(g) + ")" if len(g) > 1 else g[0] for g in groups)

    left, right = (side(draw(st.permutations(letters))) for _ in range(2))
    return f"{left} -> {right}", {a: draw(st.integers(1, 3)) for a in letters}


@given(patterns())
def test_rearranging_is_what_einops_does_and_comes_back(case: tuple[str, dict[str, int]]) -> None:
    pattern, sizes = case
    x = np.arange(math.prod(sizes.values())).reshape(
        axis_ops.shape(axis_ops.sides(pattern)[0], sizes)
    )
    src = axis_ops.rearrange(x, pattern, sizes)
    np.testing.assert_array_equal(src, einops.rearrange(x, pattern, **sizes))
    assert src.shape == axis_ops.shape(axis_ops.sides(pattern)[1], sizes)
    np.testing.assert_array_equal(axis_ops.rearrange(src, axis_ops.flip(pattern), sizes), x)


def test_a_shape_that_is_not_the_left_side_is_refused() -> None:
    """Also where the number of elements would do: (3, 2) is not (2, 3)."""
    for shape in itertools.permutations((2, 3, 4)):
        x = np.zeros(shape)
        if shape == (2, 3, 4):
            assert axis_ops.rearrange(x, "a b c -> c (a b)", {"a": 2, "b": 3, "c": 4}).shape == (
                4,
                6,
            )
        else:
            with pytest.raises(ValueError, match="is not a b c of"):
                axis_ops.rearrange(x, "a b c -> c (a b)", {"a": 2, "b": 3, "c": 4})
