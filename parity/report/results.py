"""What a comparison found, as data: the only thing that reports are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from jaxtwin.parity.report.details import Detail, reading

SCHEMA = 2  # of `Report.to_json`; raised when a field changes its meaning (docs/json.md)


SINCE = "since the baseline: "  # a note on what has changed begins so
# Every kind of comparison and the name that people read; {place}: a parameter, a probe, a step.
CHECKS = {
    "round_trip": "weights, there and back",
    "shapes": "tensors of another name or shape, the first {place}",
    "logits": "logits",
    "worst_token": "logits, worst token",
    "kl": "KL in nats, worst token",
    "loss": "loss, per target",
    "gradient": "grad {place}",
    "output": "output {place}",
    "worst_row": "output {place}, worst row",
    "ids_alone": "logits, of the ids alone",
    "decode": "logits, decoded from the cache",
    "tokens": "{place}, tokens that differ",
    "probes_off": "probes on and off: logits",
    "part_forward": "part alone, forward: {place}",
    "part_backward": "part alone, backward: {place}",
    "part_parameter": "part alone, parameter: {place}",
    "export_keys": "exported: keys missing or not used",
    "export_tensors": "exported: tensors that differ",
    "export_logits": "exported: logits that differ",
    "export_config": "exported: fields of the config that differ",
    "training_start": "trained: the optimizer's fresh state",
    "training_loss": "trained: loss, {place}",
    "training_rate": "trained: rate, {place}",
    "training_clip": "trained: clip, {place}",
    "training_parameters": "trained: parameters, {place}",
    "training_mu": "trained: mu, {place}",
    "training_nu": "trained: nu, {place}",
    "optimizer_update": "optimizer alone, update: {place}",
    "optimizer_mu": "optimizer alone, mu: {place}",
    "optimizer_nu": "optimizer alone, nu: {place}",
}
# Kinds of which the worst place alone is compared, which may be another in the next run.
WORST_OF_MANY = frozenset(
    {
        *("shapes", "part_forward", "part_backward", "part_parameter"),
        *("training_loss", "training_rate", "training_clip"),
        *("training_parameters", "training_mu", "training_nu"),
        *("optimizer_update", "optimizer_mu", "optimizer_nu"),
    }
)


@dataclass(frozen=True)
class Check:
    """One comparison. It holds when error and budget are numbers, and error <= budget.

    ValueError on a kind that CHECKS does not have.
    """

    kind: str  # one of CHECKS
    dtype: str
    error: float
    budget: float
    place: str = ""  # a parameter, a probe, a step, the first of what differs
    label: str = ""  # what is compared, where it is not JAX with torch: "transformers", ...

    def __post_init__(self) -> None:
        if self.kind not in CHECKS:
            raise ValueError(f"{self.kind!r} is no kind of check: {', '.join(CHECKS)}")

    @property
    def name(self) -> str:
        """What people read: "transformers: grad embed.weight"."""
        title = CHECKS[self.kind]
        name = (title if self.place else title.replace(" {place}", "")).replace(
            "{place}", self.place
        )
        if self.place and "{place}" not in title:
            name += f", the first {self.place}"
        return f"{self.label}: {name}" if self.label else name

    @property
    def ok(self) -> bool:
        return bool(np.isfinite(self.budget) and self.error <= self.budget)

    @property
    def margin(self) -> float:
        """Error over budget: above 1 is a failure."""
        if self.budget:
            return self.error / self.budget
        return 0.0 if self.error == 0 else float("inf")


def worst_first(check: Check) -> float:
    """The margin to sort by: NaN is worst."""
    return float("inf") if np.isnan(check.error) else check.margin


@dataclass(frozen=True)
class Difference:
    """Something that was not the same before any tensor was computed."""

    kind: str  # "setting", "spec" or "weight"
    place: str  # "autocast", "runs.0.blocks.0.attn.rope.base", "layers.3.attn.q.weight"
    torch: str
    jax: str
    about: str = ""  # what turns one into the other, where that is known

    @property
    def what(self) -> str:
        """What people read: "spec: runs.0.blocks.0.attn.rope.base"."""
        return f"{self.kind}: {self.place}"


@dataclass(frozen=True)
class Point:
    """One probe, seen from one direction, in one dtype. Errors are relative L2.

    `accumulated_error` is the error end to end, `local_error` that of the part fed with the
    reference's own input (going back: the reference's cotangent). `noise` is the local error of the
    reference itself in that dtype (0 in float64), and `band` what `local_error` may be.
    """

    probe: str  # torch's name: "embed", "layers.3.attn.q", "head"; a parameter's name
    layer: int | None
    part: str  # the name without its layer: "attn.q"
    direction: str  # "forward", "backward" (the cotangent there), "parameter" (its gradient)
    dtype: str
    accumulated_error: float
    local_error: float
    noise: float
    band: float

    @property
    def ok(self) -> bool:
        return bool(self.local_error <= self.band)


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
class Divergence:
    """One part, in one layer or more, whose local error is out of its band."""

    part: str
    layers: tuple[int, ...]
    direction: str  # as a Point's; "preflight" for a difference that stood before any run
    worst: float  # the largest local error, in units of its band
    cause: Cause | None

    @property
    def place(self) -> str:
        """What people read: "layers.{0..5}.attn.q", "blocks.1.norm"."""
        return place(self.part, self.layers)


@dataclass(repr=False)
class Report:
    """Everything, in the order of computation, and where it was."""

    checks: list[Check] = field(default_factory=list)
    preflight: list[Difference] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    details: list[Detail] = field(default_factory=list)  # of what failed (failure_details.py)
    heat: list[list[float]] = field(default_factory=list)  # layer by position: the error of "out"
    trajectory: list[dict[str, Any]] = field(default_factory=list)
    blind: list[str] = field(default_factory=list)  # what the input could not have shown
    environment: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The verdict: all of it is tens of thousands of characters."""
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
            "checks": [{"name": c.name, **asdict(c), "ok": c.ok} for c in self.checks],
            "preflight": [{"what": d.what, **asdict(d)} for d in self.preflight],
            "points": [{**asdict(point), "ok": point.ok} for point in self.points],
            "divergences": [asdict(divergence) for divergence in self.divergences],
            "details": [{"name": d.name, **asdict(d), "reading": reading(d)} for d in self.details],
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


# ---- the verdict --------------------------------------------------------------------------------

COUNTED = ("int", "as stored")  # dtypes of checks whose error and budget are counts


def number(x: float, dtype: str = "") -> str:
    """Counts as counts, measures as measures; nan and inf as they are."""
    return f"{x:.0f}" if x in (0, 1) or dtype in COUNTED else f"{x:.2e}"


def verdict(report: Report) -> str:
    """One line: equal or not, the first divergence and its cause, how many comparisons fail."""
    bad = [check for check in report.checks if not check.ok]
    differ = ""
    if report.preflight:
        more = f" and {len(report.preflight) - 1} more" if len(report.preflight) > 1 else ""
        differ = f"the sides differ before any run ({report.preflight[0].what}{more})"
    provisional = f"; provisional: {differ}" if differ else ""
    if not report.checks:
        return f"NOTHING WAS COMPARED: {differ}" if differ else "NOTHING WAS COMPARED"
    if not bad:
        return f"EQUAL: all {len(report.checks)} comparisons hold{provisional}"
    failing = f"{len(bad)} of {len(report.checks)} comparisons fail, first {failure(bad[0])}"
    first = first_divergence(report)
    if first:
        return f"NOT EQUAL: first divergence at {first}. {failing}{provisional}"
    return f"NOT EQUAL: {failing}{provisional}"


def failure(check: Check) -> str:
    error, budget = number(check.error, check.dtype), number(check.budget, check.dtype)
    return f"{check.name!r} in {check.dtype}: {error} where {budget} is allowed"


DIRECTIONS = {
    "forward": "",
    "backward": " (going back)",
    "parameter": " (its gradient)",
    "update": " (the update)",
    "mu": " (the first moment)",
    "nu": " (the second moment)",
    "preflight": " (before any run)",
}


def first_divergence(report: Report) -> str | None:
    """Where the two sides part first, and why: "layers.3.attn.q: 'rope-base' (proven)"."""
    if report.divergences:
        divergence = report.divergences[0]
        back = divergence.direction == "backward"
        earliest = divergence.layers[-1:] if back else divergence.layers[:1]
        where = place(divergence.part, earliest) + DIRECTIONS.get(divergence.direction, "")
        return f"{where}: {because(divergence)}"
    bad = [point for point in report.points if not point.ok]
    if not bad:
        return None
    point = bad[0]
    if point.direction == "backward":  # listed as in the forward pass
        alike = (point.direction, point.dtype)
        point = [p for p in bad if (p.direction, p.dtype) == alike][-1]
    return f"{point.probe}{DIRECTIONS.get(point.direction, '')} in {point.dtype}: cause not known"


def because(divergence: Divergence) -> str:
    cause = divergence.cause
    if cause is None:
        return "cause not known"
    return f"{cause.name!r} ({'proven' if cause.proven else 'not proven'})"


def place(part: str, layers: Sequence[int]) -> str:
    """A part in its layers: "layers.3.attn.q", "layers.{0..5}.attn.q", "h.{0,2,4}.mlp"."""
    if not layers:
        return part
    first, last, count = layers[0], layers[-1], len(layers)
    if count == 1:
        number = str(first)
    elif count > 2 and list(layers) == list(range(first, last + 1)):
        number = f"{{{first}..{last}}}"
    else:
        number = f"{{{','.join(map(str, layers))}}}"
    return part.replace("*", number, 1) if "*" in part else f"layers.{number}.{part}"
