"""Depth: a scanned model's program is of one size, and remat changes no value."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtwin.configs import Model
from jaxtwin.configs.llama import llama
from jaxtwin.jaxmodel import Decoder, abstract, axes
from jaxtwin.jaxmodel.stack import LAYOUTS, REMATS
from jaxtwin.tests.helpers import kit
from jaxtwin.tests.helpers.levels import slow


def deep(layers: int) -> Model:
    return llama(
        vocab=13,
        d=16,
        layers=layers,
        heads=4,
        kv=2,
        hidden=20,
        max_len=16,
        base=100.0,
        pairs="half",
        eps=1e-6,
        tied=True,
    )


def equations(jaxpr: Any) -> int:
    """Equations of a jaxpr, those inside its scans and calls included."""
    count = 0
    for equation in jaxpr.eqns:
        count += 1
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                count += equations(inner)
    return count


def program(layers: int, layout: str) -> int:
    """The size of a training step's loss and gradient."""

    def loss(model: Decoder, ids: jax.Array) -> jax.Array:
        return kit.jax_loss(model(ids), ids)

    model = abstract(deep(layers), layout=layout)
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    return equations(jax.make_jaxpr(jax.grad(loss))(model, ids).jaxpr)


def decoding(layers: int, layout: str) -> int:
    model = abstract(deep(layers), layout=layout)
    cache = jax.eval_shape(lambda: model.start(1, 16))
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return equations(jax.make_jaxpr(lambda m, ids, c: m.extend(ids, c))(model, ids, cache).jaxpr)


@pytest.mark.parametrize("size", [program, decoding])
def test_scanned_program_is_flat_in_depth(size: Any) -> None:
    assert size(2, "scan") == size(20, "scan")
    assert size(20, "unroll") > 5 * size(2, "unroll")


def test_initialising_is_flat_in_depth() -> None:
    def size(layers: int) -> int:
        return equations(jax.make_jaxpr(lambda: axes.arrays(fresh(layers)))().jaxpr)

    def fresh(layers: int) -> Decoder:

        return Decoder(deep(layers), rngs=nnx.Rngs(0))

    assert size(2) == size(20)


@pytest.fixture(scope="module")
def truth() -> Any:
    with jax.enable_x64(True):
        model = kit.torch_model(deep(3))
        ids = np.random.default_rng(0).integers(0, 13, (2, 9))
        return model, ids, kit.torch_run(model, ids)


FAST = (("dots", "scan"), ("full", "unroll"))
PAIRS = itertools.product(sorted(REMATS.keys() - {"none"}), LAYOUTS)


@pytest.mark.parametrize(("remat", "layout"), [p if p in FAST else slow(*p) for p in PAIRS])
def test_remat_changes_no_gradient(x64: None, truth: Any, layout: str, remat: str) -> None:
    src, ids, (logits, loss, grads) = truth
    values = kit.to_jax(src.spec, src.state_dict(), layout)

    def build() -> Decoder:

        return Decoder(src.spec, rngs=nnx.Rngs(0), dtype="float64", layout=layout, remat=remat)

    model = axes.with_arrays(
        nnx.eval_shape(build), {name: jnp.asarray(x) for name, x in values.items()}
    )
    got = kit.jax_run(model, ids)
    wanted = kit.to_jax(src.spec, {k: torch.from_numpy(v) for k, v in grads.items()}, layout)
    assert kit.apart(got[0], logits) <= 1e-13
    assert got[1] == pytest.approx(loss, rel=1e-13)
    assert max(kit.apart(got[2][k], wanted[k]) for k in wanted) <= 1e-12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_remat_is_not_ignored(layout: str) -> None:
    """The backward pass of "full" computes more matrix products than that of "none"."""

    def products(remat: str) -> int:

        model = nnx.eval_shape(
            lambda: Decoder(deep(2), rngs=nnx.Rngs(0), layout=layout, remat=remat)
        )
        ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
        grad = jax.grad(lambda m, ids: kit.jax_loss(m(ids), ids))
        return count(jax.make_jaxpr(grad)(model, ids).jaxpr)

    def count(jaxpr: Any) -> int:
        """Matrix products, those of inner programs too: equal layers share one, printed once."""
        return sum(
            (eqn.primitive.name == "dot_general")
            + sum(count(inner) for inner in jax.extend.core.jaxprs_in_params(eqn.params))
            for eqn in jaxpr.eqns
        )

    assert products("none") < products("dots") < products("full")
