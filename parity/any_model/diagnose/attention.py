"""Attention that mixes otherwise: recomputed from the probed queries, keys and values.

The probes "PLACE/q", "PLACE/k" (both rotated), "PLACE/v" and "PLACE/mixed" are known by the last
word of their names in JAX, and their axes by the letters of their rows: b, t, n or k for the heads,
h.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from jaxtwin.parity.any_model.diagnose.relations import Change, Unlike, same
from jaxtwin.parity.sides import probes
from jaxtwin.parity.sides.hypothesis import Live
from jaxtwin.parity.table import axis_ops
from jaxtwin.parity.table.row import Row

HIDDEN = -1e30


@dataclass(frozen=True)
class Way:
    """How attention is computed: each field is one thing that a port may do otherwise."""

    scale: float  # of the scores
    ahead: int | None = 0  # how far ahead a token sees; -1: not even itself; None: everything
    window: int | None = None  # how many tokens back it sees, itself among them
    tiled: bool = False  # key/value heads 0 1 0 1, and not 0 0 1 1


def mixed_otherwise(unlike: Unlike) -> Iterator[Change]:
    """Of a probe called "mixed": the way that gives torch's value, and the one that gives JAX's."""
    roles = _roles(unlike) if unlike.role == "mixed" else None
    if roles is None:
        return
    q, k, v = (_heads_first(unlike.inside[n].double(), unlike.rows[n]) for n in roles)
    row = unlike.rows[unlike.name]
    got, want = (_heads_first(x, row) for x in (unlike.got, unlike.want))
    theirs = next((w for w in _ways(q, k) if same(want, mixed(q, k, v, w), unlike.close)), None)
    if theirs is None:
        return
    first = probes.layer(unlike.name)
    for ours in _others(theirs, q, k):
        if not same(got, mixed(q, k, v, ours), unlike.close):
            continue

        def of_values(x: Tensor, live: Live, name: str, ours: Way = ours) -> Tensor:
            layer = probes.layer(name)
            at = [
                n if first is None else probes.in_layer(probes.part(n), layer) for n in roles or ()
            ]
            parts = [_heads_first(live[n], unlike.rows[n]) for n in at]
            return _as_row(mixed(parts[0], parts[1], parts[2], ours), unlike.rows[name], x)

        yield Change(*_words(theirs, ours, q.shape[-1]), of_values)


def _roles(unlike: Unlike) -> tuple[str, str, str] | None:
    """The probes of q, k and v beside it."""
    found = tuple(unlike.sibling(role) for role in "qkv")
    row = unlike.row
    if row is None or not all(name in unlike.rows and name in unlike.inside for name in found):
        return None
    letters = [set(_letters(unlike.rows[name])) for name in (*found, unlike.name)]
    return found if all({"t", "h"} <= each for each in letters) else None  # type: ignore[return-value]


def _letters(row: Row) -> list[str]:
    return axis_ops.letters(axis_ops.sides(row.pattern)[0])


def _order(row: Row) -> list[str]:
    """The letters with time and head last, and the heads before them."""
    letters = _letters(row)
    heads = [letter for letter in letters if letter in ("n", "k")]
    rest = [letter for letter in letters if letter not in (*heads, "t", "h")]
    return [*rest, *heads, "t", "h"]


def _heads_first(x: Tensor, row: Row) -> Tensor:
    """(b n t h), of whatever layout the row says."""
    letters = _letters(row)
    x = x.reshape([dict(row.sizes)[letter] for letter in letters])
    return x.permute([letters.index(letter) for letter in _order(row)])


def _as_row(x: Tensor, row: Row, like: Tensor) -> Tensor:
    """The inverse, in the shape of `like`."""
    order = _order(row)
    return x.permute([order.index(letter) for letter in _letters(row)]).reshape(like.shape)


def mixed(q: Tensor, k: Tensor, v: Tensor, way: Way) -> Tensor:
    """The values, mixed by attention: q (b n t h), k and v (b k t h) -> (b n t h)."""
    if k.ndim == q.ndim == 4 and k.shape[1] != q.shape[1]:
        copies = q.shape[1] // k.shape[1]
        repeat = [1, copies, 1, 1]
        k, v = (
            x.repeat(repeat) if way.tiled else x.repeat_interleave(copies, dim=1) for x in (k, v)
        )
    scores = way.scale * (q @ k.transpose(-1, -2))
    rows, columns = (torch.arange(n) for n in scores.shape[-2:])
    gap = rows[:, None] - columns[None]
    hidden = torch.zeros_like(gap, dtype=torch.bool)
    if way.ahead is not None:
        hidden |= gap < -way.ahead
    if way.window is not None:
        hidden |= gap >= way.window
    return scores.masked_fill(hidden, HIDDEN).softmax(-1) @ v


def _scales(q: Tensor) -> list[float]:
    width = q.shape[-1]
    model = width * q.shape[1] if q.ndim == 4 else width
    return [width**-0.5, 1.0, 1 / width, model**-0.5, width**0.5, width**-0.25]


def _ways(q: Tensor, k: Tensor) -> Iterator[Way]:
    """What people's attention does, the usual first."""
    windows = [None, *range(1, q.shape[-2])]
    tiled = (False, True) if q.shape[1] != k.shape[1] else (False,)
    yield from (
        Way(scale, ahead, window, tile)
        for window, tile, ahead, scale in itertools.product(windows, tiled, (0, None), _scales(q))
    )


def _others(way: Way, q: Tensor, k: Tensor) -> Iterator[Way]:
    """Ways that are otherwise in one thing, then in two."""
    changes: list[tuple[str, Any]] = [("scale", scale) for scale in _scales(q)]
    changes += [("ahead", ahead) for ahead in (0, 1, -1, None)]
    changes += [("window", window) for window in (None, *range(1, q.shape[-2]))]
    changes += [("tiled", not way.tiled)] if q.shape[1] != k.shape[1] else []
    changes = [(name, value) for name, value in changes if getattr(way, name) != value]
    for change in changes:
        yield _changed(way, change)
    for both in itertools.combinations(changes, 2):
        if both[0][0] != both[1][0]:
            yield _changed(way, *both)


def _changed(way: Way, *changes: tuple[str, Any]) -> Way:
    values: dict[str, Any] = dict(changes)
    return replace(way, **values)


def _words(theirs: Way, ours: Way, width: int) -> tuple[str, str, str]:
    """The name, what the JAX side does, and what to change."""
    changed = [f.name for f in fields(Way) if getattr(theirs, f.name) != getattr(ours, f.name)]
    told = {
        "tiled": (
            "tile-not-repeat" if ours.tiled else "repeat-not-tile",
            "tiles the key/value heads (0 1 0 1) instead of repeating each (0 0 1 1)"
            if ours.tiled
            else "repeats each key/value head (0 0 1 1) where torch tiles them (0 1 0 1)",
        ),
        "scale": (
            "scale-missing" if ours.scale == 1 else "scale-off",
            "does not scale the scores"
            if ours.scale == 1
            else f"multiplies the scores by {ours.scale:.6g}, torch by {theirs.scale:.6g}",
        ),
        "ahead": _ahead(ours.ahead),
        "window": (
            "window-missing" if ours.window is None else "window-size",
            "sees all tokens, and not the last ones alone"
            if ours.window is None
            else f"sees the last {ours.window} tokens",
        ),
    }
    name = told[changed[0]][0]
    about = ", and ".join(told[field][1] for field in changed)
    return name, about, "compute the scores and their mask as torch does"


def _ahead(ahead: int | None) -> tuple[str, str]:
    if ahead is None:
        return "not-causal", "lets every token see the whole sequence"
    if ahead > 0:
        return "causal-corner", "lets each token see the one after it"
    if ahead < 0:
        return "diagonal-hidden", "hides each token from itself"
    return "causal", "hides the tokens that come after"
