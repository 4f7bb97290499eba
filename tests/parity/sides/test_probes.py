"""Probes on both sides: seen, replaced, and the same values under the same names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxtwin.jaxmodel.probe import Slot, probe, probing
from jaxtwin.parity.compare import curves
from jaxtwin.parity.compare.tolerances import BANDS
from jaxtwin.parity.diagnose import torch_cache
from jaxtwin.parity.selftest.kill_table import TOKENS
from jaxtwin.parity.selftest.tiny_models import shapes, weights
from jaxtwin.parity.sides import probes
from jaxtwin.parity.sides.inputs import check_inputs
from jaxtwin.parity.sides.outcome import Trace
from jaxtwin.parity.sides.probes import Place, mean_of
from jaxtwin.parity.sides.runs import (
    Reference,
    decoder,
    faulty_decoder,
    faulty_model,
)

SPEC = shapes()["pre-norm"]

pytestmark = pytest.mark.usefixtures("wide")


@pytest.fixture(scope="module")
def wide() -> Iterator[None]:
    """64 bits for the whole file, whose operations are compiled once."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def sides() -> tuple[Reference, Any]:
    tensors, given = weights(SPEC, 3), check_inputs(SPEC, TOKENS, 3)
    return Reference(SPEC, tensors, given), faulty_decoder(SPEC, tensors, given, None)


@pytest.mark.slow
def test_a_half_at_a_time_is_the_whole(sides: tuple[Reference, Any]) -> None:
    """What saves memory in a large model changes no error, and each half has only its own."""
    reference, subject = sides
    truth = reference.run()
    assert curves.local_errors(subject.run, truth) == curves.measure(subject.run(truth), truth)
    forward, backward = (subject.run(truth, half) for half in ("forward", "backward"))
    assert (forward.grads, forward.cotangents, backward.values) == ({}, {}, {})
    assert forward.values.keys() == truth.values.keys() == backward.cotangents.keys()


def test_a_probe_leaves_no_trace_until_somebody_looks() -> None:
    def f(x: Any) -> Any:
        return probe(2 * x, "a") + 1

    one = jnp.ones(())
    off = str(jax.make_jaxpr(f)(one))
    assert off == str(jax.make_jaxpr(lambda x: 2 * x + 1)(one))
    with probing({"a": Slot(jnp.zeros(()))}):
        assert str(jax.make_jaxpr(lambda x: f(x))(one)) != off  # a new function: traces are kept


def test_a_probe_shows_and_replaces_value_and_cotangent() -> None:
    def loss(x: Any, seed: Any, *put: Any) -> Any:
        with probing({"a": Slot(seed, *put)}) as context:
            y = 5 * probe(3 * x, "a")
        return y, context.values["a"]

    at = (jnp.asarray(2.0), jnp.asarray(0.0))
    (y, seen), (dx, arrived) = jax.value_and_grad(loss, (0, 1), has_aux=True)(*at)
    assert (y, seen, dx, arrived) == (30, 6, 15, 5)
    (y, seen), (dx, arrived) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        *at, jnp.asarray(7.0), jnp.asarray(11.0)
    )
    assert (y, seen, dx, arrived) == (35, 6, 33, 5)


def test_a_hook_shows_and_replaces_the_same_in_torch() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
    for layer, value in zip(model, (3.0, 5.0), strict=True):
        torch.nn.init.constant_(layer.weight, value)
    x, one = torch.tensor([[2.0]]), np.ones((1, 1), np.float32)
    patched = Trace(one, one, {}, {"0": 7 * one}, {"0": 11 * one})
    for put, output, grads in ((None, 30, (10, 6)), (patched, 35, (22, 7))):
        got = probes.run_torch(
            model, {"0": Place("0")}, lambda: model(x), mean_of(lambda y: y), put
        )
        assert (got.logits, got.values["0"], got.cotangents["0"]) == (output, 6, 5)
        assert (got.grads["0.weight"], got.grads["1.weight"]) == grads


def test_two_probes_of_one_name_are_refused() -> None:
    with probing({}), pytest.raises(ValueError, match="two probes are called 'a'"):
        probe(probe(jnp.zeros(()), "a"), "a")


def test_hooks_change_nothing_in_torch(sides: tuple[Reference, Any]) -> None:
    reference, _ = sides
    truth = reference.run()
    given = reference.inputs
    ids, at, segments = map(torch.from_numpy, (given.ids, given.positions, given.segments))
    plain = reference.model(ids, positions=at, segments=segments).detach().numpy()
    assert np.array_equal(plain, truth.logits)
    again = reference.run(truth)  # its own values in their places: the same bits everywhere
    for direction in BANDS:
        assert set(curves.errors(again, truth, direction).values()) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["scan", "unroll"])
def test_every_probe_is_on_both_sides_and_agrees(layout: str, sides: tuple[Reference, Any]) -> None:
    reference, _ = sides
    truth = reference.run()
    model = faulty_model(SPEC, reference.tensors, None, layout)
    for jit in (False, True):
        run = decoder(model, layout, reference.inputs, jit=jit).run
        for trace in (run(None), run(truth)):
            assert list(truth.values) == list(reference.places)
            for direction, band in BANDS.items():
                assert max(curves.errors(trace, truth, direction).values()) <= band
    given = reference.inputs
    plain = model(given.ids, positions=given.positions, segments=given.segments)
    assert np.array_equal(np.asarray(plain), run_eager(model, layout, given))


def run_eager(model: Any, layout: str, given: Any) -> np.ndarray:
    return decoder(model, layout, given, jit=False).run(None).logits


def test_rows_of_the_probes_name_each_once() -> None:
    for layout in ("scan", "unroll"):
        names = [n for row in probes.rows(SPEC, layout, (2, 8)) for m in row.moves() for n in m.src]
        assert sorted(names) == sorted(probes.places(SPEC))


def test_the_plain_cache_decodes_what_the_whole_pass_gives(sides: tuple[Reference, Any]) -> None:
    reference, _ = sides
    ids = reference.inputs.ids[:1]
    whole = reference.model(torch.from_numpy(ids)).detach().numpy()[:, -1]
    assert curves.error(torch_cache.decode(reference.model, ids, 7), whole) <= 1e-14
    for explanation in torch_cache.CACHE_HYPOTHESES.values():
        assert curves.error(torch_cache.decode(reference.model, ids, 7, explanation), whole) > 1e-3
