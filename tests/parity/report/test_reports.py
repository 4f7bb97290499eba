"""What a report becomes beside the page: JUnit, changes since a baseline, lines on the console."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from jaxtwin.cli.main import app
from jaxtwin.configs import BadInput
from jaxtwin.configs.atomic_write import file_place, write_file
from jaxtwin.parity.report import baseline, results, wording
from jaxtwin.parity.report import console as console_report
from jaxtwin.parity.report.junit import junit
from jaxtwin.parity.report.results import Cause, Check, Difference, Divergence, Point, Report
from jaxtwin.tests.helpers import ROOT, reports

# ---- in words -----------------------------------------------------------------------------------


def test_the_verdict_says_where_and_why() -> None:
    report = reports.failing()
    start = "NOT EQUAL: first divergence at layers.3.attn.q: 'rope-base' (proven). 114 of 114 "
    assert results.verdict(report).startswith(start + "comparisons fail, first 'logits' in float64")
    report.divergences = [Divergence("attn.v", (2, 4), "backward", 7.0, None)]
    assert "first divergence at layers.4.attn.v (going back): cause not known. " in results.verdict(
        report
    )
    report.divergences = []
    assert "at layers.3.attn.q in float64: cause not known. 114" in results.verdict(report)
    report.points = []
    assert results.verdict(report).startswith("NOT EQUAL: 114 of 114 comparisons fail, first ")


def test_the_verdict_where_the_sides_differ_before_any_run() -> None:
    report = reports.equal()
    assert results.verdict(report) == "EQUAL: all 2 comparisons hold"
    report.preflight = [reports.preflight()] * 3
    differ = "the sides differ before any run (spec: runs.0.blocks.0.attn.rope.base and 2 more)"
    assert results.verdict(report) == f"EQUAL: all 2 comparisons hold; provisional: {differ}"
    wrong = reports.failing()
    wrong.preflight = report.preflight
    assert results.verdict(wrong).endswith(f" is allowed; provisional: {differ}")
    wrong.divergences, wrong.points = [], []
    assert results.verdict(wrong).endswith(f" is allowed; provisional: {differ}")
    report.checks.clear()
    assert results.verdict(report) == f"NOTHING WAS COMPARED: {differ}"


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ((), "head"),
        ((3,), "layers.3.head"),
        ((0, 1), "layers.{0,1}.head"),
        ((0, 1, 2, 3), "layers.{0..3}.head"),
        ((0, 2, 4), "layers.{0,2,4}.head"),
    ],
)
def test_places(layers: tuple[int, ...], name: str) -> None:
    assert results.place("head", layers) == name


def test_only_all_is_a_hundred_percent() -> None:
    assert [wording.share(x) for x in (0, 1e-9, 0.5, 0.9999, 1)] == [
        "0 %", "under 1 %", "50 %", "over 99 %", "100 %",
    ]  # fmt: skip


def test_a_complaint_is_short_whatever_is_wrong() -> None:
    report = reports.failing()
    report.divergences *= 9
    report.preflight = [replace(reports.preflight(), about="two\nlines", jax="a\nb")] * 9
    lines = wording.complaint(report).splitlines()
    assert len(lines) == wording.COMPLAINT
    assert lines[0] == results.verdict(report)
    assert lines[1].startswith("  layers.3.attn.q, 2.10e+11 times its band: 'rope-base' (proven)")
    assert lines[5] == "  and 5 more"
    assert lines[-1] == "  and 110 more"


def test_the_console_shows_causes_and_what_could_not_be_seen() -> None:
    report = reports.failing()
    report.preflight = [reports.preflight()]
    report.blind.append("[bold] is no markup here")
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console_report.show(report, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    text = " ".join(text.split())
    assert "differs: spec: runs.0.blocks.0.attn.rope.base: torch 500000.0, JAX 10000.0" in text
    assert "'rope-base' (proven): the JAX side turns the queries with the base 10000" in text
    assert "not shown: [bold] is no markup here" in text
    assert text.index("differs: ") < text.index("budget") < text.index("divergence: ")
    assert text.index("divergence: ") < text.index("not shown: ") < text.index("NOT EQUAL: ")


# ---- JUnit --------------------------------------------------------------------------------------


def cases(report: Report) -> tuple[ET.Element, dict[tuple[str, str], ET.Element]]:
    root = ET.fromstring(junit(report))
    (suite,) = root
    found = {(c.get("classname", ""), c.get("name", "")): c for c in suite.findall("testcase")}
    assert len(found) == len(suite.findall("testcase"))
    for outcome, name in {"failure": "failures", "skipped": "skipped"}.items():
        assert suite.get(name) == str(len(suite.findall(f"testcase/{outcome}")))
    assert suite.get("tests") == str(len(found))
    return suite, found


def test_junit_has_a_case_for_each_check() -> None:
    report = reports.failing()
    report.checks.append(Check("gradient", "float32", 0.0, 0.0, "holds"))
    suite, found = cases(report)
    assert len(found) == 1 + len(report.checks)
    assert suite.get("failures") == "114"
    failure = found["jaxtwin.float64", "logits"].find("failure")
    assert failure is not None
    assert failure.get("message") == "error 0.003, budget 1e-13"
    assert "first divergence at layers.3.attn.q: 'rope-base' (proven)" in (failure.text or "")
    assert "use the base 500000" in (failure.text or "")
    assert list(found["jaxtwin.float32", "grad holds"]) == []
    values = {p.get("name"): p.get("value") for p in suite.findall("properties/property")}
    assert values["versions.jax"] == "0.10.2"


def test_junit_of_differences_before_any_run() -> None:
    key = ("jaxtwin.preflight", "spec, weights and settings are the same on both sides")
    report = reports.failing()
    assert list(cases(report)[1][key]) == []
    report.preflight = [reports.preflight()]
    failure = cases(report)[1][key].find("failure")
    assert failure is not None
    assert "torch 500000.0, JAX 10000.0" in (failure.text or "")
    same = reports.equal()
    same.preflight = [reports.preflight()]
    suite, found = cases(same)
    assert suite.get("failures") == "0"  # as the exit status says
    assert found[key].find("skipped") is not None


def test_junit_of_nothing_fails() -> None:
    assert cases(Report())[0].get("failures") == "1"


def test_junit_of_odd_numbers_and_characters() -> None:
    name = "a<b>&\"'\x00\x1b\ud800\uffff\n"
    report = Report([Check("gradient", "float32", math.nan, math.inf, name)], notes=[name])
    report.environment = {name: name}
    text = junit(report)
    text.encode()
    _, found = cases(report)
    (failure,) = found["jaxtwin.float32", "grad a<b>&\"'????\n"]
    assert failure.get("message") == "error nan, budget inf"


# ---- since a baseline ---------------------------------------------------------------------------


CHECK = {"kind": "kl", "dtype": "y", "error": 0, "budget": 1, "place": "", "label": ""}


def old(report: Report) -> dict:
    return json.loads(json.dumps(report.to_json(), allow_nan=False))


def test_nothing_changed() -> None:
    report = reports.failing()
    report.checks.append(Check("output", "float32", math.nan, math.inf))
    report.preflight = [reports.preflight()]
    assert baseline.compare(old(report), report) == []


def test_every_change_of_a_check_has_its_line() -> None:
    def report(**errors: float) -> Report:
        return Report([Check("gradient", "float64", e, 1e-13, name) for name, e in errors.items()])

    was = report(breaks=5e-14, mended=2e-13, grows=1e-14, steady=1e-14, gone=0.0, nan=math.nan)
    now = report(breaks=2e-13, mended=5e-14, grows=2.1e-14, steady=1.9e-14, new=0.0, nan=math.nan)
    now.checks.append(Check("gradient", "float64", math.inf, 1e-13, "new and bad"))
    assert baseline.compare(old(was), now) == [
        "fails now: float64 grad breaks: error 5.00e-14 -> 2.00e-13, budget 1.00e-13",
        "holds now: float64 grad mended: error 2.00e-13 -> 5.00e-14, budget 1.00e-13",
        "grew: float64 grad grows: 0.1 -> 0.21 of its budget "
        "(error 1.00e-14 -> 2.10e-14, budget 1.00e-13)",
        "appeared: float64 grad new",
        "appeared: float64 grad new and bad, and it fails",
        "gone: float64 grad gone",
    ]


def test_changes_of_causes_and_environment() -> None:
    was, now = reports.failing(), reports.failing()
    was.environment = {**reports.ENVIRONMENT, "gone": 1}
    now.environment = {
        **reports.ENVIRONMENT,
        "versions": {"jax": "0.11", "flax": "0.12.8", "new": "1"},
    }
    now.divergences = [
        replace(now.divergences[0], cause=None),
        Divergence("head", (), "forward", 2.0, None),
    ]
    now.preflight = [reports.preflight()]
    assert baseline.compare(old(was), now) == [
        "preflight appeared: spec: runs.0.blocks.0.attn.rope.base: torch 500000.0, JAX 10000.0",
        "cause: layers.3.attn.q, forward: 'rope-base' (proven) -> not known",
        "cause appeared: head, forward: not known",
        "environment: versions.jax: 0.10.2 -> 0.11",
        "environment appeared: versions.new: 1",
        "environment gone: versions.torch: 2.13.0",
        "environment gone: gone: 1",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 0}, "expected schema 2, got 0"),
        ({"schema": None}, "expected schema 2, got None"),
        ({"checks": [{"name": "x"}]}, "not the JSON of a check"),
        ({"checks": [{**CHECK, "error": "z"}]}, "could not convert"),
        ({"checks": [{**CHECK, "kind": []}]}, "unhashable"),
        ({"checks": [{**CHECK, "kind": "x"}]}, "'x' is no kind of check"),
        ({"checks": [{**CHECK, "label": []}]}, "unhashable"),
        ({"checks": None}, "not the JSON of a check"),
        ({"environment": []}, "not the JSON of a check"),
        ({"divergences": [{"part": "x"}]}, "not the JSON of a check"),
        ({"divergences": {"a": 1}}, "not the JSON of a check"),
        ({"preflight": 3}, "not the JSON of a check"),
    ],
)
def test_what_is_no_report_is_refused(change: dict, said: str, tmp_path: Path) -> None:
    data = old(reports.failing()) | change
    with pytest.raises(BadInput, match=said):
        baseline.compare(data, reports.failing())
    file = tmp_path / "old.json"
    file.write_text(json.dumps(data))
    with pytest.raises(BadInput, match=rf"old.json: .*{said}"):
        baseline.read(file)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": 1}', "[" * 100_000, b"\xff\xfe"])
def test_files_that_are_no_report(text: str | bytes, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadInput, match=r"old\.json"):
        baseline.read(file)


# ---- files --------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, link = tmp_path / "a.txt", tmp_path / "link"
    link.symlink_to(file)
    write_file(link, "one")
    assert link.is_symlink()
    assert file.read_text() == "one"

    def fails(self: Path, *args: object) -> None:
        self.write_bytes(b"ha")
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", fails)
    with pytest.raises(BadInput, match="disk full"):
        write_file(file, "two")
    assert file.read_text() == "one"
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        write_file(pipe, "through")
        assert reader.communicate()[0] == b"through"
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no/where.html", "there is no folder"),
        (".", "it is a folder"),
        ("file/below", "there is no folder"),
        ("x" * 300, "too long"),
        ("a\0b", "cannot be written"),
        ("loop/x", "cannot be written"),
    ],
)
def test_places_where_no_file_can_be(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BadInput, match=said):
        file_place(tmp_path / name)


# ---- the front door -----------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """What the next checks find; empty when none was made."""
    found = [reports.failing()]
    monkeypatch.setattr("jaxtwin.parity.check.source_check.check", lambda src, **how: found.pop(0))
    return found


def run(*words: object, status: int) -> Result:
    result = CliRunner().invoke(app, ["check", "made-up", *map(str, words)])
    assert result.exit_code == status, result.output
    return result


def test_all_files_at_once(answers: list[Report], tmp_path: Path) -> None:
    page, xml, save = (tmp_path / name for name in ("a.html", "b.xml", "c.json"))
    before = tmp_path / "before.json"
    before.write_text(json.dumps(reports.equal().to_json()))
    words = ["--html", page, "--junit", xml, "--save", save, "--baseline", before]
    out = " ".join(run(*words, status=1).stdout.split())
    assert "NOT EQUAL: first divergence at layers.3.attn.q" in out
    assert "since the baseline: fails now: float64 logits: error 3.00e-15 -> 3.00e-03" in out
    assert "<!doctype html>" in page.read_text()
    assert "<title>NOT EQUAL: made-up</title>" in page.read_text()
    assert ET.parse(xml).getroot().tag == "testsuites"
    assert json.loads(save.read_text()) == reports.failing().to_json()
    assert sorted(tmp_path.iterdir()) == [page, xml, before, save]


def test_changes_in_json(answers: list[Report], tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(json.dumps(reports.failing().to_json()))
    assert json.loads(run("--baseline", before, "--json", status=1).stdout)["changes"] == []
    answers.append(reports.failing())
    assert "since the baseline: nothing changed" in run("--baseline", before, status=1).stdout
    answers.append(reports.equal())
    assert "changes" not in json.loads(run("--json", status=0).stdout)


@pytest.mark.parametrize("option", ["--html", "--junit", "--save", "--baseline"])
def test_a_bad_place_is_told_before_the_work(
    answers: list[Report], tmp_path: Path, option: str
) -> None:
    said = run(option, tmp_path / "no" / "file", status=2).stderr
    assert f"{tmp_path}/no" in "".join(said.split())
    assert answers  # not asked


def test_without_the_extra_its_name_is_told(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "from typer.testing import CliRunner\n"
        "from jaxtwin.cli.main import app\n"
        f"done = CliRunner().invoke(app, ['check', 'x', '--html', {str(tmp_path / 'a.html')!r}])\n"
        "print(done.exit_code, done.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("2 error: this verb needs matplotlib; install it with: ")
    assert "'jaxtwin[report]'" in done.stdout


def test_points_decide_only_where_no_divergence_is_known() -> None:
    point = Point("embed", None, "embed", "forward", "float64", 1.0, 1.0, 0.0, 1e-13)
    report = Report([Check("logits", "float64", 1.0, 1e-13)], points=[point])
    assert results.first_divergence(report) == "embed in float64: cause not known"
    report.points = [replace(point, probe=p, direction="backward") for p in ("embed", "head")]
    assert results.first_divergence(report) == "head (going back) in float64: cause not known"
    report.points = [replace(point, local_error=0.0)]
    assert results.first_divergence(report) is None


@pytest.mark.parametrize("part", [Report, Check, Difference, Point, Divergence, Cause])
def test_every_field_is_documented(part: type) -> None:
    text = (ROOT / "docs" / "json.md").read_text()
    for field in fields(part):
        assert f'"{field.name}"' in text or f"`{field.name}`" in text, field.name
