"""What a check is asked to write, and how it says its numbers: places, counts, names."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxtwin.cli.main import app
from jaxtwin.configs import BadInput
from jaxtwin.parity.check.source_check import check
from jaxtwin.parity.diagnose.replay import ready
from jaxtwin.parity.report import baseline, details, html, results
from jaxtwin.parity.report import console as console_report
from jaxtwin.parity.report.junit import junit
from jaxtwin.parity.report.output_files import Files
from jaxtwin.parity.report.results import Check, Report
from jaxtwin.tests.helpers import ROOT, reports


def console() -> Console:
    return Console(width=200, record=True, file=open(os.devnull, "w"))


def shown(report: Report) -> str:
    to = console()
    console_report.show(report, to)
    return to.export_text()


# ---- the other side -----------------------------------------------------------------------------


@pytest.mark.slow
def test_every_output_says_what_the_jax_side_was_built_from(tmp_path: Path) -> None:
    how = {"dtypes": ["float64"], "tokens": 8, "layout": "unroll", "witness": False}
    report = check("reference-tiny", against="random:reference-tiny", **how)  # type: ignore[arg-type]
    other = {"name": "random:reference-tiny", "kind": "preset"}
    assert report.environment["source"] == {"name": "reference-tiny", "kind": "preset"}
    assert report.to_json()["environment"]["against"] == other
    assert "the JAX side is random:reference-tiny (preset)\n" in shown(report)
    properties = ET.fromstring(junit(report)).iter("property")
    values = {p.get("name"): p.get("value") for p in properties}
    assert (values["against.name"], values["against.kind"]) == tuple(other.values())
    Files(html=tmp_path / "a.html").write(report, "reference-tiny")
    page = (tmp_path / "a.html").read_text()
    title = "reference-tiny against random:reference-tiny (preset)"
    assert f"<title>EQUAL: {title}</title>" in page
    assert f"<h1>{title}: PyTorch against JAX</h1>" in page


def test_without_another_side_nothing_is_said_of_one() -> None:
    report = reports.equal()
    assert "the JAX side is" not in shown(report)
    assert "<title>EQUAL: made-up</title>" in html.page(report, "made-up")


# ---- places -------------------------------------------------------------------------------------


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The verbs that began to work, which none of these may."""
    began: list[str] = []

    def work(name: str, answer: object) -> object:
        def begin(*words: object, **how: object) -> object:
            began.append(name)
            return answer

        return begin

    table = {"faults": [], "alarms": [], "false_alarms": 0, "controls": 0, "seconds": 1.0,
             "pairs": {"tried": 0, "located": 0, "named": 0}}  # fmt: skip
    monkeypatch.setattr("jaxtwin.parity.selftest.kill_table.run", work("faults", table))
    monkeypatch.setattr("jaxtwin.cli.main.trained", work("train", {"steps": []}))
    monkeypatch.setattr("jaxtwin.parity.check.source_check.check", work("check", reports.equal()))
    return began


@pytest.mark.parametrize("verb", [["faults"], ["train", "run.toml"], ["check", "made-up"]])
def test_save_is_refused_before_the_work_and_written_after(
    verb: list[str], worked: list[str], tmp_path: Path
) -> None:
    answer = CliRunner().invoke(app, [*verb, "--save", str(tmp_path / "no" / "x")])
    assert answer.exit_code == 2
    assert f"there is no folder {tmp_path}/no; make it first" in answer.stderr.replace("\n", "")
    assert worked == []
    answer = CliRunner().invoke(app, [*verb, "--save", str(tmp_path / "x")])
    assert answer.exit_code == 0, answer.output
    assert worked == verb[:1]
    assert isinstance(json.loads((tmp_path / "x").read_text()), dict)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("save", "html"),
        ("save", "junit"),
        ("html", "junit"),
        ("html", "baseline"),
        ("junit", "baseline"),
        ("save", "replay"),
        ("html", "replay"),
    ],
)
def test_two_options_with_one_place_are_refused(
    one: str, other: str, worked: list[str], tmp_path: Path
) -> None:
    place = tmp_path / "a"
    if other == "baseline":
        place.write_text(json.dumps(reports.equal().to_json()))
    (tmp_path / "link").symlink_to("a")
    words = ["check", "made-up", f"--{one}", str(place), f"--{other}", str(tmp_path / "link")]
    if other == "replay":
        words[-1] = str(tmp_path / "." / "a")
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 2
    assert f"--{one} and --{other} both name" in answer.stderr.replace("\n", " ")
    assert worked == []


def test_what_may_share_a_place(tmp_path: Path) -> None:
    place = tmp_path / "a.json"
    place.write_text(json.dumps(reports.failing().to_json()))
    changes = Files(save=place, baseline=place).write(reports.equal(), "made-up")
    assert changes
    assert json.loads(place.read_text())["equal"] is True
    Files(save=Path(os.devnull), junit=Path(os.devnull)).write(reports.equal(), "made-up")


def test_a_replay_needs_the_folder_above_it(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"there is no folder {tmp_path}/no; make it first"):
        ready(tmp_path / "no" / "replay", ["float64"])
    ready(tmp_path / "replay", ["float64"])
    assert list(tmp_path.iterdir()) == []


# ---- numbers ------------------------------------------------------------------------------------

ODD = [
    Check("tokens", "int", 29.0, 0.0, "greedy"),
    Check("round_trip", "as stored", 120.0, 0.0),
    Check("logits", "float64", math.inf, 1e-13),
    Check("loss", "float64", math.nan, 1e-13),
    Check("gradient", "float32", 29.0, 0.5, "a"),
]


def test_of_many_gradients_the_worst_are_listed_and_the_rest_counted() -> None:
    """One wrong part spoils every gradient before it; a NaN is the worst of all."""
    errors = [math.nan, *(3e-6 + i * 1e-7 for i in range(14)), *(i * 1e-8 for i in range(9))]
    report = Report([Check("logits", "float32", 2.0, 1.0)])
    report.checks += [Check("gradient", "float32", e, 1e-6, f"w{i}") for i, e in enumerate(errors)]
    assert [c.place for c in console_report.chosen(report.checks, False)] == [
        "", "w0", *(f"w{i}" for i in range(6, 15)), "w21", "w22", "w23"
    ]  # fmt: skip
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console_report.show(report, console)
    text = console.export_text()
    assert "gradients not listed: 5 that fail by less and 6 that hold with more room" in text
    assert console_report.chosen(report.checks, True) == report.checks


def test_counts_are_whole_and_what_is_no_number_stands_alone() -> None:
    report = Report(list(ODD))
    rows = [line.split() for line in shown(report).splitlines()]
    ends = [row[-4:] for row in rows[1 : 1 + len(ODD)]]
    assert ends == [
        ["29", "0", "inf", "FAILS"],
        ["120", "0", "inf", "FAILS"],
        ["inf", "1.00e-13", "inf", "FAILS"],
        ["nan", "1.00e-13", "nan", "FAILS"],
        ["2.90e+01", "5.00e-01", "5.8e+01x", "FAILS"],
    ]
    assert "'greedy, tokens that differ' in int: 29 where 0 is allowed" in results.verdict(report)
    page = html.page(report, "made-up")
    for text in ("29", "120", "inf", "nan", "5.8e+01x"):
        assert f'<td class="n">{text}</td>' in page
    assert "inf x" not in page
    was = json.loads(json.dumps(Report([replace(c, error=0.0, budget=0.0) for c in ODD]).to_json()))
    lines = baseline.compare(was, report)
    assert lines[0] == "fails now: int greedy, tokens that differ: error 0 -> 29, budget 0"


def test_every_kind_of_check_and_detail_is_documented() -> None:
    text = (ROOT / "docs" / "json.md").read_text()
    assert [kind for kind in (*results.CHECKS, *details.TENSORS) if f"`{kind}`" not in text] == []


# ---- a baseline ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "was", "now"),
    [
        ("part_forward", "layers.1.attn", "head"),
        ("training_loss", "step 3", "step 19"),
        ("training_mu", "layers.0.attn.q.weight, step 3", "embed.weight, step 4"),
        ("optimizer_nu", "embed.weight", "norm.weight"),
        ("shapes", "a", "b"),
    ],
)
def test_a_check_is_the_same_whichever_place_is_worst(kind: str, was: str, now: str) -> None:
    others = [Check("part_backward", "float64", 0.0, 1.0, name) for name in "ab"]
    old = Report([Check(kind, "float64", 0.1, 1.0, was), *others]).to_json()
    again = Report([Check(kind, "float64", 0.1, 1.0, now), *others])
    assert baseline.compare(old, again) == []
    again.checks[0] = Check(kind, "float64", 2.0, 1.0, now)
    (line,) = baseline.compare(old, again)
    assert line.startswith(f"fails now: float64 {again.checks[0].name}: error 1.00e-01 -> 2.00e+00")
    again.checks[0] = Check(kind, "float32", 0.1, 1.0, now)  # another dtype is another check
    assert len(baseline.compare(old, again)) == 2


def test_where_every_part_has_a_check_each_is_its_own() -> None:
    def report(*names: str) -> Report:
        return Report([Check("part_forward", "float64", 0.0, 1.0, n) for n in names])

    assert baseline.compare(report("a", "b").to_json(), report("a", "c")) == [
        "appeared: float64 part alone, forward: c",
        "gone: float64 part alone, forward: b",
    ]


# ---- the verbs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("controls", "pairs"), [(0, 0), (200, 0), (0, 50), (200, 50)])
def test_the_kill_table_says_only_what_was_tried(controls: int, pairs: int) -> None:
    fault = {"name": "rope-base", "caught": True, "named": True, "where": "attn", "cause": "c"}
    tried = {"tried": pairs, "located": pairs, "named": pairs}
    table = {"faults": [fault], "alarms": [], "false_alarms": 0, "controls": controls,
             "pairs": tried, "seconds": 2.0}  # fmt: skip
    to = console()
    console_report.show_faults(table, to)
    said = to.export_text().splitlines()[-1]
    want = ["1 of 1 faults caught, 1 called by their name"]
    want += ["0 false alarms in 200 random models"] if controls else []
    want += ["pairs: both located in 50 and named in 50 of 50"] if pairs else []
    assert said == "; ".join([*want, "2 s"])


def test_the_program_is_called_by_its_name() -> None:
    words = [sys.executable, "-m", "jaxtwin", "check", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "Usage: jaxtwin check [OPTIONS]" in done.stdout
