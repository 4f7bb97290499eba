"""The loss, against torch and against numbers worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from jaxtwin.tests.helpers import kit
from jaxtwin.train import loss


def torch_mean(logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    x = torch.from_numpy(logits).requires_grad_()
    value = torch.nn.functional.cross_entropy(
        x.flatten(0, -2), torch.from_numpy(labels).long().flatten()
    )
    value.backward()
    assert x.grad is not None
    return value.item(), x.grad.numpy()


@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0, 300.0])
def test_torchs_loss_and_gradient(x64: None, spread: float) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, spread, (3, 7, 11))
    labels = rng.integers(0, 11, (3, 7))
    labels[rng.random((3, 7)) < 0.4] = loss.IGNORE
    labels[1] = loss.IGNORE
    value, grad = jax.value_and_grad(loss.mean)(jnp.asarray(logits), jnp.asarray(labels))
    due, dues = torch_mean(logits, labels)
    assert kit.apart(value, due) <= 1e-14
    assert kit.apart(grad, dues) <= 1e-14
    assert (np.asarray(grad)[labels == loss.IGNORE] == 0).all()


def test_an_ignored_label_is_a_zero_and_not_a_nan() -> None:
    logits = jnp.array([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]])
    each = loss.cross_entropies(logits, jnp.array([2, loss.IGNORE]))
    np.testing.assert_array_almost_equal_nulp(
        np.asarray(each), np.array([0.40760597, 0.0], np.float32)
    )
    assert float(loss.mean(logits, jnp.array([2, loss.IGNORE]))) == float(each[0])


def test_a_batch_without_labels_is_a_zero_with_no_gradient() -> None:
    """torch's mean is NaN here."""
    value, grad = jax.value_and_grad(loss.mean)(jnp.ones((2, 3)), jnp.full((2,), loss.IGNORE))
    assert float(value) == 0
    assert (np.asarray(grad) == 0).all()


def test_a_shared_offset_cancels() -> None:
    """Three logits of 1e8: log 3. Subtracting a log-sum-exp of 1e8 from 1e8 gives 0 in float32."""
    logits = jnp.full((1, 3), 1e8)
    np.testing.assert_array_almost_equal_nulp(
        np.asarray(loss.mean(logits, jnp.array([1]))), np.float32(np.log(3))
    )


@pytest.mark.parametrize("large", [100.0, 1e4, 3e38, np.inf])
def test_nothing_hides_behind_the_ignore_mask(large: float) -> None:
    """A row that is ignored may hold anything: no NaN reaches the others' loss or gradient."""
    logits = jnp.array([[1.0, 1.0], [large, -large]])
    labels = jnp.array([0, loss.IGNORE])
    value, grad = jax.value_and_grad(loss.mean)(logits, labels)
    assert float(value) == pytest.approx(np.log(2), rel=1e-7)
    np.testing.assert_array_equal(np.asarray(grad[0]), [-0.5, 0.5])
    assert (np.asarray(grad[1]) == 0).all()


def test_a_class_that_cannot_be() -> None:
    """-inf for a class is no NaN for the others."""
    logits = jnp.array([[0.0, 0.0, -jnp.inf]])
    value, grad = jax.value_and_grad(loss.mean)(logits, jnp.array([0]))
    assert float(value) == pytest.approx(np.log(2), rel=1e-7)
    np.testing.assert_array_equal(np.asarray(grad), [[-0.5, 0.5, 0.0]])


def test_the_mean_is_over_tokens_and_not_over_means() -> None:
    """One part has 3 tokens of sum 6, the other 1 of sum 10: 16 / 4, and not (2 + 10) / 2."""
    total = jnp.array(4)
    logits = [jnp.array([[0.0, np.log(np.expm1(2.0))]] * 3), jnp.array([[0.0, 10.0]])]
    labels = [jnp.zeros(3, int), jnp.zeros(1, int)]
    parts = [loss.mean(x, y, total) for x, y in zip(logits, labels, strict=True)]
    assert float(sum(parts)) == pytest.approx((6 + np.log1p(np.exp(10.0))) / 4, rel=1e-6)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    """4,096 equal logits: 1 + ... + 1 stops at 256 in bfloat16."""
    logits = np.zeros((1, 4096), ml_dtypes.bfloat16)
    value = loss.mean(jnp.asarray(logits), jnp.array([0]))
    assert value.dtype == jnp.float32
    assert float(value) == pytest.approx(np.log(4096), rel=1e-6)


def test_tokens_are_shifted_within_their_row() -> None:
    ids, labels = loss.shift(np.array([[1, 2, 3], [4, 5, 6]]))
    assert ids.tolist() == [[1, 2], [4, 5]]
    assert labels.tolist() == [[2, 3], [5, 6]]
