"""InjectedFault optimizers and wrong sharding: each is caught, and called by its name."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxtwin.parity.selftest import optimizer_faults, sharded_step, sharding_faults
from jaxtwin.parity.selftest.optimizer_faults import OPTIMIZER_FAULTS
from jaxtwin.parity.selftest.sharding_faults import SHARDING_FAULTS
from jaxtwin.parity.training.adam_hypotheses import HYPOTHESES

optimizer_run = functools.cache(optimizer_faults.run)
sharding_run = functools.cache(sharding_faults.run)


# Some of them here; all of them in the kill table's slow test.
@pytest.mark.parametrize("name", [*list(OPTIMIZER_FAULTS)[::6], "nesterov"])
def test_a_wrong_optimizer_is_caught_and_named(name: str) -> None:
    found = optimizer_run(name)
    assert found.caught
    assert found.named == OPTIMIZER_FAULTS[name].cause
    step, where = found.where.split(", ")
    assert int(step.removeprefix("step ")) <= 4
    assert where.split(" of ")[0] in ("update", "mu", "nu")


def test_the_right_optimizer_is_not_caught() -> None:
    assert optimizer_faults.control() == (False, "", None)


def test_every_known_mistake_is_made_by_some_fault() -> None:
    made = {fault.cause for fault in OPTIMIZER_FAULTS.values()}
    assert made == {known.name for known in HYPOTHESES} | {None}
    assert len(OPTIMIZER_FAULTS) >= 16


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("mask-by-ndim", "update of layers.0.pre_attn.weight"),
        ("mask-without-embedding", "update of embed.weight"),
        ("tied-decayed-twice", "update of embed.weight"),
    ],
)
def test_where_it_is_seen(name: str, where: str) -> None:
    assert optimizer_run(name).where == f"step 2, {where}"


@pytest.mark.parametrize("name", list(SHARDING_FAULTS)[::3])
def test_wrong_sharding_is_caught_and_named(name: str) -> None:
    found = sharding_run(name)
    assert found.caught
    assert found.named == name


# What each mistake leaves as it was: so it is seen by the one comparison that can see it.
SEEN = {
    "gradients-summed": "grad embed.weight",
    "norm-of-shard": "norm",
    "norm-all-summed": "norm",
    "kv-copies-apart": "grad layers.0.attn.k.weight",
    "positions-local": "loss",
}


@pytest.mark.parametrize("name", SEEN)
def test_wrong_sharding_is_seen_where_it_is(name: str) -> None:
    assert sharding_run(name).where == SEEN[name]


def test_the_right_sharding_is_not_caught() -> None:
    assert sharding_faults.control() == (False, "", None)


def test_copied_heads_whose_gradients_are_summed_are_right() -> None:
    found = sharded_step.in_jax(
        sharded_step.split(),
        sharded_step.right,
        model=sharded_step.copies(),
        merge=lambda g: g.sum(axis=2),
    )
    assert max(found.off(sharded_step.whole_batch()).values()) <= 1


def test_copied_heads_stand_next_to_each_other() -> None:
    """8 heads on 16 devices: H0, H0, H1, H1, ..."""
    spec, weights = sharded_step.copies()
    k, width = weights["layers.0.attn.k.weight"].read(), spec.layers[0].attn.width
    heads = k.reshape(4, width, -1)
    assert (heads[0] == heads[1]).all()
    assert (heads[2] == heads[3]).all()
    assert (heads[1] != heads[2]).any()


def test_a_mean_of_means_is_not_the_mean() -> None:
    """3 targets that lose 6 and 1 that loses 10: 4 a target, where the means' mean is 6."""
    sums, tokens = np.array([6.0, 10.0]), np.array([3.0, 1.0])

    def joined(join: sharded_step.Join) -> list[float]:
        loss, _ = jax.vmap(lambda x, n: join(x, {"w": x}, n), axis_name="data")(sums, tokens)
        return loss.tolist()

    assert joined(sharded_step.right) == [4.0, 4.0]
    assert joined(sharded_step.mean_of_means) == [6.0, 6.0]


def test_norms_of_what_is_cut_and_what_is_not() -> None:
    """8 ones in four parts and 4 ones on every device: not sqrt(6) nor sqrt(24) but sqrt(12)."""
    grads = {"cut": np.ones((8, 1), "f4"), "whole": np.ones(4, "f4")}
    assert float(sharded_step.norm_of_shard(grads)) == pytest.approx(2.4494897)
    assert float(sharded_step.norm_all_summed(grads)) == pytest.approx(4.8989795)
    assert float(np.sqrt(sum((g * g).sum() for g in grads.values()))) == pytest.approx(3.4641016)
