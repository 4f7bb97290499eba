"""Rotary positions that differ, read off the rotated queries or keys alone.

Every pair of a head's coordinates is a complex number that was turned by its position times its
frequency. JAX's over torch's is then a turn too, by the difference of the two frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from jaxtwin.parity.any_model.diagnose.relations import Change, Unlike, same

BASES = (10000.0, 500000.0, 1000000.0, 100000.0, 1000.0, 100.0, 8000000.0, 5000000.0, 150000.0)
PAIRINGS = ("half-split", "adjacent")
ADVICE = "give it torch's frequencies and positions"


def rotated(unlike: Unlike) -> Iterator[Change]:
    """Where a value has a time (t) and a head (h): another base, pairing, direction, start."""
    if not {"t", "h"} <= set(unlike.letters):
        return
    axes = unlike.letters.index("t"), unlike.letters.index("h")
    got, want = (_ordered(unlike.split(x), axes) for x in (unlike.got, unlike.want))
    if got.shape[-1] % 2 or got.shape[-2] < 2:
        return
    for pairing in PAIRINGS:
        yield from _turned(unlike, axes, pairing, got, want)
    for base in _bases(unlike):
        for torchs, jaxs in (PAIRINGS, PAIRINGS[::-1]):
            angles = _angles(base, want)

            def paired(
                x: Tensor, angles: Tensor = angles, one: str = torchs, other: str = jaxs
            ) -> Tensor:
                plain = _turn(x, -angles.to(x), one)
                return _turn(plain, angles.to(x), other)

            if same(got, paired(want), unlike.close):
                yield Change(
                    "rope-pairing",
                    f"turns {jaxs} pairs of coordinates where torch turns {torchs} ones",
                    "use torch's pairing, or permute the rows of q and k",
                    _edit(unlike, axes, paired),
                )


def _turned(
    unlike: Unlike, axes: tuple[int, int], pairing: str, got: Tensor, want: Tensor
) -> Iterator[Change]:
    """Both turn the same pairs, by other angles."""
    z, w = _complex(want, pairing), _complex(got, pairing)
    sums = (w * z.conj()).flatten(0, -3).sum(0)
    if not same(w.abs(), z.abs(), unlike.close) or not bool((sums.abs() > 0).all()):
        return
    turn = sums / sums.abs()  # (t, h / 2)
    if not same(torch.view_as_real(w), torch.view_as_real(z * turn), unlike.close):
        return
    start = turn[0].angle()  # at the first position
    step = (turn[1] / turn[0]).angle()  # from each to the next
    time = torch.arange(want.shape[-2], dtype=torch.float64)
    for angles, name, about in _explained(start, step, time, unlike.close):
        if not same(
            torch.view_as_real(turn), torch.view_as_real(torch.polar(_ones(angles), angles)), 1e-6
        ):
            continue

        def more(x: Tensor, angles: Tensor = angles) -> Tensor:
            return _turn(x, angles.to(x), pairing)

        yield Change(name, about, ADVICE, _edit(unlike, axes, more))


def _explained(
    start: Tensor, step: Tensor, time: Tensor, close: float
) -> Iterator[tuple[Tensor, str, str]]:
    """The angles (t, h/2) that JAX turns by more than torch does, by what explains them."""
    loose, count = max(1e-7, close), len(step)
    if float(start.abs().max()) < loose:
        angles = time[:, None] * step[None]
        if abs(float(step[0])) < loose and count > 2 and abs(float(step[1])) > loose:
            # u'^i - u^i, where u is the second frequency of all
            total = float(step[2] / step[1])
            ours, theirs = (total + float(step[1])) / 2, (total - float(step[1])) / 2
            if ours > 0 and theirs > 0:
                one, other = (_near(u ** (-count)) for u in (theirs, ours))
                told = f"uses the RoPE base {other:.6g} where torch uses {one:.6g}"
                rates = [other ** (-i / count) - one ** (-i / count) for i in range(count)]
                exact = torch.tensor(rates, dtype=torch.float64)
                yield time[:, None] * exact[None], "rope-base", told
        factor = 1 + float(step[0])
        if abs(factor) < loose:
            yield angles, "rope-missing", "does not rotate here"
        elif abs(float(step[0]) + 2) < loose or abs(float(step[0]) - (2 * math.pi - 2)) < loose:
            yield angles, "rope-backwards", "turns the wrong way (the sign of the angle)"
        elif abs(float(step[0])) > loose:
            yield angles, "position-scaled", f"multiplies positions by {factor:.6g}"
        yield angles, "rope-frequencies", "turns by other frequencies"
    elif float(step.abs().max()) < loose:
        by = float(start[0])
        places = f"{by:.6g} places" if abs(by - round(by)) > 1e-6 else f"{round(by)} places"
        about = f"takes angles from positions that are {places} off"
        yield start[None].expand(len(time), -1), "position-offset", about
    else:
        yield time[:, None] * step[None] + start[None], "rope-angles", "turns by other angles"


def _near(base: float) -> float:
    """A round base near the one that was computed, which has lost digits."""
    rounded = float(f"{base:.4g}")
    return rounded if math.isclose(rounded, base, rel_tol=1e-5) else base


def _ones(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def _bases(unlike: Unlike) -> list[float]:
    """What torch's modules have for a base, and what others have."""
    found: dict[float, None] = {}
    for module in unlike.modules.values():
        for holder in (module, getattr(module, "config", None), getattr(module, "args", None)):
            for name, value in getattr(holder, "__dict__", {}).items():
                if ("base" in name or "theta" in name) and isinstance(value, int | float):
                    found[float(value)] = None
    return [base for base in dict.fromkeys([*found, *BASES]) if base > 1]


def _angles(base: float, x: Tensor) -> Tensor:
    """Of a plain rotation of x (... t h): (t, h / 2)."""
    count = x.shape[-1] // 2
    rates = torch.tensor([base ** (-i / count) for i in range(count)], dtype=torch.float64)
    return torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rates[None]


def _pairs(x: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
    if pairing == "half-split":
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    return x[..., 0::2], x[..., 1::2]


def _complex(x: Tensor, pairing: str) -> Tensor:
    one, other = _pairs(x, pairing)
    return torch.complex(one.contiguous(), other.contiguous())


def _turn(x: Tensor, angles: Tensor, pairing: str) -> Tensor:
    """x (... t h), each pair turned by its angle (t, h / 2)."""
    one, other = _pairs(x, pairing)
    cos, sin = angles.cos(), angles.sin()
    both = one * cos - other * sin, one * sin + other * cos
    if pairing == "half-split":
        return torch.cat(both, dim=-1)
    return torch.stack(both, dim=-1).flatten(-2)


def _ordered(x: Tensor, axes: tuple[int, int]) -> Tensor:
    """Time and head last."""
    return x.movedim(axes, (-2, -1))


def _edit(
    unlike: Unlike, axes: tuple[int, int], change: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Any, str], Tensor]:
    def of_values(x: Tensor, live: Any, name: str) -> Tensor:
        moved = change(_ordered(unlike.split(x), axes))
        return moved.movedim((-2, -1), axes).reshape(x.shape)

    return of_values
