"""Inputs that can see a fault: hundreds of tokens, rare ids, padding and packed documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtwin.configs import Model


@dataclass(frozen=True)
class Inputs:
    """Two rows (b t): one plain text, one of two packed documents with padding before and after.

    `counted` (b t-1) marks the positions whose next token is a target: same document, no padding.
    """

    ids: np.ndarray
    positions: np.ndarray
    segments: np.ndarray

    @property
    def counted(self) -> np.ndarray:
        same = self.segments[:, 1:] == self.segments[:, :-1]
        return same & (self.segments[:, 1:] > 0)


TEXT = Path(__file__).with_name("text.txt")


def check_inputs(
    spec: Model, tokens: int, seed: int = 0, encode: Callable[[str], Sequence[int]] | None = None
) -> Inputs:
    """Two rows of `tokens` ids, or of max_len where that is less.

    Text where there is a tokenizer's `encode`: a trained model's rounding noise on random ids is
    not its noise at work. Without one, random ids over the whole vocabulary, a third of them
    repeats of an earlier stretch. Either way the vocabulary's two ends and some more rare ids are
    in. A prompt of a few tokens sees no rotary fault, and text alone never shows a rare id.
    """
    t = min(tokens, spec.max_len)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, spec.vocab, (2, t))
    third = t // 3
    ids[:, t - third :] = ids[:, :third]
    if encode is not None:
        text = np.array(encode(TEXT.read_text("utf-8")))
        ids[0] = np.resize(text, t)
        ids[1, : t - t // 8] = np.resize(text[len(text) // 2 :], t)[: t - t // 8]
    pad, cut = t // 16, t // 2
    end = t - pad
    ids[1, end - 2 : end] = (spec.vocab - 1, 0)
    segments = np.zeros((2, t), np.int64)
    segments[0] = segments[1, pad:cut] = 1
    segments[1, cut:end] = 2
    positions = np.tile(np.arange(t), (2, 1))
    positions[1] = 0
    positions[1, pad:cut] = np.arange(cut - pad)
    positions[1, cut:end] = np.arange(end - cut)
    return Inputs(ids, positions, segments)


def blind(spec: Model, inputs: Inputs) -> list[str]:
    """Which mechanisms of the spec this input cannot exercise, in words."""
    out = []
    t = inputs.ids.shape[1]
    attentions = [block.attn for block in spec.layers]
    if t < spec.max_len:
        out.append(f"positions from {t} to {spec.max_len - 1}: the input has {t} of them")
    turned = [(a.rope, a.rope.width or a.width) for a in attentions if a.rope is not None]
    slowest = max((2 * np.pi * r.base ** (1 - 2 / width) for r, width in turned), default=0)
    if slowest > t:
        part = f"{t / slowest:.1%}" if slowest else "0%"
        out.append(f"slow rotary pairs: the slowest turns by {part} of a circle in {t} positions")
    windows = {a.window for a in attentions if a.window is not None and a.window >= t}
    for window in sorted(windows):
        out.append(f"the window of {window}: the input has {t} tokens, and none is outside")
    lengths = {getattr(rope.scaling, "original", 0) for rope, _ in turned}
    for length in sorted(x for x in lengths if x >= t):
        out.append(f"rotary positions from {length}, where they are scaled otherwise")
    unused = spec.vocab - len(np.unique(inputs.ids))
    if unused:
        out.append(f"rows of the embedding for the {unused} of {spec.vocab} ids that do not occur")
    if len(np.unique(inputs.segments)) < 2:
        out.append("masks between packed documents: the input has one document in a row")
    if all(a.kv in (1, a.heads) for a in attentions):
        out.append("the order of key/value groups: with one or all heads there is none")
    return out
