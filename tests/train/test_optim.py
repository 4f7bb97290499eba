"""AdamW, its rate and its decay, against torch and against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtwin.configs import PRESETS, preset
from jaxtwin.configs.runs import AdamW
from jaxtwin.jaxmodel import abstract, axes
from jaxtwin.parity.table import decoder_table
from jaxtwin.tests.helpers import kit, training
from jaxtwin.tests.helpers.training import rates
from jaxtwin.train import optim

PLAIN = AdamW(
    peak=2**-7,  # exact in float32, so that torch's float64 rate is the same number
    warmup=0,
    schedule="constant",
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    weight_decay=0.1,
)


def test_warm_up_and_cosine() -> None:
    """The case book's list: the first update's rate is 0, and after the end it stays down."""
    config = replace(PLAIN, peak=1.0, warmup=4, schedule="cosine")
    due = [0, 0.25, 0.5, 0.75, 1, 0.93301, 0.75, 0.5, 0.25, 0.06699, 0, 0, 0, 0]
    assert [round(x, 5) for x in rates(config, 10, 14)] == due


@pytest.mark.parametrize(("warmup", "floor"), [(0, 0.0), (0, 0.01), (1, 0.02), (7, 0.05)])
def test_the_rate_is_the_documented_formula(warmup: int, floor: float) -> None:
    config = replace(PLAIN, peak=0.3, warmup=warmup, schedule="cosine", floor=floor)

    def due(i: int) -> float:
        if i < warmup:
            return 0.3 * i / warmup
        turn = math.pi * min(1.0, (i - warmup) / (20 - warmup))
        return floor + (0.3 - floor) * (1 + math.cos(turn)) / 2

    assert rates(config, 20, 25) == pytest.approx([due(i) for i in range(25)], rel=1e-5, abs=1e-8)
    held = rates(replace(config, schedule="constant", floor=0.0), 20, 25)
    assert held == pytest.approx(
        [0.3 * min(1, i / max(warmup, 1) if i < warmup else 1) for i in range(25)], rel=1e-6
    )


def updated(
    config: AdamW,
    params: dict[str, Any],
    gradients: list[dict[str, Any]],
    letters: dict[str, str],
) -> tuple[dict[str, np.ndarray], Any]:
    """The parameters after those gradients, and the optimizer's state."""
    optimizer = optim.build(config, 100, letters)
    params = {path: jnp.asarray(x) for path, x in params.items()}
    state = optimizer.init(params)
    for grads in gradients:
        given = {path: jnp.asarray(x) for path, x in grads.items()}
        updates, state = optimizer.update(given, state, params)
        params = optax.apply_updates(params, updates)
    return {path: np.asarray(x) for path, x in params.items()}, state


def test_two_steps_worked_out_by_hand() -> None:
    w = {"w": np.array([[1.0, -2.0, 3.0]], "f4")}
    grads = [{"w": np.array([g], "f4")} for g in ([0.1, -0.2, 0.3], [-0.3, 0.1, 0.05])]
    found, _ = updated(replace(PLAIN, peak=0.01), w, grads, {"w": "d f"})
    assert found["w"][0].round(6).tolist() == pytest.approx([0.992953, -1.983349, 2.976180])


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("eps", [1e-8, 0.1])  # a large one shows on which side of the root it is
def test_torchs_adamw(x64: None, clip: float | None, eps: float) -> None:
    rng = np.random.default_rng(0)
    shapes = {"matrix": (3, 4), "scale": (4,)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    grads = [
        {name: rng.normal(size=shape) * 10.0**-i for name, shape in shapes.items()}
        for i in range(4)
    ]
    config = replace(PLAIN, clip=clip, eps=eps)
    found, _ = updated(config, params, grads, {"matrix": "d f", "scale": "d"})
    theirs = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in params.items()}
    groups = [
        {"params": [theirs["matrix"]], "weight_decay": 0.1},
        {"params": [theirs["scale"]], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.peak, betas=(0.9, 0.999), eps=eps)
    for grad in grads:
        for name, param in theirs.items():
            param.grad = torch.tensor(grad[name])
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs.values(), clip)
        adamw.step()
    for name, param in theirs.items():
        # torch divides by norm + 1e-6 where optax divides by the norm.
        assert kit.apart(found[name], param.detach().numpy()) <= (1e-13 if clip is None else 1e-6)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("layout", ["scan", "unroll"])
def test_what_is_a_matrix_in_torch_decays(name: str, layout: str) -> None:
    spec = preset(name)
    model = abstract(spec, layout=layout)
    found = optim.decayed(axes.letters(model))
    due = {
        move.dst: len(move.src_shape) > 1
        for row in decoder_table.rows(spec, layout)
        for move in row.moves()
    }
    assert found == due


@pytest.mark.parametrize("layout", ["scan", "unroll"])
def test_the_reference_decoders_decayed_parameters(layout: str) -> None:
    model = abstract(preset("reference-100m"), layout=layout)
    decayed = optim.decayed(axes.letters(model))
    sizes = {path: x.size for path, x in axes.arrays(model).items()}
    assert sum(n for path, n in sizes.items() if decayed[path]) == 100_073_472
    assert sum(n for path, n in sizes.items() if not decayed[path]) == 19_200


@pytest.mark.parametrize(
    ("letters", "due"),
    [
        ("v d", True),
        ("l d n h", True),
        ("l d", False),
        ("d", False),
        ("l n h", False),
        ("l k h", False),
        ("h", False),
        ("l h", False),
        ("l f", False),
    ],
)
def test_scales_and_biases_do_not_decay(letters: str, due: bool) -> None:
    """A projection's bias "n h" is one side of a matrix; a scale of q or k is "h"."""
    assert optim.decayed({"x": letters}) == {"x": due}


def test_decay_shrinks_each_decayed_weight_once() -> None:
    """No gradient at all: matrices lose rate * decay of themselves, scales keep every bit."""
    spec = training.spec(tied=True)
    params = {p: x.astype("f4") for p, x in training.lively(spec).items()}
    letters = axes.letters(abstract(spec))
    zeros = {path: np.zeros_like(x) for path, x in params.items()}
    found, _ = updated(PLAIN, params, [zeros], letters)
    for path, decays in optim.decayed(letters).items():
        due = params[path] - np.float32(2**-7) * (np.float32(0.1) * params[path])
        if decays:
            np.testing.assert_array_almost_equal_nulp(found[path], due)
        else:
            assert training.same(found[path], params[path])


def test_the_norm_is_over_every_part_once_however_it_is_cut() -> None:
    """8 ones in four parts and 4 ones on every device: sqrt(12), not sqrt(6) nor sqrt(24)."""
    four = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    cut = NamedSharding(four, PartitionSpec("x"))
    whole = NamedSharding(four, PartitionSpec())
    grads = {
        "cut": jax.device_put(np.ones(8, "f4"), cut),
        "whole": jax.device_put(np.ones(4, "f4"), whole),
    }
    config = replace(PLAIN, clip=1.0, b1=0.0)
    optimizer = optim.build(config, 100, {"cut": "d", "whole": "d"})

    @jax.jit
    def clipped(grads: Any) -> Any:
        state = optimizer.init(grads)
        return optimizer.update(grads, state, grads)[1], optax.tree.norm(grads)

    state, norm = clipped(grads)
    assert float(norm) == pytest.approx(3.4641016, rel=1e-6)
    for moment in state[1][0].mu.values():  # with b1 = 0 the first moment is the clipped gradient
        assert np.asarray(moment) == pytest.approx(1 / 3.4641016, rel=1e-6)


def test_clipping_scales_and_never_lengthens() -> None:
    config = replace(PLAIN, clip=1.0, b1=0.0)
    for given, due in (([3.0, 4.0], [0.6, 0.8]), ([0.3, 0.4], [0.3, 0.4])):
        grads = {"w": np.array(given, "f4")}
        _, state = updated(config, grads, [grads], {"w": "d"})
        assert np.asarray(state[1][0].mu["w"]) == pytest.approx(due, rel=1e-6)
