"""Text from a model: prefill once, then one token a step from the cache (where there is one)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxtwin.configs import spec as specs
from jaxtwin.jaxmodel.cache import Cache
from jaxtwin.jaxmodel.model import Decoder, check_ids

COLDEST = 1e-30  # colder is the same, and would overflow or divide by a float32 zero


@jax.jit
def prefill(model: Decoder, ids: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    return model.extend(ids, cache)


@jax.jit(donate_argnames="cache")
def step(model: Decoder, ids: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    return model.extend(ids, cache)


@jax.jit
def logits_uncached(model: Decoder, ids: jax.Array, length: jax.Array) -> jax.Array:
    return model.logits_uncached(ids, length)


def reader(model: Decoder, batch: int, slots: int) -> Callable[[Any], jax.Array]:
    """Reads ids (b t) on from those it read before, up to `slots` in all: the logits (b v) after.

    From a cache; where frequencies depend on the length, the whole text is read anew each time.
    """
    if slots > model.max_cacheable_len:
        return _reading_anew(model, batch, slots)
    held: list[Cache] = []

    def read(ids: Any) -> jax.Array:
        go_on, cache = (step, held.pop()) if held else (prefill, model.start(batch, slots))
        logits, cache = go_on(model, jnp.asarray(ids), cache)
        held.append(cache)
        return logits

    return read


def _reading_anew(model: Decoder, batch: int, slots: int) -> Callable[[Any], jax.Array]:
    text = np.zeros((batch, slots), np.int32)
    length = 0

    def read(ids: Any) -> jax.Array:
        nonlocal length
        text[:, length : length + ids.shape[1]] = ids
        length += ids.shape[1]
        return logits_uncached(model, jnp.asarray(text), jnp.asarray(length))

    return read


@jax.jit
def finite(logits: jax.Array) -> jax.Array:
    """Whether every logit is a number: argmax and sampling would go on from NaN without a word."""
    return jnp.isfinite(logits).all()


def pick(
    logits: jax.Array,
    key: jax.Array,
    temperature: float,
    top_k: int | None,
    vocab: int | None = None,
) -> jax.Array:
    """The next id of each row, from logits (b v). Temperature 0 is argmax.

    top_k keeps every score at or above the k-th, so ties may admit more than k. Ids from `vocab` on
    are not there.
    """
    logits = logits[:, :vocab]
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    scores = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores = (scores - scores.max(axis=-1, keepdims=True)) / max(temperature, COLDEST)
    if top_k is not None:
        kth = jax.lax.top_k(scores, top_k)[0][:, -1:]
        scores = jnp.where(scores >= kth, scores, -jnp.inf)
    return jax.random.categorical(key, scores, axis=-1)


def generate(
    model: Decoder,
    ids: Any,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    eos: int | Sequence[int] | None = None,
    seed: int = 0,
    vocab: int | None = None,
    each: Callable[[np.ndarray], None] = lambda ids: None,
) -> Int[np.ndarray, "b s"]:
    """The prompt ids (b t) with up to `new_tokens` more.

    A row is finished at the first eos it *generates* (several ids may end a row; an eos in the
    prompt ends nothing) and is then filled with that eos while other rows go on. It stops when
    every row is finished, at max_len, or after `new_tokens`. `vocab` is for a tokenizer smaller
    than the table: the rows from there on are padding, and never chosen. `each` is called with
    every new column of ids (b), for those who print as they go. ValueError on arguments out of
    range, and when logits come out that are no numbers.
    """
    ids = np.asarray(check_ids(ids, model.spec))
    ids = ids.astype(np.promote_types(ids.dtype, np.int32))  # it may be too narrow for ids to come
    end_ids = check_sampling(model.spec, new_tokens, temperature, top_k, eos)
    if vocab is not None and not (top_k or 1) <= vocab <= model.spec.vocab:
        raise ValueError(f"vocab must be in {top_k or 1} ... {model.spec.vocab}, got {vocab}")
    new_tokens = min(new_tokens, model.spec.max_len - ids.shape[1])
    if new_tokens == 0:
        return ids
    b, t = ids.shape
    key = jax.random.key(seed)
    choose = jax.jit(pick, static_argnums=(2, 3, 4))
    # A cache in steps of 128 slots: prompts of nearby lengths share one compiled step.
    slots = min(-(-(t + new_tokens) // 128) * 128, model.spec.max_len)
    read = reader(model, b, slots)
    logits = read(ids)
    columns = [ids]
    last, done = ids[:, -1], np.zeros(b, bool)
    for i in range(new_tokens):
        if not finite(logits):
            raise ValueError(f"the logits after token {t + i} are not finite: look at the weights")
        new = np.asarray(choose(logits, jax.random.fold_in(key, i), temperature, top_k, vocab))
        last = np.where(done, last, new).astype(ids.dtype)
        done |= np.isin(last, end_ids)
        columns.append(last[:, None])
        each(last)
        if done.all() or i + 1 == new_tokens:
            break
        logits = read(last[:, None])
    return np.concatenate(columns, axis=1)


def check_sampling(
    spec: specs.Model,
    new_tokens: int,
    temperature: float,
    top_k: int | None,
    eos: int | Sequence[int] | None,
) -> np.ndarray:
    """The end ids as an array, once every argument is in range; else a ValueError."""
    for name, value, kinds in (
        ("new_tokens", new_tokens, (int, np.integer)),
        ("temperature", temperature, (int, float, np.number)),
        ("top_k", 1 if top_k is None else top_k, (int, np.integer)),
    ):
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{name} must be a number, whole for a count, got {value!r}")
    if new_tokens < 0:
        raise ValueError(f"new_tokens must not be negative, got {new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if top_k is not None and not 1 <= top_k <= spec.vocab:
        raise ValueError(f"top_k must be in 1 ... {spec.vocab}, got {top_k}")
    empty = eos is None or np.size(eos) == 0  # NumPy makes an empty list a list of floats
    end_ids = np.zeros(0, np.int64) if empty else np.atleast_1d(np.array(eos))
    integers = np.issubdtype(end_ids.dtype, np.integer)
    if not (integers and (end_ids >= 0).all() and (end_ids < spec.vocab).all()):
        raise ValueError(f"eos must be in 0 ... {spec.vocab - 1}, got {eos}")
    return end_ids
