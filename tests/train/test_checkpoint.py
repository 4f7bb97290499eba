"""Saving and resuming: on another mesh, nothing cast, nothing half, nothing donated away."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from jaxtwin.configs import BadInput
from jaxtwin.jaxmodel import axes
from jaxtwin.jaxmodel import checkpoint as at_rest
from jaxtwin.tests.helpers import training
from jaxtwin.train import checkpoint, step

PLACE = {"iterator": {"next_index": 5}, "same": {"batch": 8, "tokens": "abc"}}


def state_of(plan: step.Plan, seed: int = 0) -> step.State:
    """A state as after some steps: no moment is zero, no count is."""
    rng = np.random.default_rng(seed)

    def some(x: Any, sharding: Any) -> jax.Array:
        if x.dtype == np.int32:
            return jax.device_put(np.int32(rng.integers(2**24, 2**30)), sharding)
        return jax.device_put(rng.normal(size=x.shape).astype(x.dtype), sharding)

    abstract = jax.eval_shape(lambda p: step.start(plan.optimizer, p), plan.masters)
    return jax.tree.map(some, abstract, plan.state)


def saved(folder: Path, plan: step.Plan, *steps: int, keep: int = 9) -> list[step.State]:
    at_rest.begin(folder, plan.model.spec, plan.run.layout)
    states = [state_of(plan, number) for number in steps]
    with checkpoint.Saver(folder, keep) as saver:
        for number, state in zip(steps, states, strict=True):
            saver.save(number, state, PLACE)
    return states


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((2, 2, 2), (1, 2, 1)),
        ((1, 2, 1), (2, 2, 2)),
        ((1, 8, 1), (1, 1, 1)),
        ((1, 1, 1), (1, 1, 1)),
    ],
)
def test_another_number_of_devices(
    tmp_path: Path, old: tuple[int, int, int], new: tuple[int, int, int]
) -> None:
    (state,) = saved(tmp_path / "run", training.plan(old), 7)
    plan = training.plan(new)
    number, found, place = checkpoint.restore(tmp_path / "run", plan)
    assert (number, place) == (7, PLACE)
    assert training.same(found, state)  # the structure too: named tuples, not lists and dicts
    assert isinstance(found.opt_state[1][0], optax.ScaleByAdamState)
    as_planned = jax.tree.map(
        lambda x, due: x.sharding.is_equivalent_to(due, x.ndim), found, plan.state
    )
    assert all(jax.tree.leaves(as_planned))


def test_inside_somebody_elses_mesh(tmp_path: Path) -> None:
    plan = training.plan((2, 2, 2))
    (state,) = saved(tmp_path / "run", plan, 7)
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))):
        assert training.same(checkpoint.restore(tmp_path / "run", plan)[1], state)


def test_a_run_is_a_model_like_any_other(tmp_path: Path) -> None:
    _, state = saved(tmp_path / "run", training.plan((2, 2, 2)), 3, 12)
    assert at_rest.describe(tmp_path / "run").step == 12
    found = axes.arrays(at_rest.load(tmp_path / "run"))
    assert training.same(found, jax.device_get(state.params))


def test_a_model_is_not_a_run(tmp_path: Path) -> None:
    plan = training.plan()
    arrays = {path: np.ones(x.shape, x.dtype) for path, x in plan.masters.items()}
    at_rest.write(tmp_path / "model", plan.model.spec, "scan", arrays)
    with pytest.raises(BadInput, match="holds a model and no run"):
        checkpoint.restore(tmp_path / "model", plan)


Change = Callable[[dict[str, dict[str, Any]]], None]
CHANGES: dict[str, Change] = {
    r"opt_state 1/0/mu/norm/weight: missing": lambda g: g["opt_state"].pop("1/0/mu/norm/weight"),
    r"opt_state more: unexpected": lambda g: g["opt_state"].update(more=np.zeros(3)),
    r"counts step: float32\[\] is stored, the run needs int32\[\]": lambda g: g["counts"].update(
        step=np.array(16777217, np.float32)
    ),
    r"params norm/weight: float16\[32\] is stored, the run needs float32\[32\]": lambda g: g[
        "params"
    ].update({"norm/weight": np.ones(32, np.float16)}),
    r"opt_state 1/0/nu/norm/weight: float32\[1, 32\] is stored": lambda g: g["opt_state"].update(
        {"1/0/nu/norm/weight": np.ones((1, 32), np.float32)}
    ),
    r"counts skipped: missing": lambda g: g.pop("counts"),
}


@pytest.mark.parametrize("said", CHANGES)
def test_nothing_is_cast_filled_in_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    whole = checkpoint.parts

    def changed(state: step.State) -> dict[str, dict[str, Any]]:
        groups = whole(state)
        CHANGES[said](groups)
        return groups

    plan = training.plan()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "parts", changed)
        saved(tmp_path / "run", plan, 7)
    with pytest.raises(BadInput, match=rf"(?s)is not of this run:.*{said}"):
        checkpoint.restore(tmp_path / "run", plan)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "run", training.plan(), 7)
    unclipped = training.dataclasses.replace(training.ADAMW, clip=None)
    with pytest.raises(BadInput, match="0/0/mu/embed/weight: missing"):
        checkpoint.restore(tmp_path / "run", training.plan(optimizer=unclipped))


def test_the_newest_complete_step_is_resumed(tmp_path: Path) -> None:
    plan = training.plan()
    folder = tmp_path / "run"
    first, _, _ = saved(folder, plan, 5, 10, 15)
    (folder / "15" / at_rest.COMMITTED).unlink()
    shutil.move(folder / "10", folder / "10.orbax-checkpoint-tmp")
    number, state, _ = checkpoint.restore(folder, plan)
    assert number == 5
    assert training.same(state, first)
    with checkpoint.Saver(folder, 9) as saver:  # half-written steps go, and their names are free
        assert sorted(p.name for p in folder.iterdir()) == ["5", at_rest.HEADER]
        saver.save(15, state, PLACE)
    assert at_rest.steps(folder) == [5, 15]


def test_a_damaged_step_is_refused(tmp_path: Path) -> None:
    plan = training.plan()
    saved(tmp_path / "run", plan, 5)
    for file in (tmp_path / "run" / "5" / "opt_state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(BadInput, match="5 cannot be read"):
        checkpoint.restore(tmp_path / "run", plan)


def test_old_steps_go_only_once_a_newer_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = training.plan()
    folder = tmp_path / "run"
    saved(folder, plan, 1, 2, 3, keep=2)
    assert at_rest.steps(folder) == [2, 3]

    class Failed:
        def result(self) -> None:
            raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.ocp, "save_checkpointables_async", lambda *_: Failed())
        saver = checkpoint.Saver(folder, 1)
        saver.save(4, state_of(plan), PLACE)
        with pytest.raises(OSError, match="No space"):  # the background's failure comes out
            saver.save(5, state_of(plan), PLACE)
    assert at_rest.steps(folder) == [2, 3]


def test_the_state_may_be_donated_while_it_is_saved(tmp_path: Path) -> None:
    large = training.dataclasses.replace(training.spec(), vocab=2**17)  # long enough on its way
    plan = training.plan((1, 8, 1), large)
    state = state_of(plan)
    due = jax.tree.map(np.copy, jax.device_get(state))
    again = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    at_rest.begin(tmp_path / "run", plan.model.spec, "scan")
    leaves = jax.tree.leaves(state)
    with checkpoint.Saver(tmp_path / "run", 2) as saver:
        saver.save(1, state, PLACE)
        zeroed = again(state)
        assert all(x.is_deleted() for x in leaves)
        jax.block_until_ready(zeroed)
    assert training.same(jax.device_get(checkpoint.restore(tmp_path / "run", plan)[1]), due)
