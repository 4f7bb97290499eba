"""AdamW in NumPy, one step at a time, and the ways to get it wrong.

What is right here is what `configs.runs.AdamW` says; without a knob turned it is torch.optim.AdamW
(a test proves it). Each knob of `How` is one way in which a port goes wrong; adam_hypotheses.py
turns them to find out which one a wrong optimizer has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.runs import AdamW
from jaxtwin.parity.compare.tolerances import OPTIMIZER
from jaxtwin.parity.report import metrics
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import moves

Arrays = dict[str, np.ndarray]  # by torch's names


@dataclass(frozen=True)
class State:
    """Parameters, both moments, and how many updates were made."""

    count: int
    params: Arrays
    mu: Arrays
    nu: Arrays


@dataclass(frozen=True)
class Part:
    """A micro-batch: the gradient of the *sum* of its targets' losses, and how many they are."""

    grads: Arrays
    tokens: int


@dataclass(frozen=True)
class Step:
    """What one step made: the update (added to the parameters) and the new moments."""

    update: Arrays
    mu: Arrays
    nu: Arrays


@dataclass(frozen=True)
class ObservedStep:
    """A step of the side under test, from the reference's own state and gradients."""

    before: State
    parts: tuple[Part, ...]
    result: Step


@dataclass(frozen=True)
class Setting:
    """What the step has to know besides numbers that change: all from the spec and the run."""

    config: AdamW
    steps: int  # the schedule's length
    decayed: frozenset[str]
    stacked: frozenset[str]  # of these the JAX tensor has layers in front
    dst: Mapping[str, str]  # the JAX tensor that each is (a part of)
    tied: bool
    embedding: str = "embed.weight"

    @staticmethod
    def of(spec: Model, config: AdamW, steps: int, layout: str = "scan") -> Setting:
        found = moves(decoder_table.rows(spec, layout))
        return Setting(
            config=config,
            steps=steps,
            decayed=frozenset(n for m in found if len(m.src_shape) > 1 for n in m.src),
            stacked=frozenset(n for m in found if m.stack for n in m.src),
            dst={n: m.dst for m in found for n in m.src},
            tied=spec.tied,
        )


@dataclass(frozen=True)
class How:
    """The knobs. As they stand by default, the step is right."""

    parts: Literal["token mean", "mean of means", "sum of means", "sum", "k times"] = "token mean"
    clip: Literal["global", "none", "tensor", "here", "parts", "shares", "update"] = "global"
    clip_eps: float = 0.0  # added to the norm that is divided by
    eps: Literal["outside", "inside", "uncorrected"] = "outside"
    correct_mu: bool = True
    correct_nu: bool = True
    decay: Literal["decoupled", "l2", "l2 before clip", "unscaled"] = "decoupled"
    decays: Literal["matrices", "all", "none", "no embedding", "stacked too"] = "matrices"
    shift: int = 0  # updates by which the schedule is ahead
    apart: bool = False  # the cosine lasts `steps` after the warm-up
    scale: float = 1.0  # of the update
    embedding: Literal["once", "update twice", "decay twice"] = "once"
    moments: Literal["whole", "mu in bfloat16", "bfloat16"] = "whole"
    amsgrad: Literal["no", "corrected", "uncorrected"] = "no"
    numbers: Mapping[str, Any] = field(default_factory=dict)  # other fields of AdamW


RIGHT = How()


def rate(config: AdamW, steps: int, i: int, apart: bool = False) -> float:
    """The learning rate of update i, counted from 0: see `configs.runs.AdamW`."""
    i = max(i, 0)
    if i < config.warmup:
        return config.peak * i / config.warmup
    if config.schedule == "constant":
        return config.peak
    falling = steps if apart else steps - config.warmup
    turn = math.pi * min(1.0, (i - config.warmup) / falling)
    return config.floor + (config.peak - config.floor) * (1 + math.cos(turn)) / 2


def norm(grads: Mapping[str, np.ndarray]) -> float:
    """The L2 norm of all of them together."""
    return math.sqrt(sum(float((g * g).sum()) for g in grads.values()))


def clipped(grads: Arrays, most: float, eps: float = 0.0) -> Arrays:
    """Brought down to a norm of `most`, where theirs is larger."""
    factor = min(1.0, most / size) if (size := norm(grads) + eps) else 1.0
    return {name: g * factor for name, g in grads.items()}


def gradient(setting: Setting, parts: Sequence[Part], how: How) -> Arrays:
    """The micro-batches' gradients made one, and clipped as far as that comes before Adam."""
    k, most = len(parts), setting.config.clip
    tokens = max(1, sum(part.tokens for part in parts))  # without targets the gradient is 0
    share = {  # of a part's summed gradient
        "token mean": lambda part: 1 / tokens,
        "mean of means": lambda part: 1 / (k * max(1, part.tokens)),
        "sum of means": lambda part: 1 / max(1, part.tokens),
        "sum": lambda part: 1.0,
        "k times": lambda part: k / tokens,
    }[how.parts]

    def scaled(grads: Arrays, by: float) -> Arrays:
        return {name: g * by for name, g in grads.items()}

    each = [scaled(part.grads, share(part)) for part in parts]
    if most is not None and how.clip == "parts":  # each part's own mean
        each = [
            scaled(clipped(scaled(p.grads, 1 / n), most), share(p) * n)
            for p in parts
            for n in [max(1, p.tokens)]
        ]
    if most is not None and how.clip == "shares":
        each = [clipped(grads, most) for grads in each]
    total = {name: np.sum([grads[name] for grads in each], axis=0) for name in each[0]}
    if most is None or how.clip not in ("global", "tensor", "here"):
        return total
    groups: dict[str, Arrays] = {}
    for name, g in total.items():
        group = {"global": "", "tensor": name, "here": setting.dst[name]}[how.clip]
        groups.setdefault(group, {})[name] = g
    return {n: g for some in groups.values() for n, g in clipped(some, most, how.clip_eps).items()}


def decay(setting: Setting, name: str, how: How) -> float:
    """The weight decay of that tensor."""
    matrix, embedding = name in setting.decayed, name == setting.embedding
    shrinks = {
        "matrices": matrix,
        "all": True,
        "none": False,
        "no embedding": matrix and not embedding,
        "stacked too": matrix or name in setting.stacked,
    }[how.decays]
    twice = 2 if embedding and how.embedding == "decay twice" else 1
    return twice * setting.config.weight_decay * shrinks


def step(
    setting: Setting,
    before: State,
    parts: Sequence[Part],
    how: How = RIGHT,
    most: Arrays | None = None,
) -> Step:
    """One step from that state.

    `most` holds the largest second moments so far, and is written to: amsgrad alone reads it.
    """
    setting = replace(setting, config=replace(setting.config, **how.numbers))
    config, count = setting.config, before.count + 1
    most = {} if most is None else most
    if how.decay == "l2 before clip":
        extra = {n: decay(setting, n, how) * p for n, p in before.params.items()}
        tokens = sum(part.tokens for part in parts)
        parts = [*parts, Part({n: x * tokens for n, x in extra.items()}, 0)]
    grads = gradient(setting, parts, how)
    speed = how.scale * rate(config, setting.steps, before.count + how.shift, how.apart)
    result = Step({}, {}, {})
    for name, param in before.params.items():
        shrink, g = decay(setting, name, how), grads[name]
        if how.decay == "l2":
            g = g + shrink * param
        mu, nu = before.mu[name], before.nu[name]
        if how.moments == "bfloat16":
            mu, nu = metrics.rounded(mu, BF16), metrics.rounded(nu, BF16)
        old = config.b1 * mu if how.moments != "mu in bfloat16" else _product(config.b1, mu)
        mu = old + (1 - config.b1) * g
        nu = config.b2 * nu + (1 - config.b2) * g * g
        turn = _direction(config, count, mu, nu, how, most, name)
        shift = -speed * turn
        if how.decay == "decoupled":
            shift = shift - speed * shrink * param
        elif how.decay == "unscaled":
            shift = shift - how.scale * shrink * param
        twice = name == setting.embedding and how.embedding == "update twice"
        result.update[name] = 2 * shift if twice else shift
        low = how.moments != "whole"
        result.mu[name] = metrics.rounded(mu, BF16) if low else mu
        result.nu[name] = metrics.rounded(nu, BF16) if how.moments == "bfloat16" else nu
    if how.clip == "update" and config.clip is not None:
        result = replace(result, update=clipped(result.update, config.clip))
    return result


BF16 = np.dtype(ml_dtypes.bfloat16)


def _product(b1: float, mu: np.ndarray) -> np.ndarray:
    """A bfloat16 moment times a number, which is bfloat16 too."""
    return (mu.astype(BF16) * BF16.type(b1)).astype(np.float64)


def _direction(
    config: AdamW, count: int, mu: np.ndarray, nu: np.ndarray, how: How, most: Arrays, name: str
) -> np.ndarray:
    """Adam's own step, before the rate and the decay."""
    first = 1 - config.b1**count if how.correct_mu else 1.0
    second = 1 - config.b2**count if how.correct_nu else 1.0
    if how.amsgrad == "corrected":
        most[name] = np.maximum(most.get(name, 0.0), nu / second)
        nu = most[name] * second
    elif how.amsgrad == "uncorrected":
        nu = most[name] = np.maximum(most.get(name, 0.0), nu)
    if how.eps == "inside":
        return mu / first / np.sqrt(nu / second + config.eps)
    eps = config.eps / math.sqrt(second) if how.eps == "uncorrected" else config.eps
    return mu / first / (np.sqrt(nu / second) + eps)


def errors(got: Step, want: Step) -> dict[str, dict[str, float]]:
    """The relative L2 error of "update", "mu" and "nu", by name."""
    return {
        what: {
            name: metrics.relative_l2(getattr(got, what)[name], x)
            for name, x in getattr(want, what).items()
        }
        for what in ("update", "mu", "nu")
    }


def agree(got: Step, want: Step) -> bool:
    """Within float64's band, in every tensor."""
    return all(  # stops at the first that is not
        metrics.relative_l2(getattr(got, what)[name], x) <= OPTIMIZER
        for what in ("mu", "nu", "update")
        for name, x in getattr(want, what).items()
    )
