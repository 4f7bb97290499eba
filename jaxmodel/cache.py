"""The key/value cache of autoregressive decoding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class AttentionContext(NamedTuple):
    """Where this call's tokens stand, and which keys each of them may attend to."""

    positions: Int[Array, "b t"]  # what the rotary angle is taken from
    key_positions: Int[Array, "b s"]  # the same of the key slots
    length: Int[Array, ""]  # of the text so far: its largest position + 1
    offset: Int[Array, ""]  # slots of the cache already filled; 0 without a cache
    mask: Bool[Array, "b t s"]  # whether query t may attend to key slot s


class KV(NamedTuple):
    """One layer's keys and values: K/V heads only, never the repeated query heads."""

    k: Float[Array, "b s k h"]
    v: Float[Array, "b s k h"]


class Cache(NamedTuple):
    """Everything a decoder remembers: its layers' KV (laid out as its stack is) and the length."""

    layers: object
    length: Int[Array, ""]


def extend(kv: KV | None, k: Array, v: Array, offset: Array) -> tuple[Array, Array, KV | None]:
    """Keys and values to attend to: the new ones alone, or the cache with them written in."""
    if kv is None:
        return k, v, None
    write = jax.lax.dynamic_update_slice_in_dim
    kv = KV(
        write(kv.k, k.astype(kv.k.dtype), offset, axis=1),
        write(kv.v, v.astype(kv.v.dtype), offset, axis=1),
    )
    return kv.k, kv.v, kv


def query_key_distance(time: int, slots: int, offset: Array) -> Int[Array, "t s"]:
    """How many slots key s stands before query t; negative where it comes later."""
    return offset + jnp.arange(time)[:, None] - jnp.arange(slots)[None, :]


def causal_segment_mask(
    batch: int, time: int, slots: int, offset: Array, segments: Array | None
) -> Bool[Array, "b t s"]:
    """Causal by slot, and only within one segment where segments are given.

    Causality goes by place in the sequence and not by position: packed and left-padded rows have
    positions that start again.
    """
    causal = query_key_distance(time, slots, offset) >= 0
    if segments is None:
        return jnp.broadcast_to(causal, (batch, time, slots))
    return causal & (segments[:, :, None] == segments[:, None, :])
