"""A report as JUnit XML, which CI systems show by themselves."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

from jaxtwin.parity.report import results, wording
from jaxtwin.parity.report.results import Report

NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """One testcase for each check, by dtype, and one for the differences before any run."""
    suite = ET.Element("testsuite", name="jaxtwin")
    properties = ET.SubElement(suite, "properties")
    for name, value in flat(report.environment):
        ET.SubElement(properties, "property", name=_text(name), value=_text(value))
    _preflight(report, suite)
    for check in report.checks:
        case = _case(suite, check.dtype, check.name)
        if not check.ok:
            message = f"error {check.error:.6g}, budget {check.budget:.6g}"
            _fail(case, message, _why(report, message))
    if not report.checks:
        _fail(_case(suite, "jaxtwin", "something was compared"), results.verdict(report), "")
    for outcome in ("failure", "skipped"):
        name = {"failure": "failures"}.get(outcome, outcome)
        suite.set(name, str(len(suite.findall(f"testcase/{outcome}"))))
    suite.set("tests", str(len(suite.findall("testcase"))))
    suite.set("errors", "0")
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, "unicode")}\n'


def flat(data: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every entry of nested dicts, by dotted name."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _preflight(report: Report, suite: ET.Element) -> None:
    """Fails with the comparison; a difference that changed nothing is shown as skipped."""
    case = _case(suite, "preflight", "spec, weights and settings are the same on both sides")
    differences = report.preflight
    if differences:
        lines = [f"{d.what}: torch {d.torch}, JAX {d.jax}. {d.about}".strip() for d in differences]
        message = f"{len(differences)} differ, first {differences[0].what}"
        if report.equal:
            ET.SubElement(case, "skipped", message=_text(message)).text = _text("\n".join(lines))
        else:
            _fail(case, message, "\n".join(lines))


def _why(report: Report, message: str) -> str:
    first = results.first_divergence(report)
    lines = [message, f"first divergence at {first}"] if first else [message]
    lines += [wording.explanation(divergence) for divergence in report.divergences]
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in wording.readings(report))])


def _case(suite: ET.Element, group: str, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=f"jaxtwin.{_text(group)}", name=_text(name))


def _fail(case: ET.Element, message: str, text: str) -> None:
    ET.SubElement(case, "failure", type="NotEqual", message=_text(message)).text = _text(text)


def _text(x: Any) -> str:
    """Without the characters that XML has no way to write."""
    return NOT_XML.sub("?", str(x))
