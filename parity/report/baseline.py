"""What changed since an earlier check, whose JSON was saved."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtwin.configs import BadInput
from jaxtwin.parity.report.junit import flat
from jaxtwin.parity.report.results import SCHEMA, SINCE, WORST_OF_MANY, Check, Report, number, place

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
        *_checks(*_keyed(checks, new.checks)),
        *_entries("preflight", _preflight(old), _preflight(now)),
        *_entries("cause", _causes(old), _causes(now)),
        *_entries("environment", dict(flat(old["environment"])), dict(flat(now["environment"]))),
    ]


def note_changes(report: Report, old: str | os.PathLike[str] | Mapping[str, Any] | None) -> None:
    """Adds to the report's notes what is not as it was in that JSON, or in that file of it."""
    if old is None:
        return
    data = old if isinstance(old, Mapping) else read(Path(old))
    changes = compare(data, report) or ["nothing changed"]
    report.notes += [SINCE + change for change in changes]


def _checked(old: Any) -> list[Check]:
    """The checks of that JSON, once all that is read of it is found to be there."""
    again = "; save a new one with `jaxtwin check SRC --save FILE`"
    if not isinstance(old, Mapping) or "checks" not in old:
        raise BadInput(f"this is not the JSON of a check{again}")
    if old.get("schema") != SCHEMA:
        raise BadInput(f"expected schema {SCHEMA}, got {old.get('schema')!r}{again}")
    try:
        checks = [_check(c) for c in old["checks"]]
        dict(flat(old["environment"]))
        _preflight(old)
        _causes(old)
        {_stem(check) for check in checks}
        return checks
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadInput(
            f"this is not the JSON of a check ({type(error).__name__}: {error}){again}"
        ) from None


def _check(c: Mapping[str, Any]) -> Check:
    error, budget = float(c["error"]), float(c["budget"])
    return Check(c["kind"], c["dtype"], error, budget, c["place"], c["label"])


Key = tuple[str, ...]  # dtype, label, kind and, where it is not just the worst of many, the place


def _stem(check: Check) -> Key:
    return check.dtype, check.label, check.kind


def _keyed(old: Sequence[Check], new: Sequence[Check]) -> Iterator[dict[Key, Check]]:
    """Both by what makes a check the same in another run.

    The worst of many places may be another each time: it counts only where either run has several
    checks of that kind, told apart by it.
    """
    counts = [Counter(map(_stem, checks)) for checks in (old, new)]

    def key(check: Check) -> Key:
        stem = _stem(check)
        worst = check.kind in WORST_OF_MANY and all(count[stem] <= 1 for count in counts)
        return stem if worst else (*stem, check.place)

    yield from ({key(check): check for check in checks} for checks in (old, new))


def _checks(old: Mapping[Key, Check], new: Mapping[Key, Check]) -> Iterator[str]:
    for key, check in new.items():
        named, was = f"{check.dtype} {check.name}", old.get(key)
        if was is None:
            yield f"appeared: {named}" + ("" if check.ok else ", and it fails")
        elif was.ok != check.ok:
            word = "holds now" if check.ok else "fails now"
            yield f"{word}: {named}: error {_change(was, check)}"
        elif check.margin > GROWN * was.margin:
            grown = f"{was.margin:.2g} -> {check.margin:.2g} of its budget"
            yield f"grew: {named}: {grown} (error {_change(was, check)})"
    yield from (f"gone: {old[key].dtype} {old[key].name}" for key in old if key not in new)


def _change(old: Check, new: Check) -> str:
    was, now, budget = (number(x, new.dtype) for x in (old.error, new.error, new.budget))
    return f"{was} -> {now}, budget {budget}"


def _preflight(report: Mapping[str, Any]) -> dict[str, str]:
    return {d["what"]: f"torch {d['torch']}, JAX {d['jax']}" for d in report["preflight"]}


def _causes(report: Mapping[str, Any]) -> dict[str, str]:
    """What is known of every divergence, by its place."""
    out = {}
    for divergence in report["divergences"]:
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
