"""jaxmodel, in both layouts, against the recorded reference decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jaxtwin.jaxmodel import Decoder, generate
from jaxtwin.tests.helpers import kit
from jaxtwin.tests.helpers.kit import Golden


@pytest.fixture(scope="module", params=["scan", "unroll"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(golden: Golden, layout: str, x64: None) -> Decoder:
    twin = kit.torch_model(golden.spec, kit.reference_names(golden.weights))
    return kit.jax_model(twin, layout)


def test_logits_loss_and_gradients(golden: Golden, layout: str, model: Decoder) -> None:
    logits, loss, grads = kit.jax_run(model, golden.data["ids"])
    assert logits.dtype == np.float64
    assert kit.apart(logits, golden.data["logits"]) <= 1e-13
    assert abs(loss - golden.data["loss"]) <= 1e-13 * golden.data["loss"]
    recorded = kit.reference_names(golden.grads)
    recorded = {name: torch.from_numpy(grad) for name, grad in recorded.items()}
    wanted = kit.to_jax(golden.spec, recorded, layout)
    assert grads.keys() == wanted.keys()
    errors = {name: kit.apart(grads[name], wanted[name]) for name in wanted}
    assert max(errors.values()) <= 1e-12, errors


def test_generated_tokens(golden: Golden, model: Decoder) -> None:
    """Three recordings: plain, with an end that rows reach at different steps, to the context."""
    recorded = {k: v for k, v in golden.data.items() if k.startswith("generate/greedy")}
    prompt, eos = golden.data["ids"][:, :4], int(golden.data["generate/eos_id"])
    made = {
        "generate/greedy8_from_first4": generate(model, prompt, 8),
        "generate/greedy8_with_eos": generate(model, prompt, 8, eos=eos),
        "generate/greedy_to_context": generate(model, prompt, 10_000),
    }
    assert made.keys() == recorded.keys()
    for name, tokens in made.items():
        np.testing.assert_array_equal(tokens, recorded[name], err_msg=name)
