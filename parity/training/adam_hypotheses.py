"""Which mistake an optimizer makes: the one that the reference's step, made to make it, repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from jaxtwin.parity.compare.tolerances import OPTIMIZER
from jaxtwin.parity.report.results import Cause
from jaxtwin.parity.training import adam
from jaxtwin.parity.training.adam import Arrays, How, ObservedStep, Setting


@dataclass(frozen=True)
class Divergence:
    """Steps of one optimizer, in their order, each from the reference's state and gradients."""

    setting: Setting
    observed: tuple[ObservedStep, ...]


Ways = Callable[[Divergence], Iterable[tuple[How, str]]]  # each with a number for the text


@dataclass(frozen=True)
class Hypothesis:
    """`about` goes on from "the JAX side ..."; {} in it is the number that was found."""

    name: str
    about: str
    advice: str
    ways: Ways


HYPOTHESES: list[Hypothesis] = []


def hypothesis(name: str, about: str, advice: str, *ways: How) -> None:
    HYPOTHESES.append(
        Hypothesis(name, about, advice, lambda divergence: [(how, "") for how in ways])
    )


def fitted(name: str, about: str, advice: str, fit: Callable[[Divergence], Iterable[float]],
           how: Callable[[float], How]) -> None:  # fmt: skip
    """A number that is wrong: fitted to what was seen, then tried as it is and rounded."""

    def ways(divergence: Divergence) -> Iterator[tuple[How, str]]:
        for x in fit(divergence):
            for digits in (3, 6, 17):
                if np.isfinite(x):
                    value = float(f"{x:.{digits}g}")
                    yield how(value), f"{value:.6g}"

    HYPOTHESES.append(Hypothesis(name, about, advice, ways))


def explain(divergence: Divergence) -> list[Cause]:
    """The mistakes that the steps seen are made with, each of them alone.

    Empty where the steps are right, and where no mistake known here makes them. More than one:
    these steps cannot tell them apart, which `about` then says, and none of them is proven.
    """
    if _repeats(divergence, adam.RIGHT):
        return []
    found = []
    for known in HYPOTHESES:
        for how, value in known.ways(divergence):
            if _repeats(divergence, how):
                found.append((known, known.about.format(value)))
                break
    out = []
    for known, about in found:
        others = [other.name for other, _ in found if other is not known]
        if others:
            about += f" (or {', or '.join(others)}: on these steps they are the same)"
        out.append(Cause(known.name, about, known.advice, "optimizer", (), 1.0, proven=not others))
    return out


def _repeats(divergence: Divergence, how: How) -> bool:
    most: Arrays = {}
    return bool(divergence.observed) and all(
        adam.agree(
            adam.step(divergence.setting, observed.before, observed.parts, how, most),
            observed.result,
        )
        for observed in divergence.observed
    )


# ---- numbers that can be read off ----------------------------------------------------------------


def _slope(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """The one c with y = c x nearest, over all pairs (x, y)."""
    xy = xx = 0.0
    for x, y in pairs:
        xy, xx = xy + float((x * y).sum()), xx + float((x * x).sum())
    return [xy / xx] if xx else []


def _beta(moment: str, power: int) -> Callable[[Divergence], list[float]]:
    """From new = b old + (1 - b) g^power."""

    def fit(divergence: Divergence) -> list[float]:
        def pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for observed in divergence.observed:
                grads = adam.gradient(divergence.setting, observed.parts, adam.RIGHT)
                for name, g in grads.items():
                    old, new = (
                        getattr(observed.before, moment)[name],
                        getattr(observed.result, moment)[name],
                    )
                    size = np.abs(g**power).max() or 1.0  # every tensor counts alike
                    yield (old - g**power) / size, (new - g**power) / size

        return [b for b in _slope(pairs()) if 0 <= b < 1]

    return fit


def _right(
    divergence: Divergence, how: How = adam.RIGHT
) -> Iterator[tuple[ObservedStep, adam.Step]]:
    for observed in divergence.observed:
        yield observed, adam.step(divergence.setting, observed.before, observed.parts, how)


def _scale(divergence: Divergence) -> list[float]:
    found = _slope(
        (want.update[n], x)
        for observed, want in _right(divergence)
        for n, x in observed.result.update.items()
    )
    return [c for c in found if c != 0 and abs(c + 1) > OPTIMIZER]  # -1 has a name of its own


def _decay(divergence: Divergence) -> list[float]:
    """From what is left of the update when Adam's own step is taken away."""

    def pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        setting = divergence.setting
        for observed, want in _right(divergence, How(decays="none")):
            speed = adam.rate(setting.config, setting.steps, observed.before.count)
            for n in setting.decayed:
                yield -speed * observed.before.params[n], observed.result.update[n] - want.update[n]

    return [c for c in _slope(pairs()) if c > 1e-9]


def _clip(divergence: Divergence) -> list[float]:
    """The norm of what went into the first moment, where that is less than the gradient's."""
    b1 = divergence.setting.config.b1
    out = []
    for observed in divergence.observed:
        total = adam.norm(adam.gradient(divergence.setting, observed.parts, How(clip="none")))
        old = observed.before.mu
        size = adam.norm({n: (x - b1 * old[n]) / (1 - b1) for n, x in observed.result.mu.items()})
        if size < total * (1 - 1e-9):
            out.append(size)
    return out


def _eps(divergence: Divergence) -> list[float]:
    """From -rate m / (sqrt(v) + eps), where v is smallest and so eps shows most."""
    setting = divergence.setting
    roots, values = [], []
    for observed in divergence.observed:
        count = observed.before.count + 1
        speed = adam.rate(setting.config, setting.steps, observed.before.count)
        for n, x in observed.result.update.items():
            adam_step = -x - speed * adam.decay(setting, n, adam.RIGHT) * observed.before.params[n]
            m = observed.result.mu[n] / (1 - setting.config.b1**count)
            root = np.sqrt(observed.result.nu[n] / (1 - setting.config.b2**count))
            some = (root > 0) & (adam_step != 0)
            roots.append(root[some])
            values.append(speed * m[some] / adam_step[some] - root[some])
    if not roots:
        return []
    at = np.argsort(np.concatenate(roots))[:25]
    found = float(np.median(np.concatenate(values)[at])) if len(at) else 0.0
    return [found] if found > 0 else []


# ---- the catalogue -------------------------------------------------------------------------------

hypothesis(
    "eps-inside-root",
    "adds eps inside the square root",
    "give it as eps, and leave eps_root at 0",
    How(eps="inside"),
)
hypothesis(
    "eps-before-correction",
    "adds eps to the root of the second moment before the bias correction",
    "correct both moments first, then take the root and add eps",
    How(eps="uncorrected"),
)
hypothesis(
    "mu-not-corrected",
    "does not correct the first moment for its start at zero",
    "divide mu by 1 - b1^count",
    How(correct_mu=False),
)
hypothesis(
    "nu-not-corrected",
    "does not correct the second moment for its start at zero",
    "divide nu by 1 - b2^count",
    How(correct_nu=False),
)
hypothesis(
    "moments-not-corrected",
    "corrects neither moment for its start at zero",
    "divide mu by 1 - b1^count and nu by 1 - b2^count",
    How(correct_mu=False, correct_nu=False),
)
hypothesis(
    "scales-decayed",
    "decays norm scales and biases too",
    "give optax.adamw a mask that is true for matrices and the embedding alone",
    How(decays="all"),
)
hypothesis(
    "stacked-scales-decayed",
    "decays the scales of stacked layers, which look like matrices",
    "make the mask from the parameters' letters and not from ndim",
    How(decays="stacked too"),
)
hypothesis(
    "embedding-not-decayed",
    "does not decay the embedding",
    "let the mask be true for the embedding",
    How(decays="no embedding"),
)
hypothesis(
    "nothing-decayed",
    "decays nothing",
    "use optax.adamw (adam has no decay), with weight_decay and a mask that is not all false",
    How(decays="none"),
)
hypothesis(
    "decay-coupled",
    "adds the decay to the gradient, as L2 regularization",
    "add the decayed weights after Adam's own step, as optax.adamw does",
    How(decay="l2"),
    How(decay="l2 before clip"),
)
hypothesis(
    "decay-not-scaled",
    "does not multiply the decay by the learning rate",
    "put add_decayed_weights before the scaling by the learning rate",
    How(decay="unscaled"),
)
hypothesis(
    "clip-missing",
    "does not clip the gradient",
    "put optax.clip_by_global_norm first in the chain",
    How(clip="none"),
)
hypothesis(
    "clip-per-tensor",
    "clips every tensor by its own norm",
    "clip by the norm of all gradients together (optax.clip_by_global_norm)",
    How(clip="here"),
    How(clip="tensor"),
)
hypothesis(
    "clip-per-part",
    "clips each micro-batch's gradient instead of their mean",
    "accumulate first, then clip once",
    How(clip="parts"),
    How(clip="parts", parts="mean of means"),
    How(clip="shares"),
    How(clip="shares", parts="mean of means"),
)
hypothesis(
    "clip-of-update",
    "clips the update instead of the gradient",
    "put the clip in front of AdamW in the chain",
    How(clip="update"),
)
hypothesis(
    "clip-norm-eps",
    "divides by the norm plus 1e-6, as torch.nn.utils.clip_grad_norm_ does",
    "divide by the norm itself, as optax.clip_by_global_norm does",
    How(clip_eps=1e-6),
)
hypothesis(
    "parts-summed",
    "sums the micro-batches' gradients and does not average them",
    "divide by the number of targets in the whole batch",
    How(parts="k times"),
    How(parts="sum of means"),
    How(parts="sum"),
)
hypothesis(
    "mean-of-means",
    "averages the micro-batches' means, however many targets each has",
    "sum the losses and divide by the number of targets in the whole batch",
    How(parts="mean of means"),
)
hypothesis(
    "schedule-early",
    "uses the learning rate of the next update",
    "count updates from 0 in the schedule",
    How(shift=1),
)
hypothesis(
    "schedule-late",
    "uses the learning rate of the update before",
    "count updates from 0 in the schedule",
    How(shift=-1),
)
hypothesis(
    "warmup-apart",
    "counts the warm-up apart, so that the decay ends that much later",
    "decay_steps of optax's schedule includes the warm-up: give it the whole length",
    How(apart=True),
)
hypothesis(
    "mu-bfloat16",
    "keeps the first moment in bfloat16",
    "keep the moments in float32: leave mu_dtype out, with float32 parameters",
    How(moments="mu in bfloat16"),
)
hypothesis(
    "moments-bfloat16",
    "keeps both moments in bfloat16",
    "keep parameters and moments in float32",
    How(moments="bfloat16"),
)
hypothesis(
    "update-sign",
    "goes up the gradient",
    "scale by the negative learning rate, once",
    How(scale=-1.0),
)
hypothesis(
    "embedding-updated-twice",
    "updates the tied embedding twice",
    "keep one parameter for the embedding and the head",
    How(embedding="update twice"),
)
hypothesis(
    "embedding-decayed-twice",
    "decays the tied embedding twice",
    "decay the shared parameter once",
    How(embedding="decay twice"),
)
hypothesis(
    "amsgrad",
    "divides by the largest second moment so far (AMSGrad)",
    "use optax.adamw, or amsgrad in torch too",
    How(amsgrad="corrected"),
    How(amsgrad="uncorrected"),
)
SET = "set it to the reference's value, and leave no default in place"
fitted("b1", "has b1 = {}", SET, _beta("mu", 1), lambda x: How(numbers={"b1": x}))
fitted("b2", "has b2 = {}", SET, _beta("nu", 2), lambda x: How(numbers={"b2": x}))
fitted("eps", "has eps = {}", SET, _eps, lambda x: How(numbers={"eps": x}))
fitted("clip", "clips at {}", SET, _clip, lambda x: How(numbers={"clip": x}))
fitted(
    "weight-decay",
    "has a weight decay of {}",
    SET + " (optax.adamw has 1e-4, torch's AdamW 1e-2)",
    _decay,
    lambda x: How(numbers={"weight_decay": x}),
)
fitted(
    "rate-scale",
    "multiplies the update by {}",
    "give both sides the same peak learning rate, and scale by it once",
    _scale,
    lambda x: replace(adam.RIGHT, scale=x),
)
