"""The step: the same loss and gradients on any mesh, and what it may and may not change."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from jaxtwin.configs import BadInput
from jaxtwin.jaxmodel import checkpoint
from jaxtwin.tests.helpers import kit, training
from jaxtwin.tests.helpers.levels import slow
from jaxtwin.train import loss, step
from jaxtwin.train.checkpoint import named

MESHES = [
    (2, 2, 2),
    (1, 1, 4),
    *map(slow, [(8, 1, 1), (1, 8, 1), (1, 1, 2)]),
]


@pytest.fixture(scope="module")
def exact() -> Any:
    """The float64 parameters, the batch, and torch's loss and gradients for them."""
    spec = training.spec()
    model = kit.torch_model(spec)
    batch = training.batch()
    ids, positions, segments = map(torch.from_numpy, (batch.ids, batch.positions, batch.segments))
    logits = model(ids, positions=positions, segments=segments)
    labels = torch.from_numpy(batch.labels).long()
    value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    value.backward()
    grads = kit.to_jax(spec, {n: p.grad for n, p in model.named_parameters()})
    return training.lively(spec), batch, value.item(), grads


@pytest.mark.parametrize("shape", [(1, 1, 1), *MESHES])
def test_every_mesh_gives_torchs_gradients_in_float64(
    exact: Any, x64: None, shape: tuple[int, int, int]
) -> None:
    params, batch, value, grads = exact
    plan = training.plan(shape, dtype=np.float64)
    found, theirs = training.gradients(plan, params, batch)
    assert kit.apart(found, value) <= 1e-13
    assert theirs.keys() == grads.keys()
    for path, grad in grads.items():
        assert kit.apart(theirs[path], grad) <= 1e-12, path


@pytest.fixture(scope="module")
def single(exact: Any) -> Any:
    """Loss and gradients in float32 on one device."""
    params, batch, _, _ = exact
    return training.gradients(training.plan(), narrow(params), batch)


def narrow(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {path: x.astype(np.float32) for path, x in params.items()}


@pytest.fixture(scope="module")
def narrow_exact(exact: Any) -> Any:
    """float64 loss and gradients at the parameters that float32 can hold."""
    params, batch, _, _ = exact
    with jax.enable_x64(True):
        wide = {path: x.astype(np.float64) for path, x in narrow(params).items()}
        return training.gradients(training.plan(dtype=np.float64), wide, batch)


@pytest.mark.parametrize("shape", MESHES)
def test_every_mesh_is_within_the_float32_budget(
    exact: Any, single: Any, narrow_exact: Any, shape: tuple[int, int, int]
) -> None:
    params, batch, _, _ = exact
    value, grads = training.gradients(training.plan(shape), narrow(params), batch)
    due, dues = narrow_exact
    one, ones = single
    # One number has no average to go by: its noise is a unit in the last place.
    assert kit.apart(value, due) <= 2 * kit.apart(one, due) + 2**-23
    for path, grad in grads.items():
        noise = kit.apart(dues[path].astype(np.float32), dues[path])
        budget = 2 * kit.apart(ones[path], dues[path]) + noise
        assert kit.apart(grad, dues[path]) <= budget, path


@pytest.mark.parametrize("shape", [(1, 1, 1), slow((2, 1, 1))])
def test_the_recorded_loss_and_gradients(
    golden: kit.Golden, x64: None, shape: tuple[int, int, int]
) -> None:
    """Tokens shifted once: the golden files hold the loss over all places but the last."""
    ids, labels = loss.shift(golden.data["ids"].astype(np.int32))
    rows, length = ids.shape
    at = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    batch = step.Batch(ids, labels, at, np.zeros_like(at))
    plan = training.plan(shape, golden.spec, np.float64, batch=rows, length=length)
    params = kit.to_jax(golden.spec, torch_state(golden.weights))
    value, grads = training.gradients(plan, params, batch)
    assert kit.apart(value, golden.data["loss"]) <= 1e-13
    for path, grad in kit.to_jax(golden.spec, torch_state(golden.grads)).items():
        assert kit.apart(grads[path], grad) <= 1e-12, path


def torch_state(src: Any) -> dict[str, torch.Tensor]:
    return {k: torch.from_numpy(np.array(v)) for k, v in kit.reference_names(src).items()}


@pytest.fixture(scope="module")
def untied() -> dict[str, np.ndarray]:
    """float64 gradients of the untied, scanned model on one device, in one part, kept whole."""
    spec = training.spec(tied=False)
    with jax.enable_x64(True):
        plan = training.plan(model=spec, dtype=np.float64)
        return training.gradients(plan, training.lively(spec), training.batch())[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "unroll"},
        {"remat": "full"},
        {"remat": "dots", "accumulate": 2},
        {"accumulate": 8, "shape": (1, 1, 1)},
    ],
)
def test_a_runs_choices_change_no_gradient(untied: Any, x64: None, changes: dict[str, Any]) -> None:
    spec = training.spec(tied=False)
    plan = training.plan(**{"shape": (2, 2, 2), **changes}, model=spec, dtype=np.float64)
    layout = plan.run.layout
    grads = training.gradients(plan, training.lively(spec, layout), training.batch())[1]
    for path, due in checkpoint.relaid(spec, untied, "scan", layout).items():
        assert kit.apart(grads[path], due) <= 1e-12, path


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("layout", ["scan", "unroll"])
def test_remat_is_asked_for_or_not(remat: str, layout: str) -> None:
    plan = training.plan(remat=remat, layout=layout)
    traced = jax.make_jaxpr(lambda p, b: step.gradients(plan, p, b))
    text = str(traced(plan.masters, step.shapes(plan)))
    assert ("checkpoint" in text or "remat" in text) == (remat != "none")


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_forward_and_backward_run_in_the_dtype_asked_for(compute: str) -> None:
    plan = training.plan(compute=compute)
    traced = jax.make_jaxpr(lambda p, b: step.gradients(plan, p, b))
    text = str(traced(plan.masters, step.shapes(plan)))
    products = re.findall(r":(\w+)\[[\d,]*\] = dot_general", text)
    assert len(products) > 20
    scores = [x for x in products if x == "f32"]  # attention's are never narrower
    assert len(scores) <= 4 if compute == "bfloat16" else len(scores) == len(products)


def test_parts_add_up_in_float32_whatever_computes(exact: Any) -> None:
    params, batch = narrow(exact[0]), training.batch()
    batch = replace(batch, labels=np.abs(batch.labels) % 48)  # every row counts the same
    plan = training.plan(compute="bfloat16", accumulate=training.ROWS)
    _, grads = training.gradients(plan, params, batch)
    alone = training.Gradients(training.plan(compute="bfloat16", batch=1))
    rows = [jax.tree.map(lambda x, i=i: x[i : i + 1], batch) for i in range(training.ROWS)]
    parts = [alone(params, row)[1] for row in rows]
    for path, grad in grads.items():
        assert grad.dtype == np.float32
        terms = [part[path] / training.ROWS for part in parts]
        due = np.sum(terms, axis=0, dtype=np.float64)
        added = {dtype: summed(terms, dtype) for dtype in (np.float32, ml_dtypes.bfloat16)}
        budget = 2 * kit.apart(added[np.float32], due) + 2**-24
        assert kit.apart(grad, due) <= budget < kit.apart(added[ml_dtypes.bfloat16], due), path


def summed(terms: list[np.ndarray], dtype: Any) -> np.ndarray:
    """One after another, rounded each time."""
    total = np.zeros_like(terms[0], dtype)
    for term in terms:
        total = (total + term.astype(dtype)).astype(dtype)
    return total


def stepped(compiled: Any, plan: step.Plan, state: step.State, *batches: step.Batch) -> Any:
    """The state after those batches, and what each of them reported."""
    reports = []
    for batch in batches:
        state, metrics = compiled(state, training.on(plan, batch))
        reports.append(jax.device_get(metrics))
    assert compiled._cache_size() == 1
    return jax.device_get(state), reports


def count(state: step.State) -> int:
    """The optimizer's own count of updates, which the schedule goes by."""
    counts = [x for name, x in named(state.opt_state).items() if name.endswith("count")]
    assert len(counts) == 2
    assert counts[0] == counts[1]
    return int(counts[0])


@pytest.fixture(scope="module")
def four_steps() -> Any:
    """Four steps of two parts each in bfloat16, from parameters that bfloat16 can hold."""
    gentle = replace(training.ADAMW, peak=1e-4, floor=0.0)
    plan = training.plan(compute="bfloat16", accumulate=2, optimizer=gentle)
    arrays = training.lively(training.spec())
    before = {path: x.astype(ml_dtypes.bfloat16).astype("f4") for path, x in arrays.items()}
    batches = [training.batch(seed=i) for i in range(4)]
    state = step.placed(plan, before)
    return plan, before, batches, *stepped(step.make(plan), plan, state, *batches)


def test_accumulated_parts_are_one_step(four_steps: Any) -> None:
    """Eight parts, two at a time: four updates, and four places of the schedule."""
    plan, _, batches, state, reports = four_steps
    assert (int(state.step), int(state.skipped), count(state)) == (4, 0, 4)
    np.testing.assert_array_almost_equal_nulp(
        np.array([r.rate for r in reports]), np.array([plan.rate(i) for i in range(4)], "f4")
    )
    assert [int(r.tokens) for r in reports] == [int((b.labels != -100).sum()) for b in batches]


def test_masters_move_where_bfloat16_would_not(four_steps: Any) -> None:
    _, before, _, state, _ = four_steps
    for tree in (state.params, state.opt_state):
        assert {x.dtype for x in jax.tree.leaves(tree)} <= {np.dtype("f4"), np.dtype("i4")}
    moved, was = state.params["norm/weight"], before["norm/weight"]
    assert (moved != was).all()
    assert (moved.astype(ml_dtypes.bfloat16) == was.astype(ml_dtypes.bfloat16)).all()


def test_the_state_given_is_gone_and_nothing_else() -> None:
    """Cases 38 and 39: what is tied is one leaf, and no buffer is in the state twice."""
    arrays = narrow(training.lively(training.spec()))
    kept = {path: x.copy() for path, x in arrays.items()}
    plan = training.plan((2, 2, 2))
    state = step.placed(plan, arrays)
    leaves = jax.tree.leaves(state)
    pointers = [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in leaves]
    assert len(set(pointers)) == len(pointers)  # a buffer given twice cannot be taken over twice
    by_vocab = [path for path, x in state.params.items() if sorted(x.shape) == [32, 48]]
    assert by_vocab == ["embed/weight"]
    after, _ = step.make(plan)(state, training.on(plan, training.batch()))
    assert all(x.is_deleted() for x in leaves)
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))
    assert training.same(arrays, kept)
    with pytest.raises((RuntimeError, ValueError), match="delete"):
        np.asarray(state.params["norm/weight"])


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    """A row of the embedding at the edge of float32 spoils only the batch that reads it."""
    spec = training.spec(tied=False)
    arrays = narrow(training.lively(spec))
    arrays["embed/weight"][47] = 3e38
    good = [replace(b, ids=b.ids % 47) for b in map(training.batch, [48, 48], [0, 1])]
    bad = replace(good[0], ids=np.full_like(good[0].ids, 47))
    optimizer = replace(training.ADAMW, warmup=0)
    plan = training.plan((2, 2, 2), spec, optimizer=optimizer)
    compiled = step.make(plan)
    straight, due = stepped(compiled, plan, step.placed(plan, arrays), *good)
    batches = good[0], bad, bad, good[1]
    state, reports = stepped(compiled, plan, step.placed(plan, arrays), *batches)
    assert [bool(r.finite) for r in reports] == [True, False, False, True]
    assert not np.isfinite(reports[1].norm)
    assert (int(state.step), int(state.skipped), count(state)) == (4, 2, 2)
    assert training.same(state.params, straight.params)
    assert training.same(state.opt_state, straight.opt_state)
    assert [float(r.rate) for r in reports] == [float(due[i].rate) for i in (0, 1, 1, 1)]
    assert due[0].rate > due[1].rate


@pytest.mark.slow
def test_fresh_values_do_not_depend_on_the_mesh() -> None:
    one = step.fresh(training.plan())
    plan = training.plan((2, 2, 2))
    state = step.fresh(plan)
    assert training.same(jax.device_get(state), jax.device_get(one))
    as_planned = jax.tree.map(
        lambda x, due: x.sharding.is_equivalent_to(due, x.ndim), state, plan.state
    )
    assert all(jax.tree.leaves(as_planned))


def test_given_values_are_placed_as_they_are() -> None:
    arrays = {
        path: x.astype(ml_dtypes.bfloat16) for path, x in training.lively(training.spec()).items()
    }
    state = jax.device_get(step.placed(training.plan((2, 2, 2)), arrays))
    assert training.same(state.params, {path: x.astype("f4") for path, x in arrays.items()})
    assert all((x == 0).all() for x in jax.tree.leaves(state.opt_state))


def test_given_values_must_be_the_models() -> None:
    arrays = training.lively(training.spec())
    with pytest.raises(BadInput, match="embed/weight is float64, which float32 would narrow"):
        step.placed(training.plan(), arrays)
    arrays = narrow(arrays)
    del arrays["norm/weight"]
    with pytest.raises(BadInput, match="norm/weight: missing"):
        step.placed(training.plan(), arrays)
