"""A report as one page that stands alone: no script, no request, and it can be sent as a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jaxtwin.parity.report import plots, results, wording
from jaxtwin.parity.report.details import Detail, Logits, Where, reading
from jaxtwin.parity.report.junit import flat
from jaxtwin.parity.report.results import Point, Report, number

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
    environment.filters |= {"number": number, "share": wording.share}
    environment.filters["budget_share"] = wording.budget_share
    against = wording.opposite(report)
    text = environment.get_template("report.html.j2").render(
        title=f"{title} against {against}" if against else title,
        report=report,
        tone=tone(report),
        verdict=results.verdict(report),
        details=[tensor(detail) for detail in report.details],
        divergences=[(results.place(s.part, s.layers), s) for s in report.divergences],
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
    """The local error in units of its band: NaN is as bad as can be."""
    if math.isnan(point.local_error) or math.isnan(point.band):
        return math.inf
    if point.band:
        return point.local_error / point.band
    return math.inf if point.local_error else 0.0


def steps(report: Report) -> dict[str, Any] | None:
    """The plot and the table of a trajectory."""
    if not report.trajectory:
        return None
    columns = list(dict.fromkeys(key for step in report.trajectory for key in step))
    rows = [[cell(step.get(key, "")) for key in columns] for step in report.trajectory]
    svg = plots.trajectory(report.trajectory, "trajectory")
    return {"svg": svg, "columns": columns, "rows": rows}


def tensor(detail: Detail) -> dict[str, Any]:
    """A row of the table of details, in words."""
    off, most = detail.nonfinite, detail.largest
    worst = [
        f"{axis} {w.index}: {number(w.relative_l2)} (others {number(w.others)})"
        for axis, w in detail.worst.items()
    ]
    odd = [(off.got, "JAX alone"), (off.want, "torch alone"), (off.unlike, "not alike")]
    return {
        "name": wording.titled(detail),
        "reading": reading(detail),
        "error": number(detail.relative_l2),
        "worst": worst,
        "fit": f"{detail.scale:.6g} leaves {number(detail.residual)}",
        "ulp": f"{detail.ulp.max:.3g} at {at(detail.ulp.at)}",
        "bias": f"{detail.bias.signed:.1f}, outward {detail.bias.outward:.1f}",
        "finite": ", ".join(f"{n} {where}" for n, where in odd if n) or "agree",
        "sorted": number(detail.sorted_l2),
        "largest": f"{number(most.error)} at {at(most.at)}: {most.got:.6g}, not {most.want:.6g}",
        "logits": prediction(detail.logits) if detail.logits else "",
    }


def prediction(logits: Logits) -> str:
    """What is off in the prediction: KL and top-1 flips."""
    kl = f"KL {number(logits.kl)} nats at {at(logits.kl_at)}"
    flips = f"{logits.flips} of {logits.positions} top-1 tokens flip"
    if logits.margin_at is None:
        return f"{kl}; {flips}"
    return f"{kl}; {flips}, the clearest by {logits.margin:.3g} at {at(logits.margin_at)}"


def at(where: Where) -> str:
    """A coordinate: "b 0, t 3"; a number alone has none."""
    return ", ".join(f"{axis} {index}" for axis, index in where.items()) or "its only element"


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
