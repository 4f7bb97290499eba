"""Gradients of biases, measured by what they are sums of: by hand, and no fault gets through."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch

import jaxtwin
from jaxtwin.configs import Model, Run
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.compare.tolerances import BACKWARD
from jaxtwin.parity.selftest.optimizer_faults import CONFIG
from jaxtwin.parity.selftest.tiny_models import shapes, weights
from jaxtwin.parity.sides import terms
from jaxtwin.parity.sides.outcome import Outcome
from jaxtwin.parity.sides.terms import Terms, Watch
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.parity.training.torch_training import random_batches
from jaxtwin.parity.training.trajectory import trajectory


def test_by_hand() -> None:
    """Terms 3, -1 and -2 cancel: their absolute values are 6, and 1e-3 off is 1e-3 / 6."""
    known = Terms(size=6.0, rounded={"bfloat16": 0.03})
    assert terms.relative([1e-3], [0.0], known) == pytest.approx(1e-3 / 6)
    assert terms.relative([1e-3], [0.0]) == np.inf
    assert terms.rounding([0.0], np.dtype("float32"), known) == 0
    assert terms.rounding([0.0], jax.numpy.dtype("bfloat16"), known) == pytest.approx(0.005)


def test_a_watch_sums_over_all_tokens() -> None:
    layer = torch.nn.Linear(2, 3).double()
    with Watch(layer) as watch:
        out = layer(torch.ones(4, 5, 2, dtype=torch.float64))
        by = torch.tensor([1.0, -1.0, 0.1], dtype=torch.float64)
        sign = torch.tensor([1.0, -1.0] * 10, dtype=torch.float64).view(4, 5, 1)
        (out * sign * by).sum().backward()
    (known,) = watch.terms().values()
    assert known.size == pytest.approx((20**2 + 20**2 + 2**2) ** 0.5)
    np.testing.assert_allclose(layer.bias.grad, 0, atol=1e-15)
    with Watch(torch.nn.Conv2d(1, 2, 1)) as watch:  # its bias is not of the last axis
        watch.at["bias"](torch.ones(1, 1, 3, 5)).sum().backward()
    assert watch.terms()["bias"].size == 0


def nope() -> Model:
    """Biases of keys, and no rotation: their gradient is 0 by mathematics."""
    base = shapes()["pre-norm"]
    (block,) = base.runs[0].blocks
    attn = replace(block.attn, rope=None, bias=True)
    return replace(base, runs=(Run(blocks=(replace(block, attn=attn),), repeats=2),))


@pytest.mark.slow
def test_a_gradient_that_cancels_is_no_alarm_and_a_wrong_one_is() -> None:
    spec = nope()
    given = weights(spec, 0)
    report = decoder_check.check(spec, given, dtypes=("float64", "float32"), tokens=24)
    assert report.equal
    named = [check for check in report.checks if check.place.endswith("attn.k.bias")]
    assert len(named) == 4
    known = Terms(size=2.0, rounded={})
    outcome = Outcome(np.zeros(1), np.zeros(1), {"b": np.zeros(3)}, terms={"b": known})
    off = [outcome.off("b", np.array([error, 0, 0])) for error in (1e-12, 1e-11)]
    assert off[0] <= BACKWARD < off[1]


def test_somebody_elses_bias_that_cancels_is_no_alarm() -> None:
    """A softmax over tokens does not see what is added to all of its inputs."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4))

    class Soft(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = torch.nn.Linear(4, 1)
            self.own = torch.nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(x) * self.same(x).softmax(0)

    def soft(p: dict, x: jax.Array) -> jax.Array:
        own, same = (x @ p[n] + p[f"{n}_bias"] for n in ("own", "same"))
        return own * jax.nn.softmax(same, 0)

    torch.manual_seed(0)
    module = Soft().double()
    params = {
        **{n: getattr(module, n).weight.detach().numpy().T for n in ("own", "same")},
        **{f"{n}_bias": getattr(module, n).bias.detach().numpy() for n in ("own", "same")},
    }
    sizes = {n: {"i": 4, "o": module.get_submodule(n).out_features} for n in ("own", "same")}
    rows = [Row(n, f"{n}.weight", "o i -> i o", sizes[n]) for n in sizes]
    rows += [Row(f"{n}_bias", f"{n}.bias", "o -> o", sizes[n]) for n in sizes]
    assert jaxtwin.compare(module, soft, rows, [x], params=params).equal


def test_trained_side_by_side_it_is_no_alarm_either() -> None:
    """Its moments are rounding too, and so is where Adam takes it from 0, where a fresh one is."""
    spec = nope()
    given = dict(weights(spec, 0))
    given |= {n: Tensor.of(np.zeros(t.shape)) for n, t in given.items() if n.endswith("k.bias")}
    config = replace(CONFIG, peak=1e-2)
    batches = random_batches(spec, 6)
    found = trajectory(spec, given, config, steps=6, batches=batches, layout="unroll")
    assert [check for check in found.checks if not check.ok] == []
    wrong = {n: Tensor.of(np.full(t.shape, 1e-6)) for n, t in given.items() if "k.bias" in n}
    theirs = (spec, {**given, **wrong})
    off = trajectory(spec, given, config, steps=6, batches=batches, layout="unroll", theirs=theirs)
    assert [c.name for c in off.checks if not c.ok and "k.bias" in c.place]
