"""What a feed-forward says beside its output gets out: into the loss, its gradient, the metrics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxtwin.configs import preset
from jaxtwin.jaxmodel import aux as jax_aux
from jaxtwin.jaxmodel import axes
from jaxtwin.jaxmodel import ffn as jax_ffn
from jaxtwin.parity.selftest.tiny_models import weights
from jaxtwin.parity.sides import runs
from jaxtwin.parity.sides.inputs import check_inputs
from jaxtwin.tests.helpers import training
from jaxtwin.tests.helpers.levels import slow
from jaxtwin.torchref import aux as torch_aux
from jaxtwin.torchref import ffn as torch_ffn
from jaxtwin.train import loss

SPEC = preset("reference-tiny")


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both mirrors' gated feed-forward penalize their output's size, as a router's loss would."""
    jax_call, torch_call = jax_ffn.GatedFFN.__call__, torch_ffn.GatedFFN.forward

    def in_jax(self: Any, x: Any) -> Any:
        y, _ = jax_call(self, x)
        return y, jax_aux.Aux({"size": 0.1 * jnp.mean(y**2)}, {"load": jnp.abs(y).sum()})

    def in_torch(self: Any, x: Any) -> Any:
        y, _ = torch_call(self, x)
        return y, torch_aux.Aux({"size": 0.1 * (y**2).mean()}, {"load": y.abs().sum()})

    monkeypatch.setattr(jax_ffn.GatedFFN, "__call__", in_jax)
    monkeypatch.setattr(torch_ffn.GatedFFN, "forward", in_torch)


@pytest.mark.usefixtures("speaking", "x64")
@pytest.mark.parametrize("layout", ["scan", "unroll"])
def test_losses_are_summed_and_statistics_named_by_layer(layout: str) -> None:
    tensors, given = weights(SPEC, 0), check_inputs(SPEC, 12, 0)
    torch_model = runs.torch_model(SPEC, tensors, "float64")
    model = runs.jax_model(SPEC, tensors, "float64", layout)
    _, want = torch_model.logits_and_aux(torch.from_numpy(given.ids))
    _, got = jax.jit(lambda model: model.logits_and_aux(given.ids))(model)
    assert got.losses.keys() == {"size"}
    np.testing.assert_allclose(got.losses["size"], want.losses["size"].item(), rtol=1e-13)
    assert list(got.stats) == [f"layers.{i}.load" for i in range(len(SPEC.layers))]
    for name, x in got.stats.items():
        np.testing.assert_allclose(x, want.stats[name].item(), rtol=1e-13)


@pytest.mark.usefixtures("speaking", "x64")
def test_gradients_have_the_auxiliary_loss_in_them() -> None:
    """On both sides, in the plain run and in the probed one, alike and unlike those without."""
    tensors, given = weights(SPEC, 0), check_inputs(SPEC, 12, 0)
    model = runs.jax_model(SPEC, tensors, "float64")
    want = runs.run_torch(SPEC, tensors, given, "float64")
    probed = runs.decoder(model, "scan", given).run(None)
    runs._jax_step.cache_clear()
    for got in (runs.run_jax(SPEC, model, given), probed):
        for name in want.grads:
            assert want.off(name, got.grads[name]) < 1e-12, name
    silent = torch_of_nll_alone(tensors, given)
    assert want.off("layers.0.ffn.down.weight", silent["layers.0.ffn.down.weight"]) > 1e-6
    runs._jax_step.cache_clear()


def torch_of_nll_alone(tensors: Any, given: Any) -> dict[str, np.ndarray]:
    model = runs.torch_model(SPEC, tensors, "float64")
    logits, _ = runs.torch_forward(model, given)
    runs.torch_nll(logits, given).mean().backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.usefixtures("speaking")
@pytest.mark.parametrize("accumulate", [slow(1), 2])
def test_the_trainer_adds_it_to_its_loss(accumulate: int) -> None:
    plan = training.plan(accumulate=accumulate)
    params = {
        path: jnp.asarray(x, jnp.float32) for path, x in training.lively(training.spec()).items()
    }
    batch = training.batch()
    total, _ = training.gradients(plan, params, batch)
    model = axes.with_arrays(plan.model, params)
    logits, aux = model.logits_and_aux(
        batch.ids, positions=batch.positions, segments=batch.segments
    )
    plain = loss.mean(logits, batch.labels, loss.predicted(batch.labels))
    assert aux.losses["size"] > 1e-3 * plain
    np.testing.assert_allclose(total, plain + aux.losses["size"], rtol=1e-5)


def test_a_dense_model_says_nothing() -> None:
    tensors = weights(SPEC, 0)
    model = runs.jax_model(SPEC, tensors, "float32")
    _, aux = model.logits_and_aux(np.ones((1, 4), np.int32))
    assert aux == jax_aux.NO_AUX
