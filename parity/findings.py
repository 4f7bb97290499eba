"""What a comparison found, as data: the only thing that reports are made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from parity.details import Detail, reading

SCHEMA = 1  # of `Report.to_json`; raised when a field changes its meaning (docs/json.md)


@dataclass(frozen=True)
class Check:
    """One comparison. It holds when error and budget are numbers, and the error is within."""

    name: str
    dtype: str
    error: float
    budget: float

    @property
    def ok(self) -> bool:
        return bool(np.isfinite(self.budget) and self.error <= self.budget)

    @property
    def margin(self) -> float:
        """The part of the budget that is used: above 1 is a failure."""
        if self.budget:
            return self.error / self.budget
        return 0.0 if self.error == 0 else float("inf")


@dataclass(frozen=True)
class Difference:
    """Something that was not the same before any tensor was computed."""

    what: str  # "spec: runs.0.blocks.0.attn.rope.base", "weight: layers.3.attn.q.weight", ...
    torch: str
    jax: str
    about: str = ""  # what turns one into the other, where that is known


@dataclass(frozen=True)
class Point:
    """One probe, seen from one direction, in one dtype. Errors are relative L2.

    `accumulated` is the error end to end. `injected` is that of the part alone: fed the reference's
    own input (going back: the reference's cotangent). `noise` is what the reference's own part
    injects in that dtype (0 in float64, which is the truth), and `band` what `injected` may be.
    """

    probe: str  # torch's name: "embed", "layers.3.attn.q", "head"; a parameter's name
    layer: int | None
    part: str  # the name without its layer: "attn.q"
    direction: str  # "forward", "backward" (the cotangent there), "parameter" (its gradient)
    dtype: str
    accumulated: float
    injected: float
    noise: float
    band: float

    @property
    def ok(self) -> bool:
        return bool(self.injected <= self.band)


@dataclass(frozen=True)
class Cause:
    """A mistake that explains a divergence: the reference, made to do the same, agrees."""

    name: str
    about: str  # what the JAX side does
    advice: str  # what to change
    part: str
    layers: tuple[int, ...]  # empty for a part outside the layers
    explains: float  # the share of the final error that goes away with it: 1 is all of it
    proven: bool  # with all causes together, the final error is inside the budget


@dataclass(frozen=True)
class Suspect:
    """Parts of one kind that inject more than they may, the earliest of them first."""

    part: str
    layers: tuple[int, ...]
    direction: str
    worst: float  # the largest injected error, in units of its band
    cause: Cause | None


@dataclass(repr=False)
class Report:
    """Everything, in the order of computation, and where it was."""

    checks: list[Check] = field(default_factory=list)
    preflight: list[Difference] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    details: list[Detail] = field(default_factory=list)  # of what failed (detailed.py)
    heat: list[list[float]] = field(default_factory=list)  # layer by position: the error of "out"
    trajectory: list[dict[str, Any]] = field(default_factory=list)
    blind: list[str] = field(default_factory=list)  # what the input could not have shown
    environment: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The verdict: all of it is tens of thousands of characters."""
        from parity.wording import verdict

        return verdict(self)

    def __repr__(self) -> str:
        return f"<Report: {self}>"

    @property
    def equal(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def provisional(self) -> bool:
        """Compared in spite of a difference in what was compared."""
        return bool(self.preflight)

    def to_json(self) -> dict[str, Any]:
        """See docs/json.md. Numbers that JSON has no word for become the strings "nan", "inf"."""
        out = {
            "schema": SCHEMA,
            "equal": self.equal,
            "provisional": self.provisional,
            "checks": [{**asdict(check), "ok": check.ok} for check in self.checks],
            "preflight": [asdict(difference) for difference in self.preflight],
            "points": [{**asdict(point), "ok": point.ok} for point in self.points],
            "suspects": [asdict(suspect) for suspect in self.suspects],
            "details": [{**asdict(d), "reading": reading(d)} for d in self.details],
            "heat": self.heat,
            "trajectory": self.trajectory,
            "blind": self.blind,
            "environment": self.environment,
            "notes": self.notes,
        }
        return {name: plain(value) for name, value in out.items()}


def plain(x: Any) -> Any:
    """The same in JSON's words."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    if isinstance(x, float | np.floating):
        return float(x) if np.isfinite(x) else str(float(x))
    return x
