"""The check is itself checked: mistakes must make it fail."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from jaxtwin.configs import Model
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.report.results import Report
from jaxtwin.parity.selftest.faults import FAULTS
from jaxtwin.parity.selftest.tiny_models import shapes
from jaxtwin.parity.table import bridge
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.tests.helpers.kit import torch_model

TOKENS = 48

SPEC = shapes()["pre-norm"]


@pytest.fixture(scope="module")
def weights() -> Mapping[str, Tensor]:
    return bridge.from_state(torch_model(SPEC, seed=3).state_dict())


def check(spec: Model, weights: Mapping[str, Tensor], name: str | None = None) -> Report:
    wrong = FAULTS[name] if name else None
    return decoder_check.check(
        spec, weights, dtypes=("float64",), tokens=TOKENS, injected=wrong, diagnose=False
    )


def failed(report: Report) -> list[str]:
    return [c.name for c in report.checks if not c.ok]


@pytest.fixture(scope="module")
def clean(weights: Mapping[str, Tensor]) -> Report:
    return check(SPEC, weights)


@pytest.mark.slow
def test_no_fault_no_alarm(clean: Report) -> None:
    assert clean.equal, failed(clean)


def test_there_are_sixty_kinds_or_more() -> None:
    assert len(FAULTS) >= 60


# Every fault is caught and named in test_search.py; these few by the whole check, jitted.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["k-v-swapped", "tile-not-repeat"])
def test_fault_is_caught(name: str, weights: Mapping[str, Tensor], clean: Report) -> None:
    report = check(SPEC, weights, name)
    assert not report.equal
    # The same comparisons were made: a fault must not get by (or get caught) by removing some.
    assert [c.name for c in report.checks] == [c.name for c in clean.checks]


# Faults that logits cannot show: what is the one thing that sees them?
ONLY = {
    "head-untied": {"grad embed.weight"},
    "cache-offset": {"logits, decoded from the cache"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONLY)
def test_silent_fault_is_seen_where_it_is(name: str, weights: Mapping[str, Tensor]) -> None:
    assert set(failed(check(SPEC, weights, name))) == ONLY[name]


@pytest.mark.slow
def test_stopped_gradient_leaves_the_logits_alone(weights: Mapping[str, Tensor]) -> None:
    bad = failed(check(SPEC, weights, "gradient-stopped"))
    assert bad
    assert all(name.startswith("grad ") for name in bad)
    assert "grad layers.0.attn.q.weight" in bad
