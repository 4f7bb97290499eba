"""Reports for people: tables on a console, and a line of verdict."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtwin.configs import Model
from jaxtwin.parity.report.results import Check, Report, number, verdict, worst_first
from jaxtwin.parity.report.wording import (
    budget_share,
    difference_line,
    explanation,
    opposite,
    readings,
)


def printer(columns: int) -> Console:
    """A console on standard output: as wide as the terminal, or of that many columns in a pipe."""
    return Console(width=None if sys.stdout.isatty() else columns)


TIGHTEST = 3  # of the gradients that hold, how many are shown for each dtype
WORST = 10  # and of those that fail: one wrong part spoils the gradient of every parameter


def show(report: Report, console: Console, everything: bool = False) -> None:
    """What was not the same before, the table, the notes and the verdict."""
    if opposite(report):
        console.print(f"the JAX side is {opposite(report)}", markup=False, highlight=False)
    _preflight(report, console)
    table = Table(title=None, box=None, pad_edge=False)
    for name in ("dtype", "what", "error", "budget", "used", ""):
        right = name in ("error", "budget", "used")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    shown = chosen(report.checks, everything)
    for check in shown:
        mark = Text("ok", "green") if check.ok else Text("FAILS", "bold red")
        error, budget = number(check.error, check.dtype), number(check.budget, check.dtype)
        table.add_row(check.dtype, check.name, error, budget, budget_share(check.margin), mark)
    console.print(table)
    listed = {id(check) for check in shown}
    left = [check.ok for check in report.checks if id(check) not in listed]
    parts = [(left.count(False), "fail by less"), (left.count(True), "hold with more room")]
    if rest := " and ".join(f"{count} that {what}" for count, what in parts if count):
        console.print(f"gradients not listed: {rest} (--all shows them)", style="dim")
    _findings(report, console)
    for note in report.notes:
        console.print(f"note: {note}", style="yellow")
    style = "bold green" if report.equal else "bold red"
    console.print(verdict(report), style=style, markup=False)


def _preflight(report: Report, console: Console) -> None:
    for difference in report.preflight:
        text = f"differs: {difference_line(difference)}"
        console.print(text, style="red", markup=False, highlight=False)


def _findings(report: Report, console: Console) -> None:
    """What is known of the differences, and what could not have been seen."""
    for divergence in report.divergences:
        text = f"divergence: {explanation(divergence)}"
        console.print(text, style="red", markup=False, highlight=False)
    for name, sentence in readings(report):
        console.print(f"detail: {name}: {sentence}", style="red", markup=False, highlight=False)
    for line in report.blind:
        console.print(f"not shown: {line}", style="yellow", markup=False, highlight=False)


def show_changes(changes: Sequence[str], console: Console) -> None:
    """What is not as it was in the baseline."""
    for line in changes:
        console.print(f"since the baseline: {line}", markup=False, highlight=False)
    if not changes:
        console.print("since the baseline: nothing changed")


def chosen(checks: list[Check], everything: bool) -> list[Check]:
    """Every check that is no gradient; of the gradients, the worst that fail and the tightest.

    WORST and TIGHTEST are counted for each dtype and side.
    """
    if everything:
        return checks
    groups: dict[tuple[str, str, bool], list[Check]] = defaultdict(list)
    for check in checks:
        if check.kind == "gradient":
            groups[check.dtype, check.label, check.ok].append(check)
    first = {
        id(check)
        for (_, _, ok), group in groups.items()
        for check in sorted(group, key=worst_first, reverse=True)[: TIGHTEST if ok else WORST]
    }
    return [c for c in checks if c.kind != "gradient" or id(c) in first]


def show_conversion(report: dict[str, Any]) -> None:
    """What was written, or with a dry run the plan: one line for each kind of tensor."""
    console = printer(200)
    if report["dry_run"]:
        table = Table(box=None, pad_edge=False)
        for column in ("from", "axes", "to", "shape"):
            table.add_column(column, overflow="fold")
        for step in report["plan"]:
            shape = " x ".join(map(str, step["shape"]))
            table.add_row(spanned(step["source"]), step["pattern"], step["target"], shape)
        console.print(table)
    source, target = report["source"], report["target"]
    for note in report["notes"]:
        console.print(f"note: {note}", style="yellow")
    done = "proven, nothing written" if report["dry_run"] else f"written to {target['path']}"
    console.print(
        f"{source['name']} ({source['dialect']}): {report['tensors']} tensors, "
        f"{report['bytes']:,} bytes of {report['dtype']}, {done}"
    )


def spanned(names: list[str]) -> str:
    """Names that differ in one number as one: "layers.{0..29}.attn.q.weight"."""
    if len(names) == 1:
        return names[0]
    first, last = re.split(r"(\d+)", names[0]), re.split(r"(\d+)", names[-1])
    differ = [i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b]
    if len(first) != len(last) or len(differ) != 1:
        return f"{names[0]} ... {names[-1]}"
    first[differ[0]] = "{" + f"{first[differ[0]]}..{last[differ[0]]}" + "}"
    return "".join(first)


def show_facts(facts: dict[str, Any], title: str | None = None) -> None:
    """Facts as a table of two columns; nested ones get dotted names."""

    def flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from flat(f"{name}.{key}" if name else key, inner)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for i, inner in enumerate(value):
                yield from flat(f"{name}.{i}", inner)
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value))
        else:
            yield name, f"{value:,}" if type(value) is int else str(value)

    table = Table(title=title, box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for row in flat("", facts):
        table.add_row(*row)
    printer(100).print(table)


def show_model(facts: dict[str, Any], spec: Model) -> None:
    """What a model is, on one screen: a line for each kind of layer, and which layers it is."""
    console = printer(100)
    counted = facts["parameters"]
    held = facts["bytes"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("name", f"{facts['name']} ({facts['kind']}, names of {facts['names']})")
    table.add_row(
        "parameters", f"{counted['total']:,}, of which AdamW decays {counted['decayed']:,}"
    )
    table.add_row("tensors", f"{facts['tensors']:,} of {facts['dtype']}, {held['weights']:,} bytes")
    table.add_row("KV cache", f"{held['kv_cache_per_token']:,} bytes a token")
    for key in ("eos", "carried"):
        if facts[key]:
            table.add_row(key, ", ".join(map(str, facts[key])))
    table.add_row("model", brief(spec, skip=("runs",)))
    kinds: dict[Any, list[int]] = {}
    for i, block in enumerate(spec.layers):
        kinds.setdefault(block, []).append(i)
    for block, numbers in kinds.items():
        table.add_row(f"{len(numbers)} layers", f"{ranges(numbers)}: {brief(block)}")
    console.print(table, highlight=False)
    for note in facts["notes"]:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)


def show_presets(found: Sequence[dict[str, Any]]) -> None:
    """The presets, one a line."""
    table = Table(box=None, pad_edge=False)
    for column in ("preset", "parameters", "layers", "d", "vocab", "max_len"):
        table.add_column(column, justify="left" if column == "preset" else "right")
    for preset in found:
        numbers = (preset[key] for key in ("parameters", "layers", "d", "vocab", "max_len"))
        table.add_row(preset["name"], *(f"{n:,}" for n in numbers))
    printer(100).print(table)


def brief(spec: Any, skip: Sequence[str] = ()) -> str:
    """A spec with what it says other than its defaults: "Glu(hidden=6912, act=gelu_tanh)"."""
    parts = []
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name in ("kind", *skip) or value == field.default:
            continue
        inner = dataclasses.is_dataclass(value)
        parts.append(f"{field.name}={brief(value) if inner else value}")
    return f"{type(spec).__name__}({', '.join(parts)})"


def ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"; several of one length and distance as "0-4, 6-10, ... 24-25"."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][-1] == n - 1:
            spans[-1][1:] = [n]
        else:
            spans.append([n])
    text = ["-".join(map(str, span)) for span in spans]
    return ", ".join(text if len(text) <= 6 else [*text[:3], "...", text[-1]])


def show_faults(table: dict[str, Any], console: Console) -> None:
    """The kill table: what was caught, where, and under what name."""
    grid = Table(box=None, pad_edge=False)
    for column in ("fault", "caught", "first seen at", "called", ""):
        grid.add_column(column, overflow="fold")
    for found in table["faults"]:
        mark = Text("ok", "green") if found["named"] else Text("not its name", "yellow")
        caught = Text("yes") if found["caught"] else Text("NO", "bold red")
        grid.add_row(found["name"], caught, found["where"], found["cause"] or "-", mark)
    console.print(grid)
    faults, pairs = table["faults"], table["pairs"]
    for alarm in table["alarms"]:
        console.print(f"false alarm: {alarm}", style="red", markup=False, highlight=False)
    caught, named = (sum(f[key] for f in faults) for key in ("caught", "named"))
    parts = [f"{caught} of {len(faults)} faults caught, {named} called by their name"]
    if table["controls"]:
        parts.append(f"{table['false_alarms']} false alarms in {table['controls']} random models")
    if pairs["tried"]:
        both = f"pairs: both located in {pairs['located']} and named in {pairs['named']}"
        parts.append(f"{both} of {pairs['tried']}")
    console.print("; ".join([*parts, f"{table['seconds']:.0f} s"]))
