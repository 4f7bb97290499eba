"""Gradients of biases, measured by what they are sums of: by hand, and no fault gets through."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch

import jaxtwin
from jaxtwin.configs import RMS, Model, Run
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.compare.tolerances import BACKWARD, FORWARD
from jaxtwin.parity.selftest.optimizer_faults import CONFIG
from jaxtwin.parity.selftest.tiny_models import shapes, weights
from jaxtwin.parity.sides import terms
from jaxtwin.parity.sides.outcome import Outcome
from jaxtwin.parity.sides.terms import Terms, Watch
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.parity.training.torch_training import random_batches
from jaxtwin.parity.training.trajectory import trajectory
from jaxtwin.torchref.norm import RMSNorm as TorchRMSNorm


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
        watch.biases["bias"](torch.ones(1, 1, 3, 5)).sum().backward()
    assert watch.terms()["bias"].size == 0


def test_a_scale_that_cancels_is_measured_by_its_terms() -> None:
    """x / rms(x) is (1, 1): cotangents 3 and -2.9 leave 0.1 of 5.9, and 0.59 is a tenth of that."""
    assert pytest.approx(BACKWARD / FORWARD) == terms.SCALE
    for norm in (torch.nn.RMSNorm(2, eps=0.0), TorchRMSNorm(RMS(eps=0.0, offset=True), 2)):
        norm = norm.double()
        with Watch(norm) as watch:
            out = norm(torch.full((1, 2, 2), 7.0, dtype=torch.float64))
            out.backward(torch.tensor([[[3.0, 0.1], [-2.9, 0.2]]], dtype=torch.float64))
        (known,) = watch.terms().values()
        assert known.size == pytest.approx((0.59**2 + 0.03**2) ** 0.5)
        want = np.array([0.1, 0.3])
        np.testing.assert_allclose(norm.weight.grad.numpy(), want)  # and the weight is as it was
        assert (norm.weight == (0 if isinstance(norm, TorchRMSNorm) else 1)).all()
        off = np.array([1e-3, 0.0])
        assert terms.relative(want + off, want, known) == pytest.approx(1e-3 / known.size)
        # Where nothing cancels, its own size is the measure.
        assert terms.relative(9 * want + off, 9 * want, known) == pytest.approx(
            1e-3 / np.linalg.norm(9 * want)
        )


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
