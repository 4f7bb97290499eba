"""What changed since an earlier check, whose JSON was saved."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtwin.configs import BadInput
from jaxtwin.parity.report.junit import flat
from jaxtwin.parity.report.results import SCHEMA, Check, Report, number, place

GROWN = 2.0  # times its old margin: worth a line


def read(path: Path) -> dict[str, Any]:
    """The JSON of `check --save`. BadInput where the file is not that, or of another schema."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise BadInput(
            f"{path} is not there; `jaxtwin check SRC --save {path}` writes it"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read as JSON: {error}") from None
    try:
        _checked(data)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    return dict(data)


def compare(old: Mapping[str, Any], new: Report) -> list[str]:
    """One line for each thing that is not as it was. BadInput where `old` is no such report."""
    checks = _checked(old)
    now = new.to_json()
    return [
        *_checks(*_matched(checks, {(c.dtype, c.name): c for c in new.checks})),
        *_entries("given", _preflight(old), _preflight(now)),
        *_entries("cause", _causes(old), _causes(now)),
        *_entries("environment", dict(flat(old["environment"])), dict(flat(now["environment"]))),
    ]


def _checked(old: Any) -> dict[tuple[str, str], Check]:
    """The checks of that JSON, once all that is read of it is found to be there."""
    again = "; save one anew with `jaxtwin check SRC --save FILE`"
    if not isinstance(old, Mapping) or "checks" not in old:
        raise BadInput(f"this is not the JSON of a check{again}")
    if old.get("schema") != SCHEMA:
        raise BadInput(f"its schema is {old.get('schema')!r}, and {SCHEMA} is read{again}")
    try:
        checks = [
            Check(c["name"], c["dtype"], float(c["error"]), float(c["budget"]))
            for c in old["checks"]
        ]
        dict(flat(old["environment"]))
        _preflight(old)
        _causes(old)
        return {(c.dtype, c.name): c for c in checks}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadInput(
            f"this is not the JSON of a check ({type(error).__name__}: {error}){again}"
        ) from None


# A name that goes on with the probe or the step that was worst, which may be another each time.
WORST = re.compile(
    r"(part alone, \w+(?=: )|optimizer alone, \w+(?=: )|trained: \w+(?=, )"
    r"|tensors of another name or shape(?=, )).+"
)
Checks = Mapping[tuple[str, str], Check]


def _matched(old: Checks, new: Checks) -> tuple[Checks, Checks]:
    """The old checks under their names of today, where only the worst place is another."""
    was, now = _stable(old), _stable(new)
    again = {was[kind]: now[kind] for kind in was if kind in now}
    return {again.get(key, key): check for key, check in old.items()}, new


def _stable(checks: Checks) -> dict[tuple[str, str], tuple[str, str]]:
    """The keys that have a part without the worst place, by it: only where no other has it too."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for dtype, name in checks:
        if match := WORST.fullmatch(name):
            found.setdefault((dtype, match[1]), []).append((dtype, name))
    return {kind: keys[0] for kind, keys in found.items() if len(keys) == 1}


def _checks(old: Checks, new: Checks) -> Iterator[str]:
    for key, check in new.items():
        said, was = f"{check.dtype} {check.name}", old.get(key)
        if was is None:
            yield f"appeared: {said}" + ("" if check.ok else ", and it fails")
        elif was.ok != check.ok:
            word = "holds now" if check.ok else "fails now"
            yield f"{word}: {said}: error {_change(was, check)}"
        elif check.margin > GROWN * was.margin:
            grown = f"{was.margin:.2g} -> {check.margin:.2g} of its budget"
            yield f"grew: {said}: {grown} (error {_change(was, check)})"
    yield from (f"gone: {dtype} {name}" for dtype, name in old if (dtype, name) not in new)


def _change(old: Check, new: Check) -> str:
    was, now, budget = (number(x, new.dtype) for x in (old.error, new.error, new.budget))
    return f"{was} -> {now}, budget {budget}"


def _preflight(report: Mapping[str, Any]) -> dict[str, str]:
    return {d["what"]: f"torch {d['torch']}, JAX {d['jax']}" for d in report["preflight"]}


def _causes(report: Mapping[str, Any]) -> dict[str, str]:
    """What is known of every suspect, by its place."""
    out = {}
    for divergence in report["suspects"]:
        cause = divergence["cause"]
        known = "not known"
        if cause is not None:
            known = f"{cause['name']!r} ({'proven' if cause['proven'] else 'not proven'})"
        out[f"{place(divergence['part'], divergence['layers'])}, {divergence['direction']}"] = known
    return out


def _entries(kind: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in [*new, *(n for n in old if n not in new)]:
        if name not in old:
            yield f"{kind} appeared: {name}: {new[name]}"
        elif name not in new:
            yield f"{kind} gone: {name}: {old[name]}"
        elif old[name] != new[name]:
            yield f"{kind}: {name}: {old[name]} -> {new[name]}"
