"""A report in words: verdict, first divergence, causes. Every kind of report says the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jaxtwin.parity.report.details import Detail, reading
from jaxtwin.parity.report.results import (
    DIRECTIONS,
    SINCE,
    Difference,
    Divergence,
    Report,
    because,
    failure,
    number,
    place,
    verdict,
)

COMPLAINT = 15  # lines at most


def budget_share(margin: float) -> str:
    """How much of its budget an error takes: "65%", "2.1e+11x"; nan and inf as they are."""
    if not math.isfinite(margin):
        return str(margin)
    return f"{margin:.0%}" if margin < 10 else f"{margin:.1e}x"


def opposite(report: Report) -> str:
    """What the JAX side was built from, where it is not the source itself: "out/run (run)"."""
    against = report.environment.get("against")
    return f"{against['name']} ({against['kind']})" if against else ""


def explanation(divergence: Divergence) -> str:
    """One line: where, how much, and what is known of the cause."""
    where = place(divergence.part, divergence.layers) + DIRECTIONS.get(divergence.direction, "")
    over = (
        ""
        if divergence.direction == "preflight"
        else f", {number(divergence.worst)} times its band"
    )
    cause = divergence.cause
    if cause is None:
        return f"{where}{over}: cause not known"
    advice = f"; to mend it, {cause.advice}" if cause.advice else ""
    return (
        f"{where}{over}: {because(divergence)}: the JAX side {cause.about}{advice} "
        f"(explains {share(cause.explains)} of the error)"
    )


def readings(report: Report) -> list[tuple[str, str]]:
    """What the details clearly say, by tensor."""
    named = [(titled(detail), reading(detail)) for detail in report.details]
    return [(name, sentence) for name, sentence in named if sentence]


def titled(detail: Detail) -> str:
    """Its name; a gradient is told from that of the whole run, and a dtype from float64."""
    local = ", alone" if detail.local and detail.kind == "gradient" else ""
    return detail.name + local + ("" if detail.dtype == "float64" else f" in {detail.dtype}")


def share(x: float) -> str:
    """A share as a percentage that says 100 % and 0 % only of what is whole or nothing."""
    rounded = round(x * 100)
    if 0 < x < 1 and rounded in (0, 100):
        return "under 1 %" if rounded == 0 else "over 99 %"
    return f"{x * 100:.0f} %"


def complaint(report: Report) -> str:
    """The message of an assertion, of a report that is not equal: at most COMPLAINT lines."""
    lines = [verdict(report)]
    lines += _some([explanation(s) for s in report.divergences], 4)
    lines += _some([difference_line(d) for d in report.preflight], 3)
    lines += _some([note for note in report.notes if note.startswith(SINCE)], 3)
    bad = [check for check in report.checks if not check.ok]
    lines += _some([failure(check) for check in bad], COMPLAINT - len(lines) - 1)
    return "\n".join(line.replace("\n", " ") for line in lines)


def difference_line(difference: Difference) -> str:
    """A difference before any run, and what is known of it."""
    how = f" ({difference.about})" if difference.about else ""
    return f"{difference.what}: torch {difference.torch}, JAX {difference.jax}{how}"


def _some(lines: Sequence[str], most: int) -> Iterator[str]:
    for line in lines[:most]:
        yield f"  {line}"
    if len(lines) > most:
        yield f"  and {len(lines) - most} more"
