"""The norms on both mirrors: values by hand, the Jacobian, and bfloat16 to the bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from jaxtwin.configs import LN, RMS
from jaxtwin.jaxmodel import axes
from jaxtwin.jaxmodel import norm as jax_norm
from jaxtwin.parity.report import metrics
from jaxtwin.parity.table import bridge
from jaxtwin.tests.helpers.parts import SIDES, JaxSide, TorchSide
from jaxtwin.torchref import norm as torch_norm

Side = TorchSide | JaxSide


@pytest.fixture(params=SIDES, ids=lambda side: side.name)
def side(request: pytest.FixtureRequest) -> Side:
    return request.param


def test_by_hand(side: Side) -> None:
    """(3, 4) has a mean square of 12.5; 3/sqrt(12.5) and 4/sqrt(12.5)."""
    got = side.norm(RMS(eps=0.0), {"weight": np.ones(2)}, np.array([[3.0, 4.0]]))
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, [[0.848528, 1.131371]], atol=5e-7, rtol=0)
    np.testing.assert_allclose(got, [[3 / 12.5**0.5, 4 / 12.5**0.5]], rtol=1e-15)


def test_eps_is_added_to_the_mean_square(side: Side) -> None:
    got = side.norm(RMS(eps=3.5), {"weight": np.array([2.0, 0.5])}, np.array([[3.0, 4.0]]))
    np.testing.assert_allclose(got, [[1.5, 0.5]], rtol=1e-15)  # the root of 12.5 + 3.5 is 4


def test_the_offset_is_one_more(side: Side) -> None:
    """Gemma stores w and scales by 1 + w."""
    given = {"weight": np.array([1.0, -0.5])}
    got = side.norm(RMS(eps=3.5, offset=True), given, np.array([[3.0, 4.0]]))
    np.testing.assert_allclose(got, [[1.5, 0.5]], rtol=1e-15)


def test_layer_norm_by_hand(side: Side) -> None:
    """(3, 4) has the mean 3.5 and the variance 1/4."""
    x, weight = np.array([[3.0, 4.0]]), np.array([2.0, 0.5])
    spec = LN(eps=0.0, bias=False)
    np.testing.assert_allclose(
        side.norm(spec, {"weight": np.ones(2)}, x), [[-1.0, 1.0]], rtol=1e-15
    )
    np.testing.assert_allclose(side.norm(spec, {"weight": weight}, x), [[-2.0, 0.5]], rtol=1e-15)
    spec = LN(eps=0.75)  # the root of 1/4 + 3/4 is 1
    given = {"weight": weight, "bias.weight": np.array([10.0, 20.0])}
    np.testing.assert_allclose(side.norm(spec, given, x), [[9.0, 20.25]], rtol=1e-15)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_layer_norm_is_torchs_own(side: Side, dtype: type) -> None:
    """No further off the float64 truth than twice what torch's kernel is, and one rounding."""
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, size=(50, 24)).astype(dtype)
    weight, bias = (rng.normal(1, 0.5, size=24).astype(dtype) for _ in range(2))

    def kernel(kind: torch.dtype) -> np.ndarray:
        src = [bridge.to_torch(a).to(kind) for a in (x, weight, bias)]
        return bridge.to_numpy(functional.layer_norm(src[0], (24,), src[1], src[2], 1e-5))

    truth, theirs = kernel(torch.float64), kernel(bridge.to_torch(x).dtype)
    got = side.norm(LN(eps=1e-5), {"weight": weight, "bias.weight": bias}, x)
    assert got.dtype == dtype
    allowed = 2 * metrics.relative_l2(theirs, truth)
    allowed += metrics.relative_l2(metrics.rounded(truth, np.dtype(dtype)), truth)
    assert metrics.relative_l2(got, truth) <= (1e-13 if dtype is np.float64 else allowed)


def test_bfloat16_scales_then_casts_as_gemma_does(side: Side) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 64)).astype(ml_dtypes.bfloat16)
    weight = rng.normal(0, 0.5, size=64).astype(ml_dtypes.bfloat16)
    witness = GemmaRMSNorm(64, eps=1e-6)
    witness.weight.data = bridge.to_torch(weight)
    expected = bridge.to_numpy(witness(bridge.to_torch(x)))
    spec = RMS(eps=1e-6, offset=True, cast="after")
    got = side.norm(spec, {"weight": weight}, x)
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))
    other = side.norm(RMS(eps=1e-6, offset=True), {"weight": weight}, x)
    assert 0.1 < np.mean(other.view(np.uint16) != expected.view(np.uint16)) < 0.6


def test_absent(side: Side) -> None:
    x = np.array([[3.0, 4.0]])
    np.testing.assert_array_equal(side.norm(None, {}, x), x)


def test_jacobian() -> None:
    """diag(g)/r - (g x) x^T / (d r^3), with r the root of the mean square plus eps."""
    d, eps = 7, 1e-3
    x, g = np.random.default_rng(0).normal(size=(2, d))
    r = np.sqrt(np.mean(x * x) + eps)
    expected = np.diag(g) / r - np.outer(g * x, x) / (d * r**3)

    with jax.enable_x64(True):
        make = axes.Maker(jax.random.key(0), jnp.dtype("float64"), 1.0, 1.0, {"d": d})
        part = jax_norm.RMSNorm(RMS(eps=eps), make)
        part.weight.set_value(jnp.asarray(g))
        for derivative in (jax.jacfwd, jax.jacrev):
            np.testing.assert_allclose(derivative(part)(jnp.asarray(x)), expected, atol=1e-15)

    src = torch_norm.RMSNorm(RMS(eps=eps), d).double()
    src.weight.data = torch.from_numpy(g)
    got = torch.autograd.functional.jacobian(src, torch.from_numpy(x))
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-15)


def test_bfloat16_casts_then_scales_as_llama_does(side: Side) -> None:
    """To the bit, on enough values that the other order could not pass for it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 64)).astype(ml_dtypes.bfloat16)
    weight = rng.normal(1, 0.5, size=64).astype(ml_dtypes.bfloat16)
    witness = LlamaRMSNorm(64, eps=1e-6)
    witness.weight.data = bridge.to_torch(weight)
    expected = bridge.to_numpy(witness(bridge.to_torch(x)))
    got = side.norm(RMS(eps=1e-6), {"weight": weight}, x)
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))

    wide = x.astype(np.float32)
    unit = wide / np.sqrt(np.mean(wide * wide, -1, keepdims=True) + 1e-6)
    scaled_first = (unit * weight.astype(np.float32)).astype(ml_dtypes.bfloat16)
    assert 0.15 < np.mean(scaled_first.view(np.uint16) != expected.view(np.uint16)) < 0.4


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_input_is_squared_wide(side: Side, dtype: type) -> None:
    """A square of 300 is no float16, and 1e-4 squared is next to nothing in it."""
    for size in (300.0, 1e-4):
        x = np.array([[size, -size]], dtype)
        got = side.norm(RMS(eps=0.0), {"weight": np.ones(2, dtype)}, x)
        np.testing.assert_array_equal(got.astype(np.float64), [[1.0, -1.0]])
