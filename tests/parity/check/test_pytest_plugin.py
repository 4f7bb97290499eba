"""The pytest plugin, as a user's project has it: found by its entry point, light, and plain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jaxtwin
from jaxtwin.parity.report.results import Report
from jaxtwin.tests.helpers import reports

pytest_plugins = ["pytester"]
HEAD = "from jaxtwin.tests.helpers import reports\n"


def test_loading_it_imports_no_framework() -> None:
    code = (
        "import sys, jaxtwin.parity.check.pytest_plugin\n"
        "heavy = {'torch', 'jax', 'transformers', 'flax', 'numpy', 'rich', 'matplotlib'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_run_of_pytest_has_the_fixture_and_no_framework(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\n"
        "def test_light(parity_check):\n"
        "    assert not {'torch', 'jax', 'transformers'} & sys.modules.keys()\n"
        "    import jaxtwin\n"
        "    assert parity_check is jaxtwin.assert_parity\n"
    )
    pytester.runpytest_subprocess("-p", "no:jaxtyping").assert_outcomes(passed=1)


def test_a_report_that_is_not_equal_fails_the_test_with_its_cause(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        HEAD + "def test_same(parity_check):\n    parity_check(reports.equal())\n"
        "def test_other(parity_check):\n    parity_check(reports.failing())\n"
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *Error: NOT EQUAL: first divergence at layers.3.attn.q: 'rope-base' (proven)*",
            "E *the JAX side turns the queries with the base 10000; to mend it, use the base*",
        ]
    )
    assert "api.py" not in result.stdout.str()  # the caller's line is shown, not ours


def test_a_source_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def check(src: str, **how: object) -> Report:
        asked.append((src, how["tokens"]))
        return reports.equal() if how["tokens"] == 300 else reports.failing()

    monkeypatch.setattr("jaxtwin.parity.check.source_check.check", check)
    assert jaxtwin.assert_parity(Path("my/model")).equal
    with pytest.raises(AssertionError, match="rope-base"):
        jaxtwin.assert_parity("smollm2-135m", tokens=64)
    assert asked == [("my/model", 300), ("smollm2-135m", 64)]


def test_a_finished_report_takes_no_options() -> None:
    report = reports.equal()
    assert jaxtwin.assert_parity(report) is report
    with pytest.raises(TypeError, match="tokens"):
        jaxtwin.assert_parity(report, tokens=8)


def test_nothing_compared_is_no_parity() -> None:
    with pytest.raises(AssertionError, match="NOTHING WAS COMPARED"):
        jaxtwin.assert_parity(Report())
