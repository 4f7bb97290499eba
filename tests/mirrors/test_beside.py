"""What goes beside the ids, and what a model is made with: refused where it makes no sense."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtwin import jaxmodel, torchref
from jaxtwin.configs import PRESETS
from jaxtwin.jaxmodel import sample
from jaxtwin.jaxmodel.model import check_beside, check_dtype
from jaxtwin.torchref.model import check_beside as check_beside_torch

TINY = PRESETS["reference-tiny"]
IDS = np.array([[1, 2, 3]])

ODD = {
    "one axis": (np.array([0, 1, 2]), "must have the shape of ids"),
    "one value for all": (np.array([[0]]), "must have the shape of ids"),
    "too short": (np.array([[0, 1]]), "must have the shape of ids"),
    "too many rows": (np.array([[0, 1, 2]] * 2), "must have the shape of ids"),
    "floats": (np.array([[0.0, 1.0, 2.0]]), "must be integers"),
    "truth values": (np.array([[True, False, True]]), "must be integers"),
    "wraps in 32 bits": (np.array([[0, 1, 2**40]]), "must be in"),
}


@pytest.mark.parametrize("name", ["positions", "segments"])
@pytest.mark.parametrize("odd", ODD)
def test_beside_the_ids(name: str, odd: str) -> None:
    values, message = ODD[odd]
    within = (0, 2**31) if name == "positions" else (-(2**31), 2**31)
    with pytest.raises(ValueError, match=f"{name} {message}"):
        check_beside(name, values, jnp.asarray(IDS), within)
    with pytest.raises(ValueError, match=f"{name} {message}"):
        check_beside_torch(name, torch.from_numpy(values), torch.from_numpy(IDS), within)


def test_a_position_that_is_none() -> None:
    positions, bad = np.array([[0, 1, -1]]), -1
    with pytest.raises(ValueError, match=rf"positions must be in 0 ... 2147483647, got {bad}"):
        jaxmodel.Decoder(TINY, rngs=nnx.Rngs(0))(IDS, positions=positions)
    with pytest.raises(ValueError, match=rf"positions must be in 0 ... 2147483647, got {bad}"):
        torchref.Decoder(TINY)(torch.from_numpy(IDS), positions=torch.from_numpy(positions))


def test_both_models_look_at_segments() -> None:
    with pytest.raises(ValueError, match="segments must be in"):
        jaxmodel.Decoder(TINY, rngs=nnx.Rngs(0))(IDS, segments=np.array([[0, 2**32, 1]]))
    with pytest.raises(ValueError, match="segments must be in"):
        torchref.Decoder(TINY)(
            torch.from_numpy(IDS), segments=torch.tensor([[0, 2**32, 1]], dtype=torch.int64)
        )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layout": "scn"}, "layout must be one of scan, unroll, got 'scn'"),
        ({"remat": "ful"}, "remat must be one of none, dots, full, got 'ful'"),
        ({"dtype": "flt"}, "dtype must be a floating-point dtype, got 'flt'"),
        ({"dtype": jnp.int32}, "dtype must be a floating-point dtype, got int32"),
        ({"dtype": "float64"}, "JAX would narrow float64"),
    ],
)
def test_a_model_cannot_be_made_so(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxmodel.Decoder(TINY, rngs=nnx.Rngs(0), **how)


def test_dtypes_that_are_kept(x64: None) -> None:
    for name in ("float64", "float32", "bfloat16", "float16"):
        assert check_dtype(name) == jnp.dtype(name)


@pytest.mark.parametrize("cold", [1e-20, 1e-38, 1e-40, 1e-320])
def test_the_coldest_temperatures_are_greedy(cold: float) -> None:
    import jax

    logits = jnp.array([[1.0, 3.0, 2.0], [5.0, 4.0, 4.5]])
    for seed in range(5):
        ids = sample.pick(logits, jax.random.key(seed), cold, None)
        assert ids.tolist() == [1, 0]
    model = torchref.Decoder(TINY)
    at = torch.from_numpy(IDS)
    greedy = torchref.generate(model, at, 4)
    assert torch.equal(torchref.generate(model, at, 4, temperature=cold), greedy)


def test_logits_that_are_no_numbers_stop_the_text() -> None:
    model = jaxmodel.Decoder(TINY, rngs=nnx.Rngs(0))
    model.norm.weight.set_value(jnp.full_like(model.norm.weight.get_value(), jnp.nan))
    with pytest.raises(ValueError, match="the logits after token 3 are not finite"):
        jaxmodel.generate(model, IDS, 4)


@pytest.mark.parametrize(
    "how", [{"new_tokens": 1.5}, {"new_tokens": "3"}, {"temperature": "1"}, {"top_k": True}]
)
def test_sampling_arguments_of_another_kind(how: dict[str, Any]) -> None:
    given = {"new_tokens": 1, "temperature": 1.0, "top_k": None, **how}
    with pytest.raises(ValueError, match=next(iter(how))):
        sample.check_sampling.__wrapped__(TINY, **given, eos=None)  # before the hook of the tests
