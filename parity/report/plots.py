"""Plots of a report as inline SVG: their colours are the page's, their text is text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from jaxtwin.parity.report.results import Point

# Stand-ins that become the page's CSS variables, so that a plot is dark where the page is.
INK, GRID, END_TO_END, LOCAL, BAND, BAD = (f"#01020{i}" for i in range(1, 7))
VARIABLES = dict(
    zip(
        (INK, GRID, END_TO_END, LOCAL, BAND, BAD),
        ["ink", "grid", "end-to-end", "local", "band", "bad"],
        strict=True,
    )
)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "path.simplify": False,
}
HEAT = LinearSegmentedColormap.from_list(
    "heat", ["#1b2a49", "#25708c", "#8fc0a9", "#f4d35e", "#f26419", "#d7263d"]
)
MOST = 1e40  # the largest number drawn
DECADES = 6  # that the colours of a heat map span at least, so that rounding alone stays dark
LABELS = 6  # of the points out of band, at most so many carry their name


@contextmanager
def drawing(salt: str, height: float) -> Iterator[tuple[Figure, list[str]]]:
    """A figure, and a list that holds its SVG afterwards. The salt keeps ids apart on a page."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure = Figure(figsize=(10, height), layout="constrained")
        FigureCanvasSVG(figure)
        out: list[str] = []
        yield figure, out
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
        out.append(_inline(file.getvalue()))


def _inline(svg: str) -> str:
    """Fit to stand in a page: no prolog or date, ids only where they are needed, its colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", r"<svg \1 aria-hidden='true'>", svg)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    for stand_in, name in VARIABLES.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return svg.strip()


def plottable(values: ArrayLike) -> np.ndarray:
    """On a log scale: 0 below all the rest, inf and nan above. What is beyond MOST is cut to it."""
    x = np.array(values, dtype=np.float64)
    x = np.where(np.isfinite(x) & (x > 0), np.clip(x, 1 / MOST, MOST), x)
    drawn = x[np.isfinite(x) & (x > 0)]
    low, high = (drawn.min(), drawn.max()) if drawn.size else (1e-17, 1.0)
    x = np.where(x <= 0, low / 10, x)
    return np.where(np.isfinite(x), x, high * 100)


def curves(points: Sequence[Point], salt: str) -> str:
    """The two curves of one direction in one dtype, in the order of the points given."""
    n = len(points)
    at = np.arange(n)
    rows = [(p.accumulated_error, p.local_error, p.band, p.noise) for p in points]
    accumulated, local, band, noise = plottable(rows).T
    bad = [i for i, point in enumerate(points) if not point.ok]
    with drawing(salt, 3.7) as (figure, out):
        axes = figure.add_subplot()
        axes.set_yscale("log")
        low = min(accumulated.min(), local.min(), band.min()) / 5
        high = max(accumulated.max(), local.max(), band.max())
        high *= (high / low) ** 0.28  # room for the labels
        axes.set_ylim(low, high)
        axes.set_xlim(-0.5 - 0.01 * n, n - 0.5 + 0.01 * n)
        axes.fill_between(at, low, band, color=BAND, linewidth=0, step="mid", label="noise band")
        if any(p.noise for p in points):
            axes.step(at, noise, where="mid", color=GRID, linewidth=1, label="torch's own error")
        size = 3 if n < 150 else 1.6
        axes.plot(
            at, accumulated, "-", color=END_TO_END, linewidth=1.8, label="accumulated, end to end"
        )
        axes.plot(
            at, local, "o-", color=LOCAL, linewidth=0.8, ms=size, label="local, the part alone"
        )
        if bad:
            axes.plot(at[bad], local[bad], "D", color=BAD, ms=5.5, label="out of band", zorder=5)
            _label(axes, points, local, bad)
        _layers(axes, points)
        axes.set_ylabel("relative L2 error")
        _finish(axes)
    return out[0]


def _label(axes: Axes, points: Sequence[Point], y: np.ndarray, bad: Sequence[int]) -> None:
    """Names the first point out of band, then the worst, wherever there is room."""
    low, high = np.log(axes.get_ylim())
    worst = sorted(bad[1:], key=lambda i: -np.nan_to_num(points[i].local_error, nan=np.inf))
    taken: list[tuple[float, float, float]] = []
    for i in [bad[0], *worst]:
        text = points[i].probe
        x, width = i / max(len(points) - 1, 1), 0.009 * len(text)
        left = min(max(x - width / 2, 0), 1 - width)
        height = (np.log(y[i]) - low) / (high - low) + 0.055
        clear = all(left > x1 or left + width < x0 or abs(height - h) > 0.07 for x0, x1, h in taken)
        if not clear or len(taken) >= LABELS:
            continue
        taken.append((left, left + width, height))
        axes.text(
            left + width / 2, height, text, transform=axes.transAxes, color=BAD, ha="center",
            fontweight="bold" if i == bad[0] else "normal",
        )  # fmt: skip


def _layers(axes: Axes, points: Sequence[Point]) -> None:
    """The number of each layer in its middle, as many as there is room for; others a line below."""
    groups = [
        (key, list(group)) for key, group in groupby(range(len(points)), lambda i: points[i].layer)
    ]
    step = -(-len(groups) // 34)
    ticks, labels = [], []
    for layer, inside in groups:
        axes.axvline(inside[0] - 0.5, color=GRID, linewidth=0.4, zorder=0)
        if layer is None:
            names = list(dict.fromkeys(points[i].probe for i in inside))
            labels.append("\n" + (", ".join(names) if len(names) < 4 else "outside the layers"))
        else:
            labels.append(str(layer) if layer % step == 0 else "")
        ticks.append((inside[0] + inside[-1]) / 2)
    axes.set_xticks(ticks, labels)
    for at, label in zip(ticks, axes.get_xticklabels(), strict=True):
        if label.get_text().startswith("\n") and len(groups) > 1:
            label.set_horizontalalignment("left" if at < len(points) / 2 else "right")
    order = "" if points[0].direction == "parameter" else ", in the order of computation"
    axes.set_xlabel("layer" + order)


def _finish(axes: Axes) -> None:
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter(lambda y, _: _power(np.log10(y)))
        axes.yaxis.set_minor_formatter(lambda y, _: "")
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=5)


def _power(exponent: float) -> str:
    return "1" if exponent == 0 else f"1e{exponent:g}"


def heat(rows: Sequence[Sequence[float]], salt: str) -> str | None:
    """Layer by position; 0 is drawn as the least, inf as the most, nan in red. None without any."""
    x = np.array(rows, dtype=np.float64)
    src = x[np.isfinite(x) & (x > 0)]
    if x.ndim != 2 or not src.size:
        return None
    low, high = np.log10(src.min()), np.log10(src.max())
    with np.errstate(divide="ignore"):
        x = np.clip(np.log10(np.maximum(x, 0)), low, high)
    with drawing(salt, min(1.2 + 0.22 * len(x), 7)) as (figure, out):
        axes = figure.add_subplot()
        image = axes.imshow(
            np.ma.masked_invalid(x), aspect="auto", cmap=HEAT.with_extremes(bad="#ff00aa"),
            interpolation="nearest", vmin=low, vmax=max(high, low + DECADES),
        )  # fmt: skip
        axes.set_xlabel("position")
        axes.set_ylabel("layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=30)
        bar.ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        bar.ax.yaxis.set_major_formatter(lambda y, _: _power(y))
        bar.outline.set_visible(False)
    return out[0]


def trajectory(steps: Sequence[Mapping[str, Any]], salt: str) -> str:
    """The loss of both sides, and how far they drift apart, by step."""
    at = [step["step"] for step in steps]
    with drawing(salt, 4.6) as (figure, out):
        upper, lower = figure.subplots(2, sharex=True, height_ratios=(1, 1.2))
        upper.plot(
            at,
            _column(steps, "loss_torch"),
            "-",
            color=END_TO_END,
            linewidth=3,
            label="loss, torch",
        )
        upper.plot(
            at, _column(steps, "loss_jax"), "--", color=LOCAL, linewidth=1.5, label="loss, JAX"
        )
        upper.set_ylabel("loss")
        lower.set_yscale("log")
        drift = {"loss": apart(steps, "loss")}
        drift |= {key: _column(steps, key) for key in ("parameters", "mu", "nu")}
        drift = {key: values for key, values in drift.items() if not np.isnan(values).all()}
        shown = plottable(list(drift.values()))
        marks = zip(drift, shown, "osv^", (BAD, END_TO_END, LOCAL, INK), strict=False)
        for key, values, mark, color in marks:
            lower.plot(
                at, values, mark + "-", color=color, ms=3, linewidth=1, label=f"drift, {key}"
            )
        lower.set_ylabel("relative drift")
        lower.set_xlabel("step")
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axes, corner in ((upper, "upper right"), (lower, "lower right")):
            axes.grid(axis="y")
            if axes.lines:
                axes.legend(loc=corner, ncols=4)
        lower.yaxis.set_major_formatter(lambda y, _: _power(np.log10(y)))
        lower.yaxis.set_minor_formatter(lambda y, _: "")
    return out[0]


def _column(steps: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """What is no number, or not there, as NaN."""
    values = [step.get(key) for step in steps]
    return np.array([float(v) if isinstance(v, int | float) else np.nan for v in values])


def apart(steps: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """The relative distance of the two sides' numbers, by step."""
    torch, jax = _column(steps, f"{key}_torch"), _column(steps, f"{key}_jax")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(torch == jax, 0.0, np.abs(torch - jax) / np.abs(torch))
