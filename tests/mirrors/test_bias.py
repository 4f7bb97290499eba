"""Biases on both mirrors in narrow dtypes: the sum's bits, and a gradient summed in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from jaxtwin.jaxmodel import axes
from jaxtwin.jaxmodel.bias import Bias
from jaxtwin.parity.table import bridge
from jaxtwin.torchref.bias import Bias as TorchBias

DTYPES = (ml_dtypes.bfloat16, np.float16)
WIDTH = 16


def jax_bias(value: np.ndarray) -> Any:
    make = axes.Maker(jax.random.key(0), jnp.dtype(value.dtype), 0.02, 0.01, {"d": WIDTH})
    return axes.with_arrays(Bias(make, "d"), {"weight": jnp.asarray(value)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_and_gradient_of_a_narrow_bias(dtype: Any) -> None:
    """1,200 terms: a sum that were rounded after each would be some 30 units off, and is half one.

    NumPy adds two values of the dtype in it, rounding once.
    """
    rng = np.random.default_rng(0)
    x, terms = (rng.normal(size=(2, 600, WIDTH)).astype(dtype) for _ in range(2))
    value = rng.normal(size=WIDTH).astype(dtype)
    model = jax_bias(value)

    def objective(model: Any) -> tuple[Any, Any]:
        y = model(jnp.asarray(x))
        return (y.astype(jnp.float32) * terms.astype(np.float32)).sum(), y

    (_, y), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(model)
    mirror = TorchBias(WIDTH)
    mirror.load_state_dict({"weight": bridge.to_torch(value)}, assign=True)
    out = mirror(bridge.to_torch(x))
    out.backward(bridge.to_torch(terms))
    assert isinstance(mirror.weight.grad, torch.Tensor)
    exact = terms.astype(np.float64).sum(axis=(0, 1))
    unit = np.abs(np.spacing(exact.astype(dtype)).astype(np.float64))
    sides = {
        "JAX": (np.asarray(y), np.asarray(axes.arrays(grads)["weight"])),
        "torch": (bridge.to_numpy(out.detach()), bridge.to_numpy(mirror.weight.grad)),
    }
    for got, grad in sides.values():
        assert got.tobytes() == (x + value).astype(dtype).tobytes()
        assert grad.dtype == dtype
        assert (np.abs(grad.astype(np.float64) - exact) <= 0.51 * unit).all()
