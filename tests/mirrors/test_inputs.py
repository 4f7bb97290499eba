"""What may be fed to a model, on both mirrors: refusals, causality, packed and padded rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import torch

from jaxtwin import jaxmodel, torchref
from jaxtwin.configs import Model, preset
from jaxtwin.configs.llama import llama
from jaxtwin.jaxmodel import axes
from jaxtwin.tests.helpers import kit
from jaxtwin.tests.helpers.levels import slow

SPEC = llama(
    vocab=13,
    d=16,
    layers=2,
    heads=4,
    kv=2,
    hidden=20,
    max_len=12,
    base=100.0,
    pairs="half",
    eps=1e-6,
    tied=False,
)
Run = Callable[..., np.ndarray]


def torch_side(model: Any) -> Run:
    def run(ids: np.ndarray, **more: np.ndarray) -> np.ndarray:
        more = {k: torch.from_numpy(v) for k, v in more.items()}
        with torch.no_grad():
            return model(torch.from_numpy(ids), **more).numpy()

    return run


def jax_side(model: Any, layout: str) -> Run:
    def run(ids: np.ndarray, **more: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            return np.asarray(forward(twin, ids, more))

    with jax.enable_x64(True):
        twin = kit.jax_model(model, layout)
        forward = jax.jit(lambda twin, ids, more: twin(ids, **more))
    return run


@pytest.fixture(scope="module")
def model() -> Any:
    return kit.torch_model(SPEC)


@pytest.fixture(scope="module", params=["torchref", "jaxmodel scan", "jaxmodel unroll"])
def run(request: pytest.FixtureRequest, model: Any) -> Run:
    name, *layout = request.param.split()
    return torch_side(model) if name == "torchref" else jax_side(model, *layout)


REFUSED = {
    "rank 1": (np.zeros(3, np.int64), r"ids must be \(batch, time\), got shape \(3,\)"),
    "rank 3": (np.zeros((1, 3, 1), np.int64), r"ids must be \(batch, time\), got shape \(1, 3, 1"),
    "float32": (np.zeros((1, 3), np.float32), r"ids must be integers, got .*float32"),
    "bool": (np.zeros((1, 3), bool), r"ids must be integers, got .*bool"),
    "complex": (np.zeros((1, 3), np.complex64), r"ids must be integers, got .*complex64"),
    "no row": (np.zeros((0, 3), np.int64), r"at least one row, got a batch of 0"),
    "time 0": (np.zeros((1, 0), np.int64), r"1 to 12 tokens long, got 0"),
    "over the context": (np.zeros((1, 13), np.int64), r"1 to 12 tokens long, got 13"),
    "id -1": (np.array([[0, -1, 2]]), r"ids must be in 0 ... 12, got -1"),
    "id -100": (np.array([[-100, 1, 2]]), r"ids must be in 0 ... 12, got -100"),
    "id v": (np.array([[0, 1, 13]]), r"ids must be in 0 ... 12, got 13"),
    "id far above": (np.array([[0, 1, 2**40]]), r"ids must be in 0 ... 12, got 1099511627776"),
}


@pytest.fixture(scope="module", params=["torchref", "jaxmodel", "jaxmodel on jax arrays"])
def unchecked(request: pytest.FixtureRequest, model: Any) -> Callable[[np.ndarray], Any]:
    """Forwards without the check of their signatures, which under test would refuse first."""
    if request.param == "torchref":
        forward = inspect.unwrap(torchref.Decoder.logits_and_aux)
        return lambda ids: forward(model, torch.from_numpy(ids))
    twin = jaxmodel.abstract(SPEC)  # a refusal needs no values
    forward = inspect.unwrap(jaxmodel.Decoder.logits_and_aux)
    if request.param == "jaxmodel":
        return lambda ids: forward(twin, ids)
    return lambda ids: forward(twin, jnp.asarray(ids))


@pytest.mark.parametrize("case", REFUSED)
def test_refused(unchecked: Callable[[np.ndarray], Any], case: str) -> None:
    """Case 95 among them: JAX would read another row, or NaN, for an id that is not there."""
    """One message for each, the same on both mirrors."""
    ids, message = REFUSED[case]
    with jax.enable_x64(True), pytest.raises(ValueError, match=message):
        unchecked(ids)


def test_signatures_are_checked_under_test(model: Any) -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        model(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(jaxtyping.TypeCheckError):
        jaxmodel.abstract(SPEC)(np.zeros((1, 3), np.float32))


@pytest.mark.parametrize("ids", [[[12]], [[0] * 12], [[0, 12], [12, 0]]])
def test_accepted_at_the_edges(run: Run, ids: list[list[int]]) -> None:
    logits = run(np.array(ids))
    assert logits.shape == (*np.shape(ids), 13)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.int32, np.int64])
def test_any_integer_will_do(run: Run, dtype: type) -> None:
    ids = np.array([[3, 0, 12]])
    np.testing.assert_array_equal(run(ids.astype(dtype)), run(ids))


@pytest.mark.parametrize("ids", [np.array([[1, 13]]), jnp.array([[1, 13]])], ids=["numpy", "jax"])
def test_ids_baked_into_a_trace_are_looked_at(ids: Any) -> None:
    with pytest.raises(ValueError, match=r"ids must be in 0 ... 12, got 13"):
        jax.eval_shape(lambda m: m(ids), jaxmodel.abstract(SPEC))


@pytest.mark.parametrize("changed_at", [1, 6, 11])
def test_causal_to_the_bit(run: Run, changed_at: int) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 13, (2, 12))
    other = ids.copy()
    other[:, changed_at] = (ids[:, changed_at] + 1 + rng.integers(0, 12, 2)) % 13
    before, after = run(ids), run(other)
    assert before.dtype == np.float64
    np.testing.assert_array_equal(before[:, :changed_at], after[:, :changed_at])
    assert (np.abs(before - after)[:, changed_at:].max(axis=-1) > 1e-6).all()


# Two documents of 5 and 7 tokens in one row.
SEGMENTS = np.array([[0] * 5 + [1] * 7])
POSITIONS = np.array([[*range(5), *range(7)]])


def test_packed_documents_do_not_leak(run: Run) -> None:
    """Case 77: another first document leaves the second one's logits as they were, to the bit."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 13, (1, 12))
    other = ids.copy()
    other[0, :5] = (ids[0, :5] + 1 + rng.integers(0, 12, 5)) % 13
    one = run(ids, positions=POSITIONS, segments=SEGMENTS)
    two = run(other, positions=POSITIONS, segments=SEGMENTS)
    np.testing.assert_array_equal(one[:, 5:], two[:, 5:])
    leaky = run(other, positions=POSITIONS)  # positions alone do not keep them apart
    assert np.abs(run(ids, positions=POSITIONS) - leaky)[:, 5:].max() > 1e-3


def test_packed_equals_alone(run: Run) -> None:
    ids = np.random.default_rng(1).integers(0, 13, (1, 12))
    packed = run(ids, positions=POSITIONS, segments=SEGMENTS)
    assert kit.apart(packed[:, :5], run(ids[:, :5])) <= 1e-13
    assert kit.apart(packed[:, 5:], run(ids[:, 5:])) <= 1e-13


def test_packed_gradients_are_the_sum_of_both_alone(model: Any) -> None:
    ids = np.random.default_rng(1).integers(0, 13, (1, 12))
    counted = np.ones((1, 11))
    counted[0, 4] = 0  # the first document's last token does not predict the second's first

    with jax.enable_x64(True):
        twin = kit.jax_model(model)

        def loss(twin: Any, ids: jax.Array, counted: jax.Array, **more: jax.Array) -> jax.Array:
            scores = jax.nn.log_softmax(twin(ids, **more)[:, :-1], axis=-1)
            nll = -jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1)[..., 0]
            return (nll * counted).sum()

        grad = jax.jit(jax.value_and_grad(loss))
        where = {"positions": jnp.asarray(POSITIONS), "segments": jnp.asarray(SEGMENTS)}
        whole, g = grad(twin, jnp.asarray(ids), counted, **where)
        first, a = grad(twin, jnp.asarray(ids[:, :5]), counted[:, :4])
        second, b = grad(twin, jnp.asarray(ids[:, 5:]), counted[:, 5:])
        assert float(whole) == pytest.approx(float(first + second), rel=1e-13)
        g, a, b = axes.arrays(g), axes.arrays(a), axes.arrays(b)
        errors = {name: kit.apart(g[name], a[name] + b[name]) for name in g}
    assert max(errors.values()) <= 1e-12, errors


def test_left_padding(run: Run) -> None:
    """Padding as a segment of its own, positions from the first real token: as if unpadded."""
    ids = np.array([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    segments = np.array([[0, 0, 1, 1, 1], [1] * 5])
    positions = np.maximum(np.cumsum(segments, axis=1) - 1, 0)
    logits = run(ids, positions=positions, segments=segments)
    assert np.isfinite(logits).all()
    assert kit.apart(logits[0, 2:], run(ids[:1, 2:])[0]) <= 1e-13
    assert kit.apart(logits[1], run(ids[1:])[0]) <= 1e-13
    noticed = run(ids)[0, 2:]  # without, the padding is read as text
    assert kit.apart(noticed, logits[0, 2:]) > 1e-3


def test_only_distances_count_for_rotary(run: Run) -> None:
    ids = np.random.default_rng(2).integers(0, 13, (1, 9))
    shifted = run(ids, positions=np.arange(3, 12)[None])
    assert kit.apart(shifted, run(ids)) <= 1e-12


@pytest.mark.parametrize("name", ["smollm2-tiny", slow("reference-tiny")])
def test_presets_agree_on_ragged_packed_rows(name: str) -> None:
    """Rows with padding, two documents and late positions: both mirrors, every gradient."""
    spec: Model = preset(name)
    model = kit.torch_model(spec, seed=3)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, spec.vocab, (2, 40))
    segments = np.stack((np.repeat([0, 1], [7, 33]), np.repeat([0, 1, 2], [10, 25, 5])))
    positions = np.stack((np.r_[0:7, 50:83], np.r_[0:10, 0:25, 0:5]))
    wanted = kit.torch_run(model, ids, positions=positions, segments=segments)
    with jax.enable_x64(True):
        twin = kit.jax_model(model)
        more = {"positions": jnp.asarray(positions), "segments": jnp.asarray(segments)}
        logits, loss, grads = kit.jax_run(twin, ids, **more)
    assert kit.apart(logits, wanted[0]) <= 1e-13
    assert loss == pytest.approx(wanted[1], rel=1e-13)
    src = kit.to_jax(spec, {k: torch.from_numpy(v) for k, v in wanted[2].items()})
    assert max(kit.apart(grads[k], src[k]) for k in src) <= 1e-12
