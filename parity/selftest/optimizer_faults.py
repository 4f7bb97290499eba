"""Optimizers that are wrong, made with optax: each must be caught, and called by its name.

They are made of other arguments, other masks and other chains, and share nothing with the knobs
that name them (adam.py). `run` gives each the reference's own state and gradients for a few steps:
the first with no moments yet and a rate of 0, some with a gradient that is clipped and some not,
through the warm-up and the decay.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import optax

from jaxtwin.configs import Model
from jaxtwin.configs.llama import llama
from jaxtwin.configs.runs import AdamW
from jaxtwin.parity.selftest.faulty_optimizers import (
    EMBED,
    Build,
    Letters,
    Mask,
    after,
    chain,
    changed,
    clip_with_eps,
    each_clipped,
    eps_by_count,
    matrices,
    narrow,
    right,
    schedule,
    uncorrected,
    weighed,
)
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensor, Tensors, src_shapes
from jaxtwin.parity.training import adam
from jaxtwin.parity.training.adam import ObservedStep
from jaxtwin.parity.training.adam_hypotheses import Divergence, explain
from jaxtwin.parity.training.single_step import Combine, differences, local_error, token_mean


class Result(NamedTuple):
    """Whether it was seen, where first, and the one mistake that makes the same (if one does)."""

    caught: bool
    where: str
    named: str | None


@dataclass(frozen=True)
class OptimizerFault:
    """`build` makes the wrong optimizer, `combine` makes one gradient of the micro-batches'."""

    about: str
    cause: str | None  # None: no mistake known is this one, and none may be named
    build: Build
    combine: Combine = token_mean


STEPS, PARTS = 9, 2
CONFIG = AdamW(
    peak=0.1,  # large enough that the update's norm is over `clip`
    warmup=2,
    schedule="cosine",
    floor=1e-3,
    b1=0.9,
    b2=0.95,
    eps=1e-4,  # large enough to show on which side of what it stands
    weight_decay=0.1,
    clip=1.0,
)
SCALES = (1.0, 0.1, 3.0, 0.01, 1.0, 0.03, 2.0)


def tiny(*, kv: int = 2, tied: bool = True) -> Model:
    """Two layers, grouped heads."""
    return llama(
        vocab=23,
        d=8,
        layers=2,
        heads=4,
        kv=kv,
        hidden=12,
        max_len=16,
        base=100.0,
        pairs="adjacent",
        eps=1e-6,
        tied=tied,
    )


def lively(spec: Model, seed: int = 0) -> Tensors:
    """float64 weights at which no part is idle: matrices of unit gain, scales around one."""
    rng = np.random.default_rng(seed)
    return {
        name: Tensor.of(
            rng.uniform(0.5, 1.5, shape)
            if len(shape) == 1
            else rng.normal(0, shape[1] ** -0.5, shape)
        )
        for name, shape in src_shapes(decoder_table.rows(spec, "scan"))
    }


@functools.cache
def reference() -> tuple[ObservedStep, ...]:
    """Torch's own steps, which every optimizer is given."""
    from jaxtwin.parity.training.torch_training import observe, random_batches

    spec = tiny()
    batches = random_batches(spec, len(SCALES))
    options = {"steps": STEPS, "batches": batches, "accumulate": PARTS, "scales": SCALES}
    return tuple(observe(spec, lively(spec), CONFIG, **options))  # type: ignore[arg-type]


def run(name: str) -> Result:
    """The fault of that name, caught or not."""
    return tried(OPTIMIZER_FAULTS[name])


def control() -> Result:
    """The right optimizer: nothing to be caught."""
    return tried(OptimizerFault("nothing", None, right))


def tried(fault: OptimizerFault) -> Result:
    """One optimizer against the reference."""
    import jax

    spec = tiny()
    with jax.enable_x64(True):
        optimizer = fault.build(CONFIG, STEPS, letters())
    results = local_error(spec, optimizer, reference(), combine=fault.combine)
    where = ""
    for i, (got, want) in enumerate(zip(results, reference(), strict=True), 1):
        off = {
            f"step {i}, {what} of {name}": np.inf if np.isnan(error) else error / band
            for what, errors in differences(got, want).items()
            for name, (error, band) in errors.items()
        }
        if max(off.values()) > 1:
            where = max(off, key=lambda at: off[at])
            break
    causes = explain(Divergence(adam.Setting.of(spec, CONFIG, STEPS), tuple(results)))
    return Result(bool(where), where, causes[0].name if len(causes) == 1 else None)


@functools.cache
def letters() -> dict[str, str]:
    from jaxtwin.jaxmodel import abstract, axes

    return axes.letters(abstract(tiny()))


def no_decay(config: AdamW, steps: int, letters: Letters) -> Any:
    clip = optax.clip_by_global_norm(config.clip or 1.0)
    rate = schedule(config, steps)
    return optax.chain(clip, optax.adam(rate, config.b1, config.b2, config.eps))


def only(path: str) -> Mask:
    return lambda letters: {name: name == path for name in letters}


def but(path: str) -> Mask:
    return lambda letters: {n: yes and n != path for n, yes in matrices(letters).items()}


def twice_decayed(config: AdamW) -> Any:
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, matrices(letters())),
        optax.add_decayed_weights(config.weight_decay, only(EMBED)(letters())),
    )


def corrected_away(config: AdamW) -> Any:
    return optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.scale_by_schedule(lambda count: 1 - config.b1 ** (count + 1)),
    )


def ndim(letters: Letters) -> dict[str, bool]:
    return {path: len(names.split()) > 1 for path, names in letters.items()}


def unscaled(config: AdamW) -> Any:
    return optax.add_decayed_weights(-config.weight_decay, matrices(letters()))


def mean(n: int, tokens: Sequence[int]) -> float:
    return 1 / len(tokens)


F = OptimizerFault
OPTIMIZER_FAULTS: dict[str, OptimizerFault] = {
    "eps-inside-root": F(
        "eps given as eps_root",
        "eps-inside-root",
        chain(adam=lambda c: optax.scale_by_adam(c.b1, c.b2, 0.0, eps_root=c.eps)),
    ),
    "eps-before-correction": F(
        "eps added before the bias correction",
        "eps-before-correction",
        chain(adam=eps_by_count),
    ),
    "mu-not-corrected": F(
        "the first moment's correction undone", "mu-not-corrected", chain(adam=corrected_away)
    ),
    "nu-not-corrected": F(
        "the second moment used as it is", "nu-not-corrected", chain(adam=uncorrected(mu=True))
    ),
    "no-correction": F(
        "both moments used as they are",
        "moments-not-corrected",
        chain(adam=uncorrected(mu=False)),
    ),
    "no-mask": F("weight decay without a mask", "scales-decayed", chain(mask=lambda letters: None)),
    "mask-by-ndim": F(
        "a mask of what has two axes or more", "stacked-scales-decayed", chain(mask=ndim)
    ),
    "mask-without-embedding": F(
        "a mask that leaves the embedding out", "embedding-not-decayed", chain(mask=but(EMBED))
    ),
    "adam": F("optax.adam for optax.adamw", "nothing-decayed", no_decay),
    "l2": F("decay before Adam", "decay-coupled", chain(("clip", "decay", "adam", "rate"))),
    "l2-clipped": F(
        "decay before the clip", "decay-coupled", chain(("decay", "clip", "adam", "rate"))
    ),
    "decay-after-rate": F(
        "decay after the scaling by the rate",
        "decay-not-scaled",
        chain(("clip", "adam", "rate", "decay"), decay=unscaled),
    ),
    "no-clip": F("no clip in the chain", "clip-missing", changed(clip=None)),
    "clip-each": F("a clip for each tensor", "clip-per-tensor", chain(clip=each_clipped)),
    "clip-last": F(
        "the clip after AdamW", "clip-of-update", chain(("adam", "decay", "rate", "clip"))
    ),
    "clip-torchs-eps": F("norm + 1e-6 in the clip", "clip-norm-eps", chain(clip=clip_with_eps)),
    "clip-parts": F(
        "each micro-batch clipped, then averaged by targets",
        "clip-per-part",
        right,
        weighed(lambda n, all: n / sum(all), CONFIG.clip),
    ),
    "clip-parts-mean": F(
        "each micro-batch clipped, then averaged",
        "clip-per-part",
        right,
        weighed(mean, CONFIG.clip),
    ),
    "sum-of-means": F(
        "micro-batches' means summed", "parts-summed", right, weighed(lambda n, all: 1.0)
    ),
    "sum-times-parts": F(
        "the token mean times the number of parts",
        "parts-summed",
        right,
        weighed(lambda n, all: n * len(all) / sum(all)),
    ),
    "mean-of-means": F("micro-batches' means averaged", "mean-of-means", right, weighed(mean)),
    "rate-early": F(
        "the schedule one ahead",
        "schedule-early",
        chain(rate=functools.partial(schedule, shift=1)),
    ),
    "rate-late": F(
        "the schedule one behind",
        "schedule-late",
        chain(rate=functools.partial(schedule, shift=-1)),
    ),
    "decay-steps": F(
        "decay_steps that leaves the warm-up out of account",
        "warmup-apart",
        chain(rate=functools.partial(schedule, apart=CONFIG.warmup)),
    ),
    "b1": F("b1 0.95", "b1", changed(b1=0.95)),
    "b2": F("b2 0.999 by default", "b2", changed(b2=0.999)),
    "eps": F("eps 1e-8 by default", "eps", changed(eps=1e-8)),
    "clip-at": F("a clip at 0.5", "clip", changed(clip=0.5)),
    "decay-optax": F("optax's default decay", "weight-decay", changed(weight_decay=1e-4)),
    "decay-torch": F("torch's default decay", "weight-decay", changed(weight_decay=1e-2)),
    "rate-twice": F("twice the rate", "rate-scale", after(lambda c: optax.scale(2.0))),
    "sign": F("the update's sign", "update-sign", after(lambda c: optax.scale(-1.0))),
    "mu-bfloat16": F(
        "mu_dtype bfloat16",
        "mu-bfloat16",
        chain(adam=lambda c: optax.scale_by_adam(c.b1, c.b2, c.eps, mu_dtype="bfloat16")),
    ),
    "moments-bfloat16": F("both moments in bfloat16", "moments-bfloat16", narrow),
    "tied-updated-twice": F(
        "the embedding's update applied twice",
        "embedding-updated-twice",
        after(lambda c: optax.masked(optax.scale(2.0), only(EMBED)(letters()))),
    ),
    "tied-decayed-twice": F(
        "the embedding decayed twice", "embedding-decayed-twice", chain(decay=twice_decayed)
    ),
    "amsgrad": F(
        "the largest second moment so far",
        "amsgrad",
        chain(adam=lambda c: optax.scale_by_amsgrad(c.b1, c.b2, c.eps)),
    ),
    "nesterov": F(
        "Nesterov's momentum, which is no mistake known here",
        None,
        chain(adam=lambda c: optax.scale_by_adam(c.b1, c.b2, c.eps, nesterov=True)),
    ),
}
