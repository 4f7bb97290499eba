"""What a check is going to take, said before it starts: memory, by formula, and time, by a trial."""

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
PACKAGES = 0.9 * GIB  # torch, JAX, transformers, a tokenizer and what XLA compiles
SAVED = 3.0  # values that a forward keeps for its backward, for each that a probe sees
ROOM = 10 * GIB  # beyond that the JAX side's activations are computed again and not kept
COMPILING = 12.0  # seconds that XLA takes for each dtype, on one of two slow cores
BACKWARD = 3.0  # a forward and a backward, in forwards


@dataclass(frozen=True)
class Forecast:
    """Of one check: its peak in bytes, its time in seconds, and whether it recomputes."""

    peak: float
    seconds: float
    remat: bool

    def __str__(self) -> str:
        minutes, seconds = divmod(round(self.seconds), 60)
        took = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        return f"about {self.peak / GIB:.1f} GiB and {took}"


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements: of all parameters, of the embedding, of the logits, of a forward's
    values, and of those that the layers hand on."""

    parameters: int
    embedding: int
    logits: int
    values: int
    handed_on: int


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
        tokens * spec.d * len(spec.layers),
    )
