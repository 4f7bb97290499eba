"""Faults in what the JAX side is given: the spec it is built from, the weights on their way in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.dataflow import norms
from jaxtwin.configs.spec import LN, RMS, Block, Norm, OwnNorm
from jaxtwin.parity.selftest.faults.base import NoPlace, add

Arrays = dict[str, np.ndarray]

# ---- in the spec ------------------------------------------------------------------------------


def every(change: Callable[[Any], Any]) -> Callable[[Model], Model]:
    """The change made to every block."""

    def apply(spec: Model) -> Model:
        runs = tuple(replace(r, blocks=tuple(map(change, r.blocks))) for r in spec.runs)
        changed = replace(spec, runs=runs)
        if changed == spec:
            raise NoPlace("there is nothing to change")
        return changed

    return apply


def _attn(**new: Any) -> Callable[[Model], Model]:
    return every(lambda b: replace(b, attn=replace(b.attn, **new)))


def _rope(change: Callable[[Any], dict[str, Any]]) -> Callable[[Model], Model]:
    def turn(b: Block) -> Block:
        rope = b.attn.rope
        if rope is None:
            raise NoPlace("the model has no rotary positions")
        return replace(b, attn=replace(b.attn, rope=replace(rope, **change(rope))))

    return every(turn)


def _eps(norm: Norm) -> RMS | LN | OwnNorm:
    if norm is None:
        raise NoPlace("the model has no such norm")
    return replace(norm, eps=norm.eps * 10)


OTHER = {"adjacent": "half", "half": "adjacent"}
add(
    "rope-pairing",
    "adjacent pairs turned as halves, or the reverse",
    spec=_rope(lambda rope: {"pairs": OTHER[rope.pairs]}),
)
add("rope-base", "a RoPE base 1% off", spec=_rope(lambda rope: {"base": rope.base * 1.01}))
add("rope-missing", "no rotary positions at all", spec=_attn(rope=None))
add(
    "norm-eps",
    "the norms' eps ten times too large",
    spec=every(lambda b: replace(b, **{at: _eps(norm) for at, norm in norms(b).items()})),
)
add(
    "final-norm-eps",
    "the last norm's eps ten times too large",
    "norm-eps",
    spec=lambda m: replace(m, norm=_eps(m.norm)),
    layered=False,
)
add(
    "activation-gelu",
    "GELU where SiLU belongs",
    "activation",
    spec=every(lambda b: replace(b, ffn=replace(b.ffn, act="gelu"))),
)

# ---- in the weights ---------------------------------------------------------------------------


def on(ending: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Arrays], Arrays]:
    """The change made to every array whose path ends so: stacked layers have their l in front."""

    def apply(arrays: Arrays) -> Arrays:
        if not any(p.endswith(ending) for p in arrays):
            raise NoPlace(f"the model has no {ending}")
        return {p: change(x) if p.endswith(ending) else x for p, x in arrays.items()}

    return apply


def swapped(one: str, other: str) -> Callable[[Arrays], Arrays]:
    """Two parameters of one part exchanged."""

    def apply(arrays: Arrays) -> Arrays:
        names = {p: p.removesuffix(one) + other for p in arrays if p.endswith(one)}
        if not names or not set(names.values()) <= arrays.keys():
            raise NoPlace(f"the model has no {one} and {other}")
        names |= {q: p for p, q in names.items()}
        return {p: arrays[names.get(p, p)] for p in arrays}

    return apply


def _square_transposed(x: np.ndarray) -> np.ndarray:
    """(l d n h) read as if the file held (in, out): a fault that only a square matrix hides."""
    return np.swapaxes(x.reshape(*x.shape[:2], -1), 1, 2).reshape(x.shape)


def _one_element(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[-1, 0, 0] += np.asarray(0.01, x.dtype)
    return x


def _halves(x: np.ndarray) -> np.ndarray:
    """(l d n h): the pairs of each head's coordinates side by side, read as its two halves."""
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)


def _first_zero(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[0] = 0
    return x


def _through(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    import ml_dtypes

    return lambda x: x.astype(getattr(ml_dtypes, dtype)).astype(x.dtype)


add(
    "q-transposed",
    "the square q matrix transposed",
    "transposed",
    weights=on("attn/q", _square_transposed),
)
add("k-v-swapped", "k and v exchanged", "weights-swapped", weights=swapped("attn/k", "attn/v"))
add(
    "gate-up-swapped",
    "gate and up exchanged",
    "weights-swapped",
    weights=swapped("ffn/gate", "ffn/up"),
)
add(
    "norms-swapped",
    "the two norms exchanged",
    "weights-swapped",
    weights=swapped("pre_attn/weight", "pre_ffn/weight"),
)
add(
    "layers-reversed",
    "layers in reverse order",
    "layer-order",
    weights=on("attn/o", lambda x: x[::-1]),
    layered=False,
)
add(
    "layer-repeated",
    "layer 0 in every slot",
    "layer-order",
    weights=on("ffn/down", lambda x: x[:1].repeat(len(x), 0)),
    layered=False,
)
add(
    "heads-rotated",
    "query heads one place on",
    weights=on("attn/q", lambda x: np.roll(x, 1, axis=2)),
)
add(
    "kv-heads-rotated",
    "value heads one place on",
    "heads-rotated",
    weights=on("attn/v", lambda x: np.roll(x, 1, axis=2)),
)
add(
    "o-head-order",
    "the output matrix's (head, width) read as (width, head)",
    "head-order",
    weights=on("attn/o", lambda x: np.swapaxes(x, 1, 2).reshape(x.shape)),
)
add(
    "vocab-shifted",
    "the embedding's rows one place on",
    "rows-reordered",
    weights=on("embed/weight", lambda x: np.roll(x, 1, 0)),
    layered=False,
)
add(
    "norm-plus-one",
    "a scale of 1 + w where w is stored",
    weights=on("pre_ffn/weight", lambda x: x + 1),
)
add(
    "scale-missing",
    "norm scales left at 1",
    "constant",
    weights=on("pre_attn/weight", np.ones_like),
)
add(
    "one-element",
    "one element of one matrix 0.01 off",
    weights=on("ffn/up", _one_element),
    layered=False,
)
add(
    "rounded-weight",
    "one matrix rounded to bfloat16",
    "rounded",
    weights=on("attn/k", _through("bfloat16")),
)
add(
    "query-scale-folded",
    "q stored already scaled",
    "scaled-weight",
    weights=on("attn/q", lambda x: x * x.shape[-1] ** -0.5),
)
add(
    "rope-rows-as-halves",
    "q and k stored for adjacent pairs, read as if for halves",
    "rope-pairing-weights",
    weights=lambda arrays: on("attn/k", _halves)(on("attn/q", _halves)(arrays)),
)
add(
    "k-transposed-heads",
    "k's (head, width) read as (width, head)",
    "head-order",
    weights=on("attn/k", lambda x: np.swapaxes(x, 2, 3).reshape(x.shape)),
)
add(
    "embedding-scale-folded",
    "the embedding stored times sqrt(d)",
    "scaled-weight",
    weights=on("embed/weight", lambda x: x * x.shape[-1] ** 0.5),
    layered=False,
)
add(
    "float16-weight",
    "one matrix rounded to float16",
    "rounded",
    weights=on("ffn/down", lambda x: x.astype(np.float16).astype(x.dtype)),
)
add(
    "weight-left-zero",
    "one layer's matrix never loaded",
    "constant",
    weights=on("ffn/up", _first_zero),
    layered=False,
)
add(
    "sign-flipped",
    "one matrix with the other sign",
    "scaled-weight",
    weights=on("attn/o", lambda x: -x),
)
add(
    "hidden-rows-shifted",
    "the gate's hidden units one place on",
    "rows-reordered",
    weights=on("ffn/gate", lambda x: np.roll(x, 1, axis=-1)),
)
add(
    "layers-shifted",
    "every layer's norm taken from the layer before",
    "layer-order",
    weights=on("pre_ffn/weight", lambda x: np.roll(x, 1, axis=0)),
    layered=False,
)
