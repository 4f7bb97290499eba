"""What a layer returns besides its output: losses to train with, and statistics to look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxtyping import Array, Float


class Aux(NamedTuple):
    """`losses` are added to the training loss, weighted already; `stats` are for the metrics."""

    losses: dict[str, Float[Array, ""]]
    stats: dict[str, Array]


NO_AUX = Aux({}, {})  # of a part that says nothing


def merged(layers: Iterable[Aux]) -> Aux:
    """Of all layers in order: each loss summed, each statistic named "layers.3.load"."""
    losses: dict[str, Array] = {}
    stats: dict[str, Array] = {}
    for i, aux in enumerate(layers):
        for name, x in aux.losses.items():
            losses[name] = losses[name] + x if name in losses else x
        stats |= {f"layers.{i}.{name}": x for name, x in aux.stats.items()}
    return Aux(losses, stats)
