"""Feed-forward parts on both mirrors, and which GELU is which."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxtwin.configs import Glu, Mlp
from jaxtwin.tests.helpers.parts import SIDES, JaxSide, TorchSide

Side = TorchSide | JaxSide

BY_HAND = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0.0),
}


@pytest.fixture(params=SIDES, ids=lambda side: side.name)
def side(request: pytest.FixtureRequest) -> Side:
    return request.param


def test_every_activation_has_its_formula(side: Side) -> None:
    assert set(side.activations) == set(BY_HAND)


@pytest.mark.parametrize("name", BY_HAND)
def test_activation(side: Side, name: str) -> None:
    x = np.linspace(-9, 9, 401)
    expected = np.array([BY_HAND[name](v) for v in x])
    np.testing.assert_allclose(side.act(name, x), expected, atol=4e-15, rtol=4e-15)


def test_the_two_gelus_are_told_apart(side: Side) -> None:
    x = np.linspace(-4, 4, 8_001)
    gap = np.abs(side.act("gelu", x) - side.act("gelu_tanh", x)).max()
    assert gap == pytest.approx(4.73e-4, abs=5e-7)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_down_of_act_of_gate_times_up(side: Side, act: str) -> None:
    d, f = 5, 7
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, d))
    w = {
        "gate.weight": rng.normal(size=(f, d)),
        "up.weight": rng.normal(size=(f, d)),
        "down.weight": rng.normal(size=(d, f)),
    }
    gate = np.vectorize(BY_HAND[act])(x @ w["gate.weight"].T)
    expected = (gate * (x @ w["up.weight"].T)) @ w["down.weight"].T
    got = side.ffn(Glu(hidden=f, act=act), w, x)
    np.testing.assert_allclose(got, expected, atol=1e-13)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ["relu", "gelu", "gelu_tanh"])
def test_down_of_act_of_up(side: Side, act: str, bias: bool) -> None:
    d, f = 5, 7
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, d))
    w = {"up.weight": rng.normal(size=(f, d)), "down.weight": rng.normal(size=(d, f))}
    b = {"up.bias": rng.normal(size=f), "down.bias": rng.normal(size=d)} if bias else {}
    up = x @ w["up.weight"].T + b.get("up.bias", 0)
    expected = np.vectorize(BY_HAND[act])(up) @ w["down.weight"].T + b.get("down.bias", 0)
    got = side.ffn(Mlp(hidden=f, act=act, bias=bias), {**w, **b}, x)
    np.testing.assert_allclose(got, expected, atol=1e-13)


def test_biases_of_a_gated_feed_forward(side: Side) -> None:
    d, f = 5, 7
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 3, d))
    w = {f"{name}.weight": rng.normal(size=(f, d)) for name in ("gate", "up")}
    w["down.weight"] = rng.normal(size=(d, f))
    w |= {f"{name}.bias": rng.normal(size=f) for name in ("gate", "up")}
    w["down.bias"] = rng.normal(size=d)
    gate = np.vectorize(BY_HAND["silu"])(x @ w["gate.weight"].T + w["gate.bias"])
    up = x @ w["up.weight"].T + w["up.bias"]
    expected = (gate * up) @ w["down.weight"].T + w["down.bias"]
    np.testing.assert_allclose(side.ffn(Glu(hidden=f, bias=True), w, x), expected, atol=1e-13)
