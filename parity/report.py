"""What a check found, for people: a table of the tightest comparisons and a line of verdict."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.compare import Check, Report

TIGHTEST = 3  # of the gradients that hold, how many are shown for each dtype


def show(report: Report, console: Console, everything: bool = False) -> None:
    """The table, the notes and the verdict."""
    table = Table(title=None, box=None, pad_edge=False)
    for name in ("dtype", "what", "error", "budget", "used", ""):
        right = name in ("error", "budget", "used")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    shown, hidden = chosen(report.checks, everything)
    for check in shown:
        used = f"{check.margin:.0%}" if check.margin < 10 else f"{check.margin:.1e}x"
        mark = Text("ok", "green") if check.ok else Text("FAILS", "bold red")
        error, budget = number(check.error), number(check.budget)
        table.add_row(check.dtype, check.name, error, budget, used, mark)
    console.print(table)
    if hidden:
        console.print(f"and {hidden} more that hold with more room (--all shows them)", style="dim")
    for note in report.notes:
        console.print(f"note: {note}", style="yellow")
    console.print(verdict(report), style="bold green" if report.equal else "bold red")


def number(x: float) -> str:
    """Counts as counts, measures as measures; nan and inf as they are."""
    return f"{x:.0f}" if x in (0, 1) else f"{x:.2e}"


def chosen(checks: list[Check], everything: bool) -> tuple[list[Check], int]:
    """Every check that fails and every one that is no gradient; of the gradients, the tightest."""
    if everything:
        return checks, 0
    groups: dict[tuple[str, str], list[Check]] = defaultdict(list)
    for check in checks:
        if "grad " in check.name and check.ok:
            groups[check.dtype, check.name.split("grad ")[0]].append(check)
    tight = {
        id(check)
        for group in groups.values()
        for check in sorted(group, key=lambda c: -c.margin)[:TIGHTEST]
    }
    shown = [c for c in checks if not c.ok or "grad " not in c.name or id(c) in tight]
    return shown, len(checks) - len(shown)


def verdict(report: Report) -> str:
    bad = [check for check in report.checks if not check.ok]
    if not report.checks:
        return "NOTHING WAS COMPARED"
    if not bad:
        return f"EQUAL: all {len(report.checks)} comparisons hold"
    first = bad[0]
    return (
        f"NOT EQUAL: {len(bad)} of {len(report.checks)} comparisons fail, first {first.name!r} "
        f"in {first.dtype}: {first.error:.2e} where {first.budget:.2e} is allowed"
    )
