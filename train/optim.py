"""AdamW with every number given, the learning rate, clipping, and what a bad gradient may do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtwin.configs.runs import AdamW


def rate(config: AdamW, steps: int) -> optax.Schedule:
    """The learning rate of update i, counted from 0: see `configs.runs.AdamW`.

    Peak 1, warm-up 4, 10 steps: 0, .25, .5, .75, 1, .933, .75, .5, .25, .067, and the floor from
    then on.
    """
    if config.schedule == "constant":
        first = 0.0 if config.warmup else config.peak  # optax would stay at it without a warm-up
        return optax.warmup_constant_schedule(first, config.peak, config.warmup)
    return optax.warmup_cosine_decay_schedule(  # its decay_steps include the warm-up
        0.0, config.peak, config.warmup, decay_steps=steps, end_value=config.floor
    )


def decayed(letters: Mapping[str, str]) -> dict[str, bool]:
    """Which parameters weight decay shrinks: matrices and the embedding, no scale and no bias.

    From the letters alone. The stacked "l" does not make a scale a matrix, and heads times head
    width ("n h") are one side of a matrix, so a projection's bias is none either. A tied weight
    stands here once, as it does in the model.
    """
    return {path: len(set(names.split()) - {"l", "h"}) > 1 for path, names in letters.items()}


def build(
    config: AdamW, steps: int, letters: Mapping[str, str]
) -> optax.GradientTransformationExtraArgs:
    """Clip by the global norm (where asked for), then AdamW.

    The moments have the parameters' dtype. The norm is over all parameters and, under jit, over the
    whole of each, however it is sharded. eps stands outside the corrected root, as in torch.
    """
    adamw = optax.adamw(
        rate(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        eps_root=0.0,
        weight_decay=config.weight_decay,
        mask=decayed(letters),
    )
    clip = [] if config.clip is None else [optax.clip_by_global_norm(config.clip)]
    return optax.chain(*clip, adamw)


def unless(bad: jax.Array, new: Any, old: Any) -> Any:
    """The new tree, or the old one unchanged where the step was bad.

    optax.apply_if_finite would let a bad step through after a number of them in a row.
    """
    return jax.tree.map(lambda n, o: jnp.where(bad, o, n), new, old)
