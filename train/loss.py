"""The loss: mean cross-entropy over the predicted tokens."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

IGNORE = -100  # a label that predicts nothing, as in torch

Ids = TypeVar("Ids", jax.Array, np.ndarray)


def shift(tokens: Ids) -> tuple[Ids, Ids]:
    """Inputs and labels (b t) from tokens (b t+1): the label of place i is the token of place i+1.

    The one place where the shift happens. Everything else takes labels that are shifted already.
    """
    return tokens[..., :-1], tokens[..., 1:]


def cross_entropies(logits: Float[Array, "*b v"], labels: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """-log softmax(logits)[label] at every place, 0 where the label is IGNORE; float32 at least.

    The maximum is subtracted before anything is summed, so a shared offset cancels: three logits of
    1e8 give log 3. The label's logit is picked by comparing and summing and not by a gather: a
    gather would bring the whole vocabulary to every device, and reads out of range for -100.
    """
    counts = labels != IGNORE
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    wide = jnp.where(counts[..., None], wide, 0)  # before and after: else 0 * NaN comes back
    below = wide - jax.lax.stop_gradient(wide.max(axis=-1, keepdims=True))
    dst = jnp.arange(logits.shape[-1]) == labels[..., None]
    chosen = jnp.where(dst, below, 0).sum(axis=-1)
    losses = jnp.log(jnp.exp(below).sum(axis=-1)) - chosen
    return jnp.where(counts, losses, 0)


def predicted(labels: Int[Array, "*b"]) -> Int[Array, ""]:
    """How many of the labels count."""
    return (labels != IGNORE).sum()


def mean(
    logits: Float[Array, "*b v"], labels: Int[Array, "*b"], count: Int[Array, ""] | None = None
) -> Float[Array, ""]:
    """The cross-entropies' sum over the number of predicted tokens; 0 where there are none.

    `count` is that number for the whole batch where these are a part of it, so that the parts'
    means add up to the mean of the whole, whatever each part holds.
    """
    count = predicted(labels) if count is None else count
    return cross_entropies(logits, labels).sum() / jnp.maximum(count, 1)
