"""What a check will take, said before it starts: memory by formula, and time by a trial."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.parity.sides import probes
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import src_shapes

GIB = 2**30
PACKAGES = 0.6 * GIB  # torch, JAX, transformers, and what XLA compiles
ROOM = 10 * GIB  # beyond that time is spent to save memory
# A forward keeps for its backward so many values for each that a probe sees (measured).
SAVED = {"torch": 1.4, "jax": 3.0}
STARTING, COMPILING = 10.0, 12.0  # seconds: to import and read; for XLA and the rest, each dtype
TRIAL = 768  # rows of the square matrices that are multiplied to see how fast the machine is


@dataclass(frozen=True)
class Forecast:
    """Of one check: its peak in bytes, its time in seconds, and whether it has to save memory."""

    peak: float
    seconds: float
    sparing: bool

    def __str__(self) -> str:
        minutes, seconds = divmod(round(self.seconds), 60)
        took = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        return f"about {self.peak / GIB:.1f} GiB and {took}"


def forecast(
    spec: Model, shape: tuple[int, int], dtypes: Sequence[str], *, probes: bool, held: int
) -> Forecast:
    """For an input of that shape (b t); `held` are the bytes of the weights, where in memory.

    The peak is that of the runs in float64: every check makes one of torch's, and what it gives is
    kept. Where the JAX side would pass ROOM, it computes its activations again for the backward.
    """
    of = sizes(spec, shape)
    kept = of.parameters + of.logits  # of the reference: its gradients and logits
    twice = of.embedding if spec.tied else 0  # a gradient that is the sum of two
    torch = 2 * of.parameters + of.logits + 3 * twice + SAVED["torch"] * of.values
    jax = kept + 2 * of.parameters + 2 * of.logits
    saved = SAVED["jax"] * of.values
    if probes:  # what is seen is kept: values and cotangents of either side
        torch, jax = torch + 2 * of.values, jax + 6 * of.values
    base = PACKAGES + held
    compared = "float64" in dtypes
    sparing = base + 8 * (jax + saved) > ROOM if compared else base + 8 * torch > ROOM
    peak = 8 * max(torch, compared * (jax + (0 if sparing or probes else saved)))
    return Forecast(base + peak, _seconds(of, shape, dtypes), sparing)


def _seconds(of: Sizes, shape: tuple[int, int], dtypes: Sequence[str]) -> float:
    """Two multiplications and additions a parameter and token, thrice for a forward and a backward.

    In float64 by torch and by JAX, and a forward for the cache; in each other dtype by torch, by
    JAX and by transformers, which takes half as long.
    """
    passes = 2.5 + 1.5 * len([d for d in dtypes if d != "float64"])
    work = 6.0 * of.parameters * math.prod(shape) * passes
    return STARTING + COMPILING * len(dtypes) + work / _speed()


def _speed() -> float:
    """Operations a second in float64, by a trial of a tenth of a second or so."""
    x = np.random.default_rng(0).normal(size=(TRIAL, TRIAL))
    x @ x
    began = time.perf_counter()
    x @ x
    return 2.0 * TRIAL**3 / (time.perf_counter() - began)


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements: of all parameters, the embedding, the logits, and a forward's values."""

    parameters: int
    embedding: int
    logits: int
    values: int


def sizes(spec: Model, shape: tuple[int, int]) -> Sizes:
    """For an input of that shape (b t)."""
    named = dict(src_shapes(decoder_table.rows(spec, "unroll")))
    tokens = math.prod(shape)
    values = 0
    for row in probes.rows(spec, "unroll", shape):
        for move in row.moves():
            letters = move.pattern.split("->")[0].replace("(", " ").replace(")", " ").split()
            values += math.prod(move.sizes[a] for a in letters)
    logits = tokens * spec.vocab
    scores = sum(shape[0] * shape[1] ** 2 * block.attn.heads for block in spec.layers)
    return Sizes(
        sum(map(math.prod, named.values())),
        spec.vocab * spec.d,
        logits,
        values - logits + scores,
    )
