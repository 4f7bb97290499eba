"""What a spec, or a naming, gets wrong about somebody's own module: found by its logits.

What the module computes is right, and torchref is built again from a spec with one decision
changed, or with two tensors exchanged, until it agrees. What makes it agree is what was wrong.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.configs.spec import from_json, to_json
from jaxtwin.parity.compare.tolerances import AGREES
from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.results import Difference
from jaxtwin.parity.sides import runs
from jaxtwin.parity.table.tensors import Tensor, Tensors

NEARER = 0.7  # a change that leaves more of the error than this is no finding
ROUNDS = 4  # mistakes found one after another, at most
# The decisions that people get wrong, and what else they are in published decoders.
VALUES: dict[str, Sequence[Any]] = {
    "eps": (1e-5, 1e-6, 1e-8, 1e-12),
    "base": (1e4, 1e5, 1.5e5, 5e5, 1e6, 2e6, 1e7),
    "pairs": ("half", "adjacent"),
    "act": ("silu", "gelu", "gelu_tanh", "relu"),
    "offset": (False, True),
    "cap": (None, 30.0, 50.0),
    "window": (None,),
}
SEARCHED = {"eps": (-13.0, -1.0), "base": (1.0, 8.0)}  # the range of its log10
EXCHANGED = (  # tensors of a layer that are taken one for another
    ("ffn.gate.weight", "ffn.up.weight"),
    ("attn.q.weight", "attn.k.weight"),
    ("attn.q.weight", "attn.v.weight"),
    ("attn.k.weight", "attn.v.weight"),
    ("pre_attn.weight", "pre_ffn.weight"),
)


@dataclass(frozen=True)
class Change:
    """One thing that may be otherwise: where, what it is and what it would be; and the model."""

    place: str
    now: str
    other: str
    spec: Model
    tensors: Tensors

    def difference(self, name: str, proven: bool) -> Difference:
        about = (
            "with it the spec gives the module's logits" if proven else "with it they are nearer"
        )
        kind = "weight" if "weight" in self.place else "spec"
        return Difference(kind, self.place, f"{self.other} in {name}", self.now, about)


def search(
    spec: Model,
    tensors: Tensors,
    ids: np.ndarray,
    want: np.ndarray,
    name: str,
    progress: Callable[[str], None] = lambda step: None,
) -> list[Difference]:
    """What must be changed for torchref to give the logits `want` (b t v) of `ids`.

    Empty where nothing that is tried brings them nearer. `name` is the module's.
    """

    def error(change: Change) -> float:
        logits = _logits(change.spec, change.tensors, ids)
        return metrics.relative_l2(logits, want)

    current = Change("", "", "", spec, tensors)
    best, found = error(current), list[Change]()
    while best > AGREES and len(found) < ROUNDS:
        progress(f"float64: what {name} does otherwise than the spec says")
        least, change = _best(_changes(current), error)
        if not least < NEARER * best:
            least, change = _best(_searched(current, error), error)
        if change is None or not least < NEARER * best:
            break
        best, current = least, change
        found.append(change)
    first: dict[str, Change] = {}
    for change in found:  # a number may be found in two steps: a common one, then the right one
        first[change.place] = replace(change, now=first.get(change.place, change).now)
    return [change.difference(name, best <= AGREES) for change in first.values()]


def _best(
    changes: Iterator[Change], error: Callable[[Change], float]
) -> tuple[float, Change | None]:
    """The change that brings the logits nearest; the first that makes them agree."""
    least, best = math.inf, None
    for change in changes:
        off = error(change)
        if off < least:
            least, best = off, change
        if off <= AGREES:
            break
    return least, best


def _logits(spec: Model, tensors: Tensors, ids: np.ndarray) -> np.ndarray:
    import torch

    model = runs.torch_model(spec, tensors, "float64")
    with torch.no_grad():
        out: np.ndarray = model(torch.from_numpy(ids)).numpy()
    return out


def _changes(current: Change) -> Iterator[Change]:
    """Every other value of one decision, in all layers alike, and every exchange of tensors."""
    for places, now in _groups(current.spec):
        key = places[0].rpartition(".")[2]
        values = [*VALUES.get(key, ()), *_scales(current.spec, key)]
        for value in dict.fromkeys(values):
            if value != now and (changed := _with(current, places, now, value)):
                yield changed
    yield from _exchanges(current)


def _groups(spec: Model) -> list[tuple[list[str], Any]]:
    """The places of each decision with its value; first those of all norms' eps together."""
    decisions = _decisions(spec)
    eps: dict[Any, list[str]] = {}
    for place, value in decisions.items():
        if place.endswith("eps"):
            eps.setdefault(value, []).append(place)
    together = [(places, value) for value, places in eps.items() if len(places) > 1]
    return [*together, *(([place], value) for place, value in decisions.items())]


def _scales(spec: Model, key: str) -> list[float | None]:
    """What attention scores or embeddings are multiplied by elsewhere."""
    if key == "embed_scale":
        return [None, math.sqrt(spec.d)]
    width = spec.layers[0].attn.width
    return [None, 1.0, 1 / width, spec.d**-0.5] if key == "scale" else []


def _decisions(spec: Model) -> dict[str, Any]:
    """The decisions by dotted place, those of layers once: "layers.attn.rope.base"."""

    def walk(place: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from walk(f"{place}.{key}" if place else key, inner)
        elif not isinstance(value, list):
            yield place, value

    data = to_json(spec)
    layers = [block for run in data.pop("runs") for block in run["blocks"]]
    out = dict(walk("", data))
    for block in layers:
        out |= {f"layers.{place}": value for place, value in walk("", block)}
    return out


def _with(current: Change, places: Sequence[str], now: Any, value: Any) -> Change | None:
    """The spec with that decision made otherwise wherever it is made so now."""
    data = copy.deepcopy(to_json(current.spec))
    blocks = [block for run in data["runs"] for block in run["blocks"]]
    for place in places:
        *path, key = place.removeprefix("layers.").split(".")
        for at in blocks if place.startswith("layers.") else [data]:
            for part in path:
                at = at.get(part) if isinstance(at, Mapping) else None
            if isinstance(at, dict) and key in at and at[key] == now:
                at[key] = value
    place = places[0] if len(places) == 1 else "every norm's eps"
    try:
        return Change(place, f"{now}", f"{value}", from_json(data, "a spec"), current.tensors)
    except BadInput:
        return None


def _exchanges(current: Change) -> Iterator[Change]:
    layers = range(len(current.spec.layers))
    for one, other in EXCHANGED:
        tensors, done = dict(current.tensors), True
        for i in layers:
            a, b = f"layers.{i}.{one}", f"layers.{i}.{other}"
            done &= a in tensors and b in tensors and tensors[a].shape == tensors[b].shape
            if done:
                tensors[a], tensors[b] = tensors[b], tensors[a]
        if done:
            place = f"layers.{{l}}.{one}"
            yield Change(place, "as named", f"what is named {other}", current.spec, tensors)
    for part in ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down"):
        names = [f"layers.{i}.{part}.weight" for i in layers]
        shapes = {current.tensors[n].shape for n in names if n in current.tensors}
        if len(shapes) == 1 and len(set(*shapes)) == 1:
            turned = {n: _transposed(current.tensors[n]) for n in names if n in current.tensors}
            tensors = {**current.tensors, **turned}
            place = f"layers.{{l}}.{part}.weight"
            yield Change(place, "as named", "its transpose (.T)", current.spec, tensors)


def _transposed(tensor: Tensor) -> Tensor:
    return Tensor(tensor.shape, tensor.dtype, lambda: np.ascontiguousarray(tensor.read().T))


def _searched(current: Change, error: Callable[[Change], float]) -> Iterator[Change]:
    """Numbers that no list has: the nearest by search, then the round numbers next to it."""
    from scipy.optimize import minimize_scalar

    for places, now in _groups(current.spec):
        key = places[0].rpartition(".")[2]
        if key not in SEARCHED or not isinstance(now, float):
            continue

        def off(x: float, places: list[str] = places, now: float = now) -> float:
            changed = _with(current, places, now, 10.0**x)
            return math.inf if changed is None else error(changed)

        low, high = SEARCHED[key]
        grid = np.linspace(low, high, 25)
        at = grid[int(np.argmin([off(float(x)) for x in grid]))]
        step = grid[1] - grid[0]
        near = minimize_scalar(off, bounds=(at - step, at + step), method="bounded").x
        for digits in (1, 2, 3, 6):
            value = float(f"{10.0**near:.{digits - 1}e}")
            if value != now and (changed := _with(current, places, now, value)):
                yield changed
