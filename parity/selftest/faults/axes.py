"""Faults in what only some models have: windows, caps, norms of heads, biases, added positions."""

from __future__ import annotations

from typing import Any

from jaxtwin.jaxmodel.attention import Attention, NormedHeads, SinkSoftmax, Window
from jaxtwin.jaxmodel.bias import Bias
from jaxtwin.jaxmodel.block import PostBlock
from jaxtwin.jaxmodel.model import Scale
from jaxtwin.jaxmodel.position import (
    AlibiBias,
    LearnedPositions,
    Rotary,
    SinusoidalPositions,
)
from jaxtwin.parity.selftest.faults.base import NoPlace, add
from jaxtwin.parity.selftest.faults.making import ModelEdit, calling, set_to, setting


def _dropped(part: type) -> ModelEdit:
    """The part hands on what it is given."""
    return calling(part, lambda call, self, x, *more: x)


def _bias_missing(matrix: str) -> ModelEdit:
    """Of one projection: the Bias that belongs to it adds nothing."""

    def change(attention: Any) -> None:
        if not isinstance(bias := getattr(attention, matrix), Bias):
            raise NoPlace("the projection has no bias")
        call = {"__call__": lambda self, x: x}
        bias.__class__ = type("Bias", (type(bias),), call)

    return setting(Attention, change)


def _unscaled(rotate: Any) -> None:
    """Plain frequencies, of the base that the scaled ones were made of: the first pair's is 1."""
    scaled = rotate.frequency
    if rotate.magnitude == 1:
        raise NoPlace("the frequencies have no magnitude")
    rotate.magnitude, rotate.frequency = 1.0, tuple(scaled)


def _by_slot(call: Any, self: Any, x: Any, positions: Any) -> Any:
    import jax.numpy as jnp

    return call(x, jnp.broadcast_to(jnp.arange(x.shape[1]), positions.shape))


def _alpha(block: Any) -> None:
    if block.alpha == 1:
        raise NoPlace("the residual stream is not multiplied")
    block.alpha = 1.0


add(
    "window-missing",
    "no window where there is one",
    edit=calling(Window, lambda w, self, mask, offset: mask),
)
add(
    "window-size",
    "a window that sees one token too many",
    edit=setting(Window, set_to(size=lambda w: w.size + 1)),
)
add(
    "window-too-small",
    "a window that does not count the token itself",
    "window-size",
    edit=setting(Window, set_to(size=lambda w: w.size - 1)),
)
add("relative-missing", "no ALiBi", edit=_dropped(AlibiBias))
add(
    "qk-norm-missing",
    "queries and keys not normed",
    "norm-missing",
    edit=_dropped(NormedHeads),
)
for _matrix in ("q_bias", "k_bias", "v_bias", "o_bias"):
    add(
        f"{_matrix.replace('_', '-')}-missing",
        f"the bias of {_matrix[0]} left out",
        "bias-missing",
        edit=_bias_missing(_matrix),
    )
add(
    "embed-scale-missing",
    "the embedding not scaled",
    edit=_dropped(Scale),
    layered=False,
)
add(
    "learned-missing",
    "learned positions left out",
    "position-missing",
    edit=_dropped(LearnedPositions),
    layered=False,
)
add(
    "sinusoidal-missing",
    "sinusoidal positions left out",
    "position-missing",
    edit=_dropped(SinusoidalPositions),
    layered=False,
)
add(
    "learned-by-slot",
    "the vectors of slots, whatever the positions",
    "positions-ignored",
    edit=calling(LearnedPositions, _by_slot),
    layered=False,
)
add(
    "sinks-missing",
    "attention sinks left out of the softmax",
    edit=calling(SinkSoftmax, lambda f, self, scores: self.normalize(scores)),
)
add("residual-scale-missing", "DeepNorm's alpha left out", edit=setting(PostBlock, _alpha))
add(
    "rope-magnitude-missing",
    "cos and sin not multiplied by YaRN's magnitude",
    edit=setting(Rotary, _unscaled),
)
