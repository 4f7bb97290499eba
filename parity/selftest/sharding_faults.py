"""Mistakes of data, tensor and sequence parallelism: each must be caught, and called by its name.

The mistake is in what each device is given or in how the results are put together
(sharded_step.py). What comes out is the mean loss, the gradient and its norm, held to torch's on
the whole batch in one piece. A mistake has its name where torch and NumPy, told of it, give the
same wrong numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from jaxtwin.parity.selftest import sharded_step
from jaxtwin.parity.selftest.optimizer_faults import Result
from jaxtwin.parity.selftest.sharded_step import (
    DEVICES,
    Outcome,
    in_jax,
    in_torch,
    split,
    whole_batch,
)


@dataclass(frozen=True)
class ShardingFault:
    """`jax` makes the mistake; `torch` has the reference make it too."""

    about: str
    jax: Callable[[], Outcome]
    torch: Callable[[], Outcome]


def run(name: str) -> Result:
    """The fault of that name, caught or not."""
    return _tried(SHARDING_FAULTS[name].jax())


def control() -> Result:
    """Split over the devices in the right way: nothing to be caught."""
    return _tried(in_jax(split(), sharded_step.right))


def _tried(got: Outcome) -> Result:
    off = got.off(whole_batch())
    injected = [name for name, error in off.items() if not error <= 1]
    named = [
        name
        for name, outcome in _mistaken().items()
        if all(error <= 1 for error in got.off(outcome).values())
    ]
    return Result(
        bool(injected),
        injected[0] if injected else "",
        named[0] if injected and len(named) == 1 else None,
    )


@functools.cache
def _mistaken() -> dict[str, Outcome]:
    """What torch makes of every mistake."""
    return {name: fault.torch() for name, fault in SHARDING_FAULTS.items()}


SHARDING_FAULTS: dict[str, ShardingFault] = {
    "mean-of-means": ShardingFault(
        "averages the devices' means, however many targets each has",
        lambda: in_jax(split(), sharded_step.mean_of_means),
        sharded_step.averages,
    ),
    "same-rows": ShardingFault(
        "gives every device the same rows",
        lambda: in_jax([split()[0]] * DEVICES, sharded_step.right),
        sharded_step.repeated,
    ),
    "gradients-summed": ShardingFault(
        "sums gradients that were to be averaged over the devices",
        lambda: in_jax(split(), sharded_step.summed),
        lambda: sharded_step.multiplied(whole_batch(), DEVICES),
    ),
    "gradients-averaged": ShardingFault(
        "averages gradients that were to be summed over the devices",
        lambda: in_jax(split(), sharded_step.averaged),
        lambda: sharded_step.multiplied(whole_batch(), 1 / DEVICES),
    ),
    "row-dropped": ShardingFault(
        "drops the batch's last row",
        lambda: in_jax(sharded_step.ignoring(sharded_step.last_row), sharded_step.right),
        lambda: in_torch(sharded_step.batch().rows(slice(0, -1))),
    ),
    "norm-of-shard": ShardingFault(
        "takes the gradient's norm of one device's shard",
        lambda: in_jax(split(), sharded_step.right, norm=sharded_step.norm_of_shard),
        lambda: sharded_step.other_norm(1, sharded_step.first_share),
    ),
    "norm-all-summed": ShardingFault(
        "sums every device's squares, those of replicated parameters too",
        lambda: in_jax(split(), sharded_step.right, norm=sharded_step.norm_all_summed),
        lambda: sharded_step.other_norm(DEVICES, lambda name, g: g),
    ),
    "kv-copies-apart": ShardingFault(
        "takes one copy's gradient of a copied K/V head",
        lambda: in_jax(
            split(), sharded_step.right, model=sharded_step.copies(), merge=lambda g: g[:, :, 0]
        ),
        lambda: sharded_step.merged(lambda g: g[:, 0]),
    ),
    "kv-copies-averaged": ShardingFault(
        "averages the gradients of a copied K/V head",
        lambda: in_jax(
            split(), sharded_step.right, model=sharded_step.copies(), merge=lambda g: g.mean(axis=2)
        ),
        lambda: sharded_step.merged(lambda g: g.mean(axis=1)),
    ),
    "positions-local": ShardingFault(
        "counts positions from 0 in every shard of the sequence",
        lambda: in_jax(sharded_step.counted_anew(), sharded_step.right),
        lambda: in_torch(sharded_step.together(sharded_step.counted_anew())),
    ),
    "shifted-in-shard": ShardingFault(
        "shifts labels within every shard of the sequence, whose last place has none then",
        lambda: in_jax(sharded_step.ignoring(sharded_step.last_of_each_half), sharded_step.right),
        lambda: in_torch(
            sharded_step.together(sharded_step.ignoring(sharded_step.last_of_each_half))
        ),
    ),
}
