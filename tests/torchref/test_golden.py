"""torchref against the recorded reference decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jaxtwin.tests.helpers import kit
from jaxtwin.tests.helpers.kit import Golden
from jaxtwin.torchref import Decoder, generate


@pytest.fixture(scope="module")
def model(golden: Golden) -> Decoder:
    return kit.torch_model(golden.spec, kit.reference_names(golden.weights))


def test_logits_loss_and_gradients(golden: Golden, model: Decoder) -> None:
    logits, loss, grads = kit.torch_run(model, golden.data["ids"])
    assert logits.dtype == np.float64
    assert kit.apart(logits, golden.data["logits"]) <= 1e-13
    assert abs(loss - golden.data["loss"]) <= 1e-13 * golden.data["loss"]
    wanted = kit.reference_names(golden.grads)
    assert grads.keys() == wanted.keys()
    errors = {name: kit.apart(grads[name], wanted[name]) for name in wanted}
    assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize(
    ("recorded", "new_tokens", "stops"),
    [
        ("greedy8_from_first4", 8, False),
        ("greedy8_with_eos", 8, True),
        ("greedy_to_context", 10_000, False),
    ],
)
def test_generated_tokens(
    golden: Golden, model: Decoder, recorded: str, new_tokens: int, stops: bool
) -> None:
    prompt = torch.from_numpy(golden.data["ids"][:, :4])
    eos = int(golden.data["generate/eos_id"]) if stops else None
    made = generate(model, prompt, new_tokens, eos=eos)
    np.testing.assert_array_equal(made.numpy(), golden.data[f"generate/{recorded}"])
