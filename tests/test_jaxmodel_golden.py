"""jaxmodel against the recorded reference decoder."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxmodel import generate
from tests import kit
from tests.kit import Golden


@pytest.fixture(scope="module", params=["scan", "unroll"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(golden: Golden, layout: str, x64: None):
    return kit.jax_model(kit.torch_model(golden.spec, kit.reference_names(golden.weights)), layout)


def test_logits_loss_and_gradients(golden: Golden, layout: str, model) -> None:
    logits, loss, grads = kit.jax_run(model, golden.data["ids"])
    assert logits.dtype == np.float64
    assert kit.apart(logits, golden.data["logits"]) <= 1e-13
    assert abs(loss - golden.data["loss"]) <= 1e-13 * golden.data["loss"]
    import torch

    wanted = kit.to_jax(
        golden.spec,
        {k: torch.from_numpy(v) for k, v in kit.reference_names(golden.grads).items()},
        layout,
    )
    assert grads.keys() == wanted.keys()
    errors = {name: kit.apart(grads[name], wanted[name]) for name in wanted}
    assert max(errors.values()) <= 1e-12, errors


def test_generated_tokens(golden: Golden, model) -> None:
    data = golden.data
    prompt = data["ids"][:, :4]
    eos = int(data["generate/eos_id"])
    np.testing.assert_array_equal(generate(model, prompt, 8), data["generate/greedy8_from_first4"])
    np.testing.assert_array_equal(
        generate(model, prompt, 8, eos=eos), data["generate/greedy8_with_eos"]
    )
    np.testing.assert_array_equal(
        generate(model, prompt, 10_000), data["generate/greedy_to_context"]
    )
    assert jax.config.jax_enable_x64
