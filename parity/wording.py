"""A report in words: verdict, first divergence, causes. Every kind of report says the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from parity.details import Detail, reading
from parity.findings import Check, Difference, Report, Suspect

COMPLAINT = 15  # lines at most


COUNTED = ("int", "as stored")  # dtypes of checks whose error and budget are counts


def number(x: float, dtype: str = "") -> str:
    """Counts as counts, measures as measures; nan and inf as they are."""
    return f"{x:.0f}" if x in (0, 1) or dtype in COUNTED else f"{x:.2e}"


def used(margin: float) -> str:
    """The part of a budget that is used: "65%", "2.1e+11x"; nan and inf as they are."""
    if not math.isfinite(margin):
        return str(margin)
    return f"{margin:.0%}" if margin < 10 else f"{margin:.1e}x"


def opposite(report: Report) -> str:
    """What the JAX side was built from, where it is not the source itself: "out/run (run)"."""
    against = report.environment.get("against")
    return f"{against['name']} ({against['kind']})" if against else ""


def verdict(report: Report) -> str:
    """One line: equal or not, the first divergence and its cause, how many comparisons fail."""
    bad = [check for check in report.checks if not check.ok]
    given = ""
    if report.preflight:
        more = f" and {len(report.preflight) - 1} more" if len(report.preflight) > 1 else ""
        given = f"what was given differs ({report.preflight[0].what}{more})"
    provisional = f"; provisional: {given}" if given else ""
    if not report.checks:
        return f"NOTHING WAS COMPARED: {given}" if given else "NOTHING WAS COMPARED"
    if not bad:
        return f"EQUAL: all {len(report.checks)} comparisons hold{provisional}"
    failing = f"{len(bad)} of {len(report.checks)} comparisons fail, first {failure(bad[0])}"
    first = divergence(report)
    if first:
        return f"NOT EQUAL: first divergence at {first}. {failing}{provisional}"
    return f"NOT EQUAL: {failing}{provisional}"


def failure(check: Check) -> str:
    error, budget = number(check.error, check.dtype), number(check.budget, check.dtype)
    return f"{check.name!r} in {check.dtype}: {error} where {budget} is allowed"


def divergence(report: Report) -> str | None:
    """Where the two sides part first, and why: "layers.3.attn.q: 'rope-base' (proven)"."""
    if report.suspects:
        suspect = report.suspects[0]
        back = suspect.direction == "backward"
        earliest = suspect.layers[-1:] if back else suspect.layers[:1]
        where = place(suspect.part, earliest) + DIRECTIONS.get(suspect.direction, "")
        return f"{where}: {because(suspect)}"
    bad = [point for point in report.points if not point.ok]
    if not bad:
        return None
    point = bad[0]
    if point.direction == "backward":  # listed as in the forward pass
        alike = (point.direction, point.dtype)
        point = [p for p in bad if (p.direction, p.dtype) == alike][-1]
    return f"{point.probe}{DIRECTIONS.get(point.direction, '')} in {point.dtype}: cause not known"


DIRECTIONS = {
    "forward": "",
    "backward": " (going back)",
    "parameter": " (its gradient)",
    "update": " (the update)",
    "mu": " (the first moment)",
    "nu": " (the second moment)",
    "given": " (as given)",
}


def because(suspect: Suspect) -> str:
    cause = suspect.cause
    if cause is None:
        return "cause not known"
    return f"{cause.name!r} ({'proven' if cause.proven else 'not proven'})"


def place(part: str, layers: Sequence[int]) -> str:
    """A part in its layers: "layers.3.attn.q", "layers.{0..5}.attn.q", "layers.{0,2,4}.out"."""
    if not layers:
        return part
    first, last, count = layers[0], layers[-1], len(layers)
    if count == 1:
        return f"layers.{first}.{part}"
    if count > 2 and list(layers) == list(range(first, last + 1)):
        return f"layers.{{{first}..{last}}}.{part}"
    return f"layers.{{{','.join(map(str, layers))}}}.{part}"


def explanation(suspect: Suspect) -> str:
    """One line: where, how much, and what is known of the cause."""
    where = place(suspect.part, suspect.layers) + DIRECTIONS.get(suspect.direction, "")
    over = "" if suspect.direction == "given" else f", {number(suspect.worst)} times its band"
    cause = suspect.cause
    if cause is None:
        return f"{where}{over}: cause not known"
    advice = f"; to mend it, {cause.advice}" if cause.advice else ""
    return (
        f"{where}{over}: {because(suspect)}: the JAX side {cause.about}{advice} "
        f"(explains {share(cause.explains)} of the error)"
    )


def readings(report: Report) -> list[tuple[str, str]]:
    """What the details clearly say, by tensor."""
    named = [(titled(detail), reading(detail)) for detail in report.details]
    return [(name, said) for name, said in named if said]


def titled(detail: Detail) -> str:
    """Its name; a gradient is told from that of the whole run, and a dtype from float64."""
    alone = ", alone" if detail.alone and detail.name.startswith("grad ") else ""
    return detail.name + alone + ("" if detail.dtype == "float64" else f" in {detail.dtype}")


def share(x: float) -> str:
    """A share as a percentage that says 100 % and 0 % only of what is whole or nothing."""
    rounded = round(x * 100)
    if 0 < x < 1 and rounded in (0, 100):
        return "under 1 %" if rounded == 0 else "over 99 %"
    return f"{x * 100:.0f} %"


def complaint(report: Report) -> str:
    """What an assertion says of a report that is not equal, in at most COMPLAINT lines."""
    lines = [verdict(report)]
    lines += _some([explanation(s) for s in report.suspects], 4)
    lines += _some([given(d) for d in report.preflight], 3)
    bad = [check for check in report.checks if not check.ok]
    lines += _some([failure(check) for check in bad], COMPLAINT - 1 - 5 - 4 - 1)
    return "\n".join(line.replace("\n", " ") for line in lines)


def given(difference: Difference) -> str:
    """A difference in what was given, and what is known of it."""
    how = f" ({difference.about})" if difference.about else ""
    return f"{difference.what}: torch {difference.torch}, JAX {difference.jax}{how}"


def _some(lines: Sequence[str], most: int) -> Iterator[str]:
    for line in lines[:most]:
        yield f"  {line}"
    if len(lines) > most:
        yield f"  and {len(lines) - most} more"
