"""Probes, and the diagnosis made with them: where two sides part, and what mistake it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtwin.configs import Model
from jaxtwin.configs.spec import Run
from jaxtwin.jaxmodel.attention import Attention
from jaxtwin.jaxmodel.model import Embedding
from jaxtwin.parity.compare import curves
from jaxtwin.parity.diagnose.search import diagnose
from jaxtwin.parity.selftest import kill_table
from jaxtwin.parity.selftest.faults import FAULTS
from jaxtwin.parity.selftest.faults.making import calling
from jaxtwin.parity.selftest.kill_table import TOKENS, judge
from jaxtwin.parity.selftest.tiny_models import shapes, weights
from jaxtwin.parity.sides.inputs import blind, check_inputs
from jaxtwin.parity.sides.runs import (
    InjectedFault,
    Reference,
    decoder,
    faulty_decoder,
    faulty_model,
)
from jaxtwin.parity.table.tensors import Tensor

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


# ---- the diagnosis ------------------------------------------------------------------------------


# Some of them here; all of them, in every model, in the kill table's slow test.
@pytest.mark.parametrize("name", list(FAULTS)[::16])
def test_a_fault_is_caught_and_called_by_its_name(name: str) -> None:
    tried = (kill_table.fault(name, shape, spec) for shape, spec in shapes().items())
    found = next(outcome for outcome in tried if outcome is not None)
    assert (found.caught, found.cause) == (True, FAULTS[name].cause)


@pytest.mark.parametrize("seed", range(1))  # two hundred in the kill table
def test_an_equal_model_gives_no_alarm(seed: int) -> None:
    assert kill_table.control(seed) == ""


@pytest.mark.parametrize("seed", range(2))
def test_two_faults_in_two_layers_are_both_found(seed: int) -> None:
    found = kill_table.pair(seed)
    assert found["named"], found


@pytest.mark.slow
def test_one_wrong_element_in_layer_17_is_located() -> None:
    deep = replace(SPEC, runs=(Run(blocks=SPEC.runs[0].blocks, repeats=20),))
    name = "layers.17.ffn.down.weight"

    def change(tensors: Any, given: Any) -> Any:
        model: Any = faulty_model(deep, tensors, None)
        down = model.stack.layers[17].ffn.down
        down.set_value(down[...].at[5, 3].add(1e-6))
        return decoder(model, "unroll", given, jit=False)

    found = judge(deep, 3, change)
    assert [d.what for d in found.preflight] == [f"weight: {name}"]
    assert "1 of 384 elements differ, most at [3, 5]" in found.preflight[0].about
    (divergence,) = found.divergences
    assert (divergence.part, divergence.layers) == ("ffn.down.weight", (17,))
    assert divergence.cause is not None
    assert divergence.cause.proven
    over = [p for p in found.points if p.direction == "forward" and not p.ok]
    assert [p.probe for p in over] == ["layers.17.ffn"]  # alone, no other part is off
    worst = [max(row) for row in found.heat]
    assert max(worst[:17]) < 1e-13 < 1e-9 < min(worst[17:])


def changed(change: Any, dtype: str = "float64") -> Any:
    """The diagnosis of a JAX side whose weights were changed in place, stored in that dtype."""
    tensors = {n: Tensor.of(t.read().astype(dtype)) for n, t in weights(SPEC, 3).items()}
    given = check_inputs(SPEC, TOKENS, 3)
    theirs = {n: Tensor.of(t.read().copy()) for n, t in tensors.items()}
    change(theirs)
    return diagnose(Reference(SPEC, tensors, given), faulty_decoder(SPEC, theirs, given, None))


def test_a_nan_is_where_it_is_and_what_hands_it_on_is_not_at_fault() -> None:
    def change(tensors: Any) -> None:
        tensors["layers.1.ffn.up.weight"].read()[3, 4] = np.nan

    found = changed(change)
    assert "1 of 384 elements differ, most at [3, 4]: expected -" in found.preflight[0].about
    (divergence,) = found.divergences
    assert (divergence.part, divergence.layers, divergence.direction) == (
        "ffn.up.weight",
        (1,),
        "preflight",
    )
    assert (divergence.cause.name, divergence.cause.proven, divergence.cause.explains) == (
        "one-element",
        True,
        1.0,
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_scaled_weight_is_named_in_the_dtype_it_is_stored_in(dtype: str) -> None:
    """1.5 times a float32, rounded to float32, is 1.5 times to 1e-7 and not to 1e-16."""

    def change(tensors: Any) -> None:
        x = tensors["layers.1.attn.q.weight"].read()
        x[:] = (1.3 * x.astype("f8")).astype(x.dtype)

    found = changed(change, dtype)
    (divergence,) = found.divergences
    assert (divergence.cause.name, divergence.cause.proven) == ("scaled-weight", True)
    assert "layers.1.attn.q.weight that is multiplied by 1." in divergence.cause.about
    assert f"16 x 16 {dtype} sha256" in found.preflight[0].torch


def test_weights_that_differ_in_no_known_way_are_a_cause() -> None:
    def change(tensors: Any) -> None:
        x = tensors["layers.1.attn.q.weight"].read()
        x += np.random.default_rng(0).normal(size=x.shape)

    (divergence,) = changed(change).divergences
    assert (divergence.part, divergence.layers) == ("attn.q.weight", (1,))
    assert (divergence.cause.name, divergence.cause.proven, divergence.cause.explains) == (
        "weights",
        True,
        1.0,
    )
    assert divergence.cause.about.startswith(
        "has a layers.1.attn.q.weight that differs: 256 of 256"
    )


def test_another_eps_is_told_for_each_part_that_has_it() -> None:
    norm = replace(SPEC.norm, eps=1e-2)
    block = replace(SPEC.layers[0], pre_attn=norm, pre_ffn=norm)
    other = replace(SPEC, runs=(replace(SPEC.runs[0], blocks=(block,)),), norm=norm)
    found = judge(SPEC, 3, lambda t, g: faulty_decoder(other, t, g, None))
    assert [(s.part, s.layers) for s in found.divergences] == [
        ("pre_attn", (0, 1, 2)),
        ("pre_ffn", (0, 1, 2)),
        ("norm", ()),
    ]
    assert {s.cause.name for s in found.divergences} == {"norm-eps"}
    assert all(s.cause.proven for s in found.divergences)


def test_the_same_nan_on_both_sides_agrees() -> None:
    x = np.array([1.0, np.nan, np.inf, 4.0])
    assert curves.error(x, x) == 0
    assert curves.error(np.array([1.0, np.nan, np.inf, 5.0]), x) == pytest.approx(1 / 17**0.5)
    assert np.isnan(curves.error(np.array([np.nan, np.nan, np.inf, 4.0]), x))
    assert not curves.error(np.array([1.0, np.nan, -np.inf, 4.0]), x) <= 1
    assert not curves.error(np.array([1.0, 2.0, np.inf, 4.0]), x) <= 1


def strange(attend: Any, self: Any, x: Any, seen: Any, kv: Any) -> Any:
    out, kv = attend(x, seen, kv)
    return out + 1e-3 * jnp.sin(out), kv


def test_a_mistake_nobody_knows_is_located_and_not_named() -> None:
    wrong = InjectedFault(edit=calling(Attention, strange))
    found = judge(SPEC, 3, lambda t, g: faulty_decoder(SPEC, t, g, wrong))
    assert found.divergences[0].part == "attn"
    assert found.divergences[0].direction == "forward"
    assert all(s.cause is None for s in found.divergences)
    assert found.left == found.error > 1e6


def test_a_known_and_an_unknown_mistake_are_told_apart() -> None:
    """The known one explains a part of the error, and says that it is not all."""

    def both(model: Any) -> None:
        calling(Attention, strange)(model)
        FAULTS["activation-relu"].edit(model)

    found = judge(SPEC, 3, lambda t, g: faulty_decoder(SPEC, t, g, InjectedFault(edit=both)))
    causes = {s.part: s.cause for s in found.divergences if s.direction == "forward"}
    assert set(causes) == {"attn", "ffn"}
    assert causes["attn"] is None
    assert causes["ffn"] is not None
    assert causes["ffn"].name == "activation"
    assert not causes["ffn"].proven
    assert 0 < causes["ffn"].explains < 1


def test_a_fitted_value_is_exact() -> None:
    wrong = InjectedFault(edit=calling(Embedding, lambda e, self, ids: 3.1 * e(ids)))
    found = judge(SPEC, 3, lambda t, g: faulty_decoder(SPEC, t, g, wrong))
    (divergence,) = found.divergences
    assert divergence.cause is not None
    assert divergence.cause.about == "multiplies what the part returns by 3.1"
    assert divergence.cause.proven
    assert divergence.cause.explains == 1


def test_other_shapes_are_said_and_not_run(sides: tuple[Reference, Any]) -> None:
    reference, _ = sides
    block = SPEC.runs[0].blocks[0]
    other = replace(SPEC, runs=(Run(blocks=(block,), repeats=2),))
    from jaxtwin.parity.check import decoder_check as judging

    report = judging.check(
        SPEC, reference.tensors, tokens=TOKENS, against=(other, weights(other, 3))
    )
    assert not report.equal
    assert [d.what for d in report.preflight] == ["spec: runs.0.repeats"]


# ---- what the input can see ---------------------------------------------------------------------


def test_what_an_input_cannot_show_is_said() -> None:
    long: Model = replace(SPEC, max_len=1000)
    said = "\n".join(blind(long, check_inputs(long, 32)))
    assert "positions from 32 to 999" in said
    assert "slow rotary pairs" in said
    assert "rows of the embedding" in said
    short = replace(SPEC, max_len=32, vocab=8)
    said = "\n".join(blind(short, check_inputs(short, 32)))
    assert "positions from" not in said
    assert "embedding" not in said
