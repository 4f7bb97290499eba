"""How JAX's value at a probe follows from torch's: scaled, permuted, shifted, summed otherwise.

Each is found by looking at both, and is proven by making torch's value so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from jaxtwin.parity.sides import probes
from jaxtwin.parity.sides.hypothesis import Live, ValueEdit
from jaxtwin.parity.sides.probes import INPUT
from jaxtwin.parity.table import axis_ops
from jaxtwin.parity.table.row import Row

MOST_ENTRIES = 1024  # of an axis whose order is looked at
MOST_SUMMANDS = 24  # values of the stretch that may have been added or left out


@dataclass(frozen=True)
class Change:
    """A mistake of a value: what the JAX side does, what to change, and torch made to do it."""

    name: str
    about: str
    advice: str
    of_values: ValueEdit


@dataclass(frozen=True)
class Unlike:
    """A probe's value that differs: JAX's (`got`) and torch's (`want`), in torch's layout.

    `rows` are all probes' by torch's names, `inside` everything that torch computed by place, in
    order; `close` is the relative error up to which two are taken for the same.
    """

    name: str
    got: Tensor
    want: Tensor
    rows: Mapping[str, Row]
    inside: Mapping[str, Any]
    close: float
    modules: Mapping[str, Any]

    @property
    def row(self) -> Row | None:
        return self.rows.get(self.name)

    @cached_property
    def letters(self) -> list[str]:
        """One for each axis of `split`."""
        if self.row is None:
            return [f"x{i}" for i in range(self.want.ndim)]
        return axis_ops.letters(axis_ops.sides(self.row.pattern)[0])

    @cached_property
    def sizes(self) -> list[int]:
        if self.row is None:
            return list(self.want.shape)
        return [dict(self.row.sizes)[letter] for letter in self.letters]

    def split(self, x: Tensor) -> Tensor:
        """With an axis for each letter."""
        return x.reshape(self.sizes)

    def close_to(self, x: Tensor) -> bool:
        """Whether that is JAX's value."""
        return same(self.got, x, self.close)

    def sibling(self, role: str) -> str:
        """torch's name of the probe "PLACE/role" where this one is "PLACE/another"; "" if none."""
        if self.row is None:
            return ""
        place = _placed(self.row)[0]
        alike = (name for name, row in self.rows.items() if _placed(row) == (place, role))
        return next(alike, "")

    @property
    def role(self) -> str:
        """The last word of the probe's name in JAX: "mixed"."""
        return _placed(self.row)[1] if self.row else ""


def _placed(row: Row) -> tuple[str, str]:
    """A probe's name in JAX, and its last word: "h/0/attn", "q"."""
    place, _, role = row.dst.replace("/", ".").rpartition(".")
    return place, role


def same(got: Tensor, want: Tensor, close: float) -> bool:
    if got.shape != want.shape or not torch.isfinite(want).all():
        return False
    return bool((got - want).norm() <= close * want.norm())


def scaled(unlike: Unlike) -> Iterator[Change]:
    """A constant times torch's value."""
    got, want = unlike.got, unlike.want
    size = float((want * want).sum())
    factor = float((got * want).sum()) / size if size else 1.0
    if factor in (0.0, 1.0) or not unlike.close_to(factor * want):
        return
    exact = min([_round(factor), *_roots(unlike)], key=lambda c: abs(c - factor))
    factor = exact if abs(exact - factor) <= unlike.close * abs(factor) else factor
    yield Change(
        "scaled",
        f"gives {factor:.6g} times what torch gives{_as_root(factor, unlike)}",
        "multiply by what torch multiplies by here",
        lambda x, live, name: factor * x,
    )


def _round(x: float) -> float:
    return float(f"{x:.9g}")


def _roots(unlike: Unlike) -> list[float]:
    sizes = {*unlike.sizes, unlike.want.shape[-1]} if unlike.want.ndim else set()
    return [n**power for n in sizes for power in (0.5, -0.5)]


def _as_root(factor: float, unlike: Unlike) -> str:
    sizes = {*unlike.sizes, unlike.want.shape[-1]} if unlike.want.ndim else set()
    for n in sorted(sizes):
        if n > 1 and math.isclose(factor, n**0.5, rel_tol=1e-6):
            return f" (the square root of {n})"
        if n > 1 and math.isclose(factor, n**-0.5, rel_tol=1e-6):
            return f" (1 over the square root of {n})"
    return ""


def permuted(unlike: Unlike) -> Iterator[Change]:
    """The entries of one axis in another order: heads, or entries of a head."""
    got, want = unlike.split(unlike.got), unlike.split(unlike.want)
    for axis, letter in enumerate(unlike.letters):
        count = got.shape[axis]
        if letter in ("b", "t") or not 1 < count <= MOST_ENTRIES:
            continue
        a = got.movedim(axis, 0).reshape(count, -1)
        b = want.movedim(axis, 0).reshape(count, -1)
        order = torch.cdist(a, b).argmin(dim=1)
        if not same(a, b[order], unlike.close):
            continue

        def ordered(
            x: Tensor, live: Live, name: str, axis: int = axis, order: Tensor = order
        ) -> Tensor:
            return unlike.split(x).index_select(axis, order).reshape(x.shape)

        heads = letter in ("n", "k")
        listed = ", ".join(map(str, order[:8].tolist())) + (", ..." if count > 8 else "")
        yield Change(
            "heads-permuted" if heads else "entries-permuted",
            f"has the {'heads' if heads else 'entries of axis ' + letter} in the order {listed}",
            "look at how the axes are split, merged and transposed here",
            ordered,
        )


def shifted(unlike: Unlike) -> Iterator[Change]:
    """A few places off in time, with zeros or the other end moved in."""
    if "t" not in unlike.letters:
        return
    axis = unlike.letters.index("t")
    for by, rolls in itertools.product((1, -1, 2, -2), (True, False)):

        def moved(x: Tensor, live: Any, name: str, by: int = by, rolls: bool = rolls) -> Tensor:
            out = unlike.split(x).roll(by, axis)
            if not rolls:
                edge = slice(0, by) if by > 0 else slice(by, None)
                keep = torch.ones(out.shape[axis], dtype=out.dtype)
                keep[edge] = 0
                out = out * keep.view([-1 if i == axis else 1 for i in range(out.ndim)])
            return out.reshape(x.shape)

        if unlike.close_to(moved(unlike.want, None, "")):
            yield Change(
                "shifted-in-time",
                f"gives what belongs {abs(by)} place{'s' * (abs(by) > 1)} "
                f"{'earlier' if by > 0 else 'later'}",
                "count positions as torch does",
                moved,
            )


def summed_otherwise(unlike: Unlike) -> Iterator[Change]:
    """Another sum of what torch computed before: a residual from the wrong place, or left out."""
    gap = unlike.got - unlike.want
    if gap.shape != unlike.want.shape or not torch.isfinite(gap).all():
        return
    before = _before(unlike)
    for count in (1, 2):
        for names in itertools.combinations(before, count):
            parts = torch.stack([unlike.inside[n].double().flatten() for n in names], 1)
            found = torch.linalg.lstsq(parts, gap.flatten()[:, None]).solution[:, 0]
            factors = [float(f) for f in found]
            if not all(math.isfinite(f) and abs(f) > 1e-6 for f in factors):
                continue
            near = [round(f) for f in factors]
            if max(abs(f - n) for f, n in zip(factors, near, strict=True)) < 1e-6:
                factors = [float(n) for n in near]
            other = unlike.want + (parts @ torch.tensor(factors, dtype=parts.dtype)).view_as(gap)
            if unlike.close_to(other):
                yield _sum(unlike, names, factors)


def stream_otherwise(unlike: Unlike) -> Iterator[Change]:
    """Of x + f(norm(x)): another x, which is itself a sum of what torch computed before."""
    inside = unlike.inside
    for branch, entry in itertools.product(unlike.modules, unlike.modules):
        places = (branch, branch + INPUT, entry, entry + INPUT)
        if branch == entry or not all(place in inside for place in places):
            continue
        out, fed, normed, x = (inside[place] for place in places)
        if not x.shape == out.shape == unlike.want.shape or not same(unlike.want, x + out, 1e-12):
            continue
        if fed is not normed and not (fed.shape == normed.shape and torch.equal(fed, normed)):
            continue
        yield from _other_streams(unlike, branch, entry)


def _other_streams(unlike: Unlike, branch: str, entry: str) -> Iterator[Change]:
    x = unlike.inside[entry + INPUT]
    before = _before(unlike, entry + INPUT)
    for less, more in itertools.permutations([*before, ""], 2):
        names = tuple(name for name in (less, more) if name)
        factors = [-1.0] * bool(less) + [1.0] * bool(more)
        inner = _sum(unlike, names, factors)

        def of_values(x: Tensor, live: Live, name: str, inner: Change = inner) -> Tensor:
            entered, followed = (_beside(unlike, place, name) for place in (entry, branch))
            stream = inner.of_values(live[entered + INPUT], live, name)
            normed = unlike.modules[entered].forward(stream)
            return stream + unlike.modules[followed].forward(normed)

        with torch.no_grad():
            other = of_values(x, unlike.inside, unlike.name)
        if unlike.close_to(other.double()):
            yield replace(inner, of_values=of_values)


def _before(unlike: Unlike, name: str = "") -> list[str]:
    """What was computed before it, of its shape, the nearest first; the same value once."""
    name, places = name or unlike.name, list(unlike.inside)
    end = places.index(name) if name in places else len(places)
    found: list[str] = []
    for place in reversed(places[:end]):
        x = unlike.inside[place]
        if x.shape != unlike.want.shape or not x.is_floating_point():
            continue
        if not any(torch.equal(unlike.inside[other], x) for other in found):
            found.append(place)
        elif not place.endswith(INPUT):  # it has a better name
            found = [place if torch.equal(unlike.inside[n], x) else n for n in found]
    return found[:MOST_SUMMANDS]


def _sum(unlike: Unlike, names: tuple[str, ...], factors: list[float]) -> Change:
    def of_values(x: Tensor, live: Live, of: str) -> Tensor:
        for name, factor in zip(names, factors, strict=True):
            x = x + factor * live[_beside(unlike, name, of)].to(x)
        return x

    told = [f"{_times(f)}{_called(name)}" for name, f in zip(names, factors, strict=True)]
    left = [t for t, f in zip(told, factors, strict=True) if f < 0]
    more = [t for t, f in zip(told, factors, strict=True) if f > 0]
    if left and more:
        about = f"adds {' and '.join(more)} where torch adds {' and '.join(left)}"
    elif left:
        about = f"leaves {' and '.join(left)} out of the sum"
    else:
        about = f"adds {' and '.join(more)}, which torch does not"
    name = "residual-from-elsewhere" if left and more else "sum-of-others"
    return Change(name, about, "add what torch adds here", of_values)


def _beside(unlike: Unlike, place: str, of: str) -> str:
    """That place in the layer of another probe of the same part."""
    at, layer, first = probes.layer(place), probes.layer(of), probes.layer(unlike.name)
    if at is None or layer is None or first is None:
        return place
    return probes.in_layer(probes.part(place), at + layer - first)


def _called(place: str) -> str:
    return f"the input of {place.removesuffix(INPUT)}" if place.endswith(INPUT) else place


def _times(factor: float) -> str:
    return "" if abs(factor) == 1 else f"{abs(factor):.6g} times "
