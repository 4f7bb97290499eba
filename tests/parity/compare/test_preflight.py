"""What two sides hold before anything is computed: which mistake made a weight another."""

from __future__ import annotations

import numpy as np
import pytest

from jaxtwin.configs import PRESETS
from jaxtwin.parity.compare import preflight
from jaxtwin.parity.report import metrics
from jaxtwin.parity.selftest.tiny_models import shapes

SPEC = shapes()["pre-norm"]


def test_best_fit_gives_the_scale_and_what_is_left() -> None:
    want = np.array([3.0, 4.0])
    assert metrics.best_fit(2 * want, want) == (2.0, 0.0)
    scale, left = metrics.best_fit(np.array([3.0, 4.0]) + np.array([-4.0, 3.0]), want)
    assert scale == pytest.approx(1, rel=1e-15)  # what is at right angles changes no scale
    assert left == pytest.approx(1, rel=1e-15)
    assert metrics.best_fit(np.ones(2), np.zeros(2)) == (0.0, np.inf)


SLIPS = {
    "transposed": lambda x: x.T,
    "norm-plus-one": lambda x: x + 1,
    "rounded": lambda x: x.astype(np.float32).astype(x.dtype),
    "constant": np.zeros_like,
    "scaled-weight": lambda x: -0.125 * x,
    "rows-reordered": lambda x: x[::-1],
    "columns-reordered": lambda x: x[:, ::-1],
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_told_from_the_others(name: str) -> None:
    x = np.random.default_rng(0).normal(size=(6, 6))
    (found,) = preflight.weights(None, {"w": x}, {"w": SLIPS[name](x)})
    assert found[1] is not None
    assert found[1].name == name
    assert preflight.weights(None, {"w": x}, {"w": x.copy()}) == []


def test_a_weight_of_no_known_slip_has_none() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 6, 6))
    ((difference, explanation),) = preflight.weights(None, {"w": x}, {"w": y})
    assert explanation is None
    assert "36 of 36 elements differ" in difference.about


def test_layers_that_one_side_does_not_have_are_one_difference() -> None:
    """Not one for each of their fields, and none where both sides have nothing."""
    one, two = PRESETS["llama3-tiny"], PRESETS["gemma3-tiny"]
    found = preflight.spec(one, two)
    assert all(difference.torch != difference.jax for difference in found)
    lengths = [d for d in found if d.what.endswith(".length")]
    assert lengths
    assert not [d for d in found if d.what.startswith("spec: runs.1.")]
