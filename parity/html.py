"""A report as one page that stands alone: no script, no request, and it can be sent as a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from parity import plots, wording
from parity.findings import Point, Report
from parity.junit import flat

SHOWN = 12  # rows of a table before the rest is folded away
HEADINGS = {
    "forward": "going forward: values",
    "backward": "going back: cotangents",
    "parameter": "gradients of the parameters",
    "update": "the optimizer's updates, each step alone",
    "mu": "Adam's first moments, each step alone",
    "nu": "Adam's second moments, each step alone",
}


@dataclass(frozen=True)
class Plot:
    """Two curves, what they show in a sentence, and the names of what is out of band."""

    title: str
    summary: str
    svg: str
    bad: list[Point]


def page(report: Report, title: str) -> str:
    """The HTML of a report, with everything in it. Any text in the report is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": wording.number, "share": wording.share, "used": used}
    text = environment.get_template("report.html.j2").render(
        title=title,
        report=report,
        tone=tone(report),
        verdict=wording.verdict(report),
        suspects=[(wording.place(s.part, s.layers), s) for s in report.suspects],
        facts=[(name, shown(value)) for name, value in flat(report.environment)],
        brief=brief(report.environment),
        plots=curves(report.points),
        heat=plots.heat(report.heat, "heat") if report.heat else None,
        gradients=gradients(report.points),
        steps=steps(report),
        failing=sum(not check.ok for check in report.checks),
        shown=SHOWN,
    )
    return text.encode("utf-8", "replace").decode()


def tone(report: Report) -> str:
    """The class of the verdict's colour."""
    if not report.equal:
        return "bad"
    return "doubtful" if report.provisional else "good"


def used(margin: float) -> str:
    return f"{margin:.0%}" if margin < 10 else f"{margin:.1e} x"


def shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def brief(environment: dict[str, Any]) -> str:
    """The fingerprint in a line: versions that matter most, devices, the input's hash."""
    versions = environment.get("versions", {})
    parts = [f"{name} {versions[name]}" for name in ("jax", "flax", "torch") if versions.get(name)]
    devices = environment.get("jax_devices", [])
    parts += [f"{devices.count(d)} x {d}" for d in dict.fromkeys(devices)]
    if "input_sha256" in environment:
        parts.append(f"input {environment['input_sha256'][:12]}")
    return " · ".join(parts)


def curves(points: Sequence[Point]) -> list[Plot]:
    """One plot for each dtype and direction, each in its own order of computation."""
    out = []
    for dtype in dict.fromkeys(p.dtype for p in points):
        for direction, heading in HEADINGS.items():
            chosen = [p for p in points if (p.dtype, p.direction) == (dtype, direction)]
            if not chosen:
                continue
            if direction == "backward":
                chosen = going_back(chosen)
            bad = [p for p in chosen if not p.ok]
            summary = f"{len(bad)} of {len(chosen)} out of band"
            summary += f", the first is {bad[0].probe}" if bad else ""
            svg = plots.curves(chosen, f"{dtype} {direction}")
            out.append(Plot(f"{dtype}, {heading}", summary, svg, bad))
    return out


def going_back(points: list[Point]) -> list[Point]:
    """From the head to the embedding, in whichever of the two orders they came."""
    layers = [p.layer for p in points if p.layer is not None]
    return points[::-1] if points[0].probe == "embed" or layers != sorted(layers)[::-1] else points


def gradients(points: Sequence[Point]) -> list[Point]:
    """The parameters' gradients, the worst in units of its band first."""
    chosen = [p for p in points if p.direction == "parameter"]
    return sorted(chosen, key=lambda p: (p.ok, -over(p)))


def over(point: Point) -> float:
    """What is injected in units of the band: NaN is as bad as can be."""
    if math.isnan(point.injected) or math.isnan(point.band):
        return math.inf
    if point.band:
        return point.injected / point.band
    return math.inf if point.injected else 0.0


def steps(report: Report) -> dict[str, Any] | None:
    """The plot and the table of a trajectory."""
    if not report.trajectory:
        return None
    columns = list(dict.fromkeys(key for step in report.trajectory for key in step))
    rows = [[cell(step.get(key, "")) for key in columns] for step in report.trajectory]
    svg = plots.trajectory(report.trajectory, "trajectory")
    return {"svg": svg, "columns": columns, "rows": rows}


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
