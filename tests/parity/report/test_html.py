"""The page: it stands alone, shows what failed, survives odd numbers, and a browser opens it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from jaxtwin.parity.report import html, plots
from jaxtwin.parity.report.results import Check, Point, Report
from jaxtwin.tests.helpers import reports

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
]
OFFLINE = ["--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9"]
RED = (0xD3, 0x20, 0x2F)  # --bad of the template's light colours
NO_END = {"meta", "link"}


class Elements(HTMLParser):
    """Every element with its attributes; fails where one is not closed."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.text: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in NO_END:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append((self.open[-1] if self.open else "", data.strip()))

    def said(self, tag: str) -> list[str]:
        return [text for at, text in self.text if at == tag]

    def values(self, *names: str) -> list[str]:
        return [value for _, attrs in self.found for n, value in attrs.items() if n in names]


@pytest.fixture(scope="module")
def page() -> str:
    return html.page(reports.failing(), "made-up")


def test_it_asks_nobody_for_anything(page: str) -> None:
    seen = Elements(page)
    outside = seen.values("src", "href", "xlink:href", "srcset", "data", "poster", "action")
    outside += re.findall(r"url\(['\"]?([^'\")]*)", page)
    assert outside
    assert [u for u in outside if not u.startswith(("#", "data:"))] == []
    assert "@import" not in page
    assert not {"script", "iframe", "object", "embed", "form"} & {tag for tag, _ in seen.found}
    assert "://" not in page


def test_references_inside_lead_somewhere_and_no_id_is_twice(page: str) -> None:
    seen = Elements(page)
    ids = seen.values("id")
    assert len(set(ids)) == len(ids)
    inner = {u[1:] for u in seen.values("xlink:href", "href") if u.startswith("#")}
    inner |= set(re.findall(r"url\(#([^)]*)\)", page))
    labels = set(seen.values("aria-labelledby"))
    assert inner
    assert labels
    assert inner | labels <= set(ids)


def test_it_says_what_failed_and_why(page: str) -> None:
    text = " ".join(" ".join(words for _, words in Elements(page).text).split())
    assert "NOT EQUAL : first divergence at layers.3.attn.q: 'rope-base' (proven). 114 of" in text
    assert "The JAX side turns the queries with the base 10000. To mend it, use the base" in text
    assert "Explains 100 % of the final error." in text
    for part in ("Where it ran", "Trained side by side", "could not show", "jax 0.10.2"):
        assert part in text
    assert "a sliding window would not show" in text
    assert "transformers does not know this model" in text
    assert "Different before anything" not in text


def test_points_out_of_band_are_named_in_the_plot(page: str) -> None:
    named = [text for text in Elements(page).said("text") if "." in text and "layers" in text]
    assert named == [reports.FAILING] * 2  # once for each dtype
    assert plots.curves(reports.failing().points[:20], "x").count("layers") == 0


def test_one_plot_for_each_dtype_and_direction(page: str) -> None:
    titles = [text for text in Elements(page).said("h3") if text.startswith("float")]
    assert len(titles) == len(set(titles)) == 6
    assert sum(tag == "svg" for tag, _ in Elements(page).found) == 8  # heat, trajectory


def test_going_back_starts_at_the_head() -> None:
    points = [p for p in reports.failing().points if p.direction == "backward"][:63]
    assert points[0].probe == "embed"
    for given in (points, points[::-1]):
        assert [p.probe for p in html.going_back(given)][:3] == ["head", "norm", "layers.5.out"]
    for i in (7, 40):
        points[i] = replace(points[i], local_error=1.0)
    (plot,) = html.curves(points)
    assert plot.summary == f"2 of 63 out of band, the first is {points[40].probe}"


def test_differences_in_what_was_given_are_shown() -> None:
    report = reports.equal()
    report.preflight = [reports.preflight()]
    text = html.page(report, "made-up")
    assert "Different before anything" in text
    assert "the JAX side has the default" in text
    assert '<header class="doubtful">' in text
    assert '<header class="good">' in html.page(reports.equal(), "made-up")
    assert '<header class="bad">' in html.page(Report(), "nothing")


def test_gradients_worst_first() -> None:
    def point(name: str, local_error: float) -> Point:
        return Point(name, None, name, "parameter", "float64", 0.0, local_error, 0.0, 1e-12)

    odd = [
        point("a", 1e-13),
        point("b", 3e-12),
        point("c", np.nan),
        point("d", 0),
        point("e", 2e-11),
    ]
    assert [p.probe for p in html.gradients(odd)] == ["c", "e", "b", "a", "d"]
    rows = re.findall(
        r'<tr( class="fails")?><th scope="row" class="name">(.)<', html.page(Report(points=odd), "")
    )
    assert [(name, bool(fails)) for fails, name in rows] == [
        ("c", True), ("e", True), ("b", True), ("a", False), ("d", False)
    ]  # fmt: skip


def test_every_text_is_escaped() -> None:
    evil = "<script>alert(1)</script>&\"'$x_1$"
    report = reports.failing()
    report.notes, report.blind = [evil], [evil]
    report.environment = {evil: evil}
    report.checks.append(Check("gradient", evil, 1.0, 0.0, evil, evil))
    report.points.insert(0, Point(evil, None, evil, "forward", "float64", 1.0, 1.0, 0.0, 1e-13))
    page = html.page(report, evil)
    assert "<script" not in page
    assert "&lt;script" in page
    assert evil in Elements(page).said("text")  # whole: the plot reads no mathematics into it
    html.page(report, "\ud800").encode()


ODD = (np.nan, np.inf, 0.0, 1e-300, 1e300)


@pytest.mark.parametrize("values", [ODD, (np.nan,), (np.inf,), (0.0,), ()])
def test_odd_numbers(values: tuple[float, ...]) -> None:
    """Whatever the numbers are, there is a page, and the numbers are in it."""
    report = Report(environment={"x": np.nan})
    for i, value in enumerate(values):
        report.checks.append(Check("gradient", "float32", value, value, f"{i}"))
        for direction in ("forward", "backward", "parameter"):
            for band in (1e-13, np.nan, 0.0):
                report.points.append(
                    Point(f"p{i}", i, "p", direction, "float64", value, value, value, band)
                )
        step = dict.fromkeys(("loss_torch", "loss_jax", "parameters", "mu", "nu"), value)
        report.trajectory.append({"step": i, **step, "worst": None})
    report.heat = [list(values), list(values)]
    page = html.page(report, "odd")
    Elements(page)
    if values:
        assert f">{values[0]:.0f}<" in page
        assert "<svg" in page


def test_nan_is_drawn_above_and_zero_below() -> None:
    y = plots.plottable([np.nan, 1e-3, 0.0, np.inf, 1e-9])
    assert y[0] == y[3] > y[1] > y[4] > y[2] > 0


def test_the_same_report_gives_the_same_page(page: str) -> None:
    assert html.page(reports.failing(), "made-up") == page


@pytest.mark.slow
def test_a_large_model_is_under_two_megabytes() -> None:
    report = reports.failing(36, ("float64", "float32", "bfloat16"))  # 10 probes a layer here
    parameters = [p for p in report.points if p.direction == "parameter" and p.dtype == "float64"]
    extra = 400 - len(parameters)
    for dtype in ("float64", "float32", "bfloat16"):
        report.points += [
            Point(f"extra.{i}", None, "extra", "parameter", dtype, 1e-7, 1e-7, 1e-8, 1e-7)
            for i in range(extra)
        ]
        report.checks += [Check("gradient", dtype, 1e-7, 1e-7, f"extra.{i}") for i in range(extra)]
    report.heat = np.random.default_rng(0).random((36, 300)).tolist()
    page = html.page(report, "large")
    assert sum(p.direction == "forward" for p in report.points) / 3 >= 30 * 12 + 3
    assert 1_000_000 < len(page.encode()) < 2_000_000


def test_pictures_and_tables_can_be_read_aloud(page: str) -> None:
    seen = Elements(page).found
    pictures = [attrs for tag, attrs in seen if attrs.get("role") == "img"]
    assert len(pictures) == 9  # eight plots and one bar
    assert all(attrs.get("aria-label") for attrs in pictures)
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in seen if tag == "th")
    assert all(attrs.get("aria-hidden") == "true" for tag, attrs in seen if tag == "svg")
    assert ("html", {"lang": "en"}) in seen


# ---- in a browser -------------------------------------------------------------------------------

browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium: apt-get install --no-install-recommends chromium"
)


def chromium(folder: Path, page: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Opens the page with no way to a network."""
    file, profile = folder / "page.html", folder / "profile"
    file.write_text(page, "utf-8")
    shutil.rmtree(profile, ignore_errors=True)
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, *OFFLINE, f"--user-data-dir={profile}", *flags, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def blobs(folder: Path, page: str, colour: tuple[int, int, int] = RED) -> tuple[np.ndarray, str]:
    """Where a 5 x 5 square of that colour lies below the verdict, in a screenshot; and stderr."""
    from PIL import Image

    shot = folder / "shot.png"
    done = chromium(folder, page, "--window-size=1120,1500", f"--screenshot={shot}")
    with Image.open(shot) as image:
        assert image.size == (1120, 1500)
        same = (np.asarray(image.convert("RGB")) == colour).all(axis=-1)[300:]
    squares = np.lib.stride_tricks.sliding_window_view(same, (5, 5)).all(axis=(-1, -2))
    return np.argwhere(squares), done.stderr


@browser
def test_the_failing_layer_is_seen_in_a_browser(page: str, tmp_path: Path) -> None:
    found, said = blobs(tmp_path, page)
    assert "CONSOLE" not in said
    assert found.size
    x = found[:, 1] / 1120
    assert (x > 0.5).all()  # the middle of layer 3 of 6, at the start of which attn.q stands
    assert (x < 0.6).all()


@browser
def test_a_heat_map_of_rounding_alone_stays_dark(tmp_path: Path) -> None:
    """The colours of the upper half of the scale are for errors that grow by decades."""
    from matplotlib.colors import to_rgb

    top = tuple(round(255 * x) for x in to_rgb(plots.HEAT(1.0)[:3]))
    quiet, grown = reports.equal(), reports.equal()
    quiet.heat = [[1e-16, 2e-15]] * 3
    grown.heat = [[1e-16, 1e-3]] * 3
    assert not blobs(tmp_path, html.page(quiet, "quiet"), top)[0].size
    assert blobs(tmp_path, html.page(grown, "grown"), top)[0].size


@browser
def test_where_nothing_failed_nothing_is_red(tmp_path: Path) -> None:
    report = reports.failing()
    report.points = [p for p in report.points if p.ok]
    found, said = blobs(tmp_path, html.page(report, "made-up"))
    assert not found.size
    assert "CONSOLE" not in said


@browser
def test_the_failing_probe_is_in_the_page_as_the_browser_has_it(page: str, tmp_path: Path) -> None:
    dom = chromium(tmp_path, page, "--dump-dom").stdout
    assert re.search(rf"<text [^>]*>{re.escape(reports.FAILING)}</text>", dom)
    assert dom.count("<svg") == 8


@browser
def test_the_page_lets_no_script_run_and_this_test_hears_the_console(tmp_path: Path) -> None:
    page = html.page(reports.equal(), "made-up")
    page = page.replace("</main>", "<script>document.title = 'ran'</script></main>")
    done = chromium(tmp_path, page, "--dump-dom")
    assert "CONSOLE" in done.stderr
    assert "<title>ran" not in done.stdout
