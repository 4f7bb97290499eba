"""Ports of somebody's decoder, in three ways of JAX: right ones hold, wrong ones are named."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest

import jaxtwin
from jaxtwin.parity.report.results import Report
from jaxtwin.tests.helpers import ports
from jaxtwin.tests.helpers.levels import slow

LEAST = ("kv heads tiled", "base", "w1 and w3", "residual")  # one of each kind of finding


@functools.cache
def theirs() -> Any:
    return ports.torch_side()


def compared(kind: str, wrong: str, **how: Any) -> Report:
    module, inputs = theirs()
    port = ports.port(kind, module, wrong)
    how = {"probes": port.probes, "dtypes": ["float64"], "jit": False, **how}
    return jaxtwin.compare(module, port.side, port.table, inputs, params=port.params, **how)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ports.KINDS)
def test_a_right_port_is_equal(kind: str) -> None:
    """A complex buffer, norms in float32, a dict, nnx.Embed, names that torchref has too."""
    report = compared(kind, "", dtypes=["float64", "float32"])
    assert report.equal, str(report)
    assert {c.name for c in report.checks if c.kind == "output"} == {"output", "output hidden"}


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("nnx", wrong) if kind == "nnx" and wrong in LEAST else slow(kind, wrong)
        for kind in ports.KINDS
        for wrong in ports.MISTAKES
    ],
)
def test_a_mistake_is_found_named_and_proven(kind: str, wrong: str) -> None:
    report = compared(kind, wrong)
    assert not report.equal
    assert {d.cause.name for d in report.divergences if d.cause} == {ports.MISTAKES[wrong]}
    assert all(d.cause is not None and d.cause.proven for d in report.divergences)
    assert report.notes[1:] == []  # the first is on training mode: no hypothesis was dropped


def test_the_ports_have_six_lines_of_probes() -> None:
    source = "".join(
        inspect.getsource(f) for f in (ports.model, ports.layer, ports.attention, ports.ffn)
    )
    assert source.count("probe(") == 6


def test_without_probes_the_output_is_where_they_part() -> None:
    report = compared("nnx", "embedding scale", probes=[])
    first = report.divergences[0]
    assert (first.place, first.direction) == ("output", "forward")
    assert not [d for d in report.divergences if d.direction in ("backward", "parameter")]
