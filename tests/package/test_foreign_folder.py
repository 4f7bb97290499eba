"""From a repository that has its own `configs`, `train.py`, `parity.py` and `tests`, all works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("jaxtwin"))
THEIRS = {
    "configs/__init__.py": "OWNER = 'them'\n",
    "train.py": "OWNER = 'them'\n",
    "parity.py": "OWNER = 'them'\n",
    "tests/__init__.py": "",
}
IMPORTS = """
import configs, parity, train
import jaxtwin

assert configs.OWNER == parity.OWNER == train.OWNER == "them"
"""
COMPARE = """
import numpy as np, torch

linear = torch.nn.Linear(3, 2, bias=False).double()
report = jaxtwin.compare(
    linear, lambda p, x: x @ p["w"], [jaxtwin.Row("w", "weight", "o i -> i o")],
    [np.ones((4, 3))], params={"w": linear.weight.detach().numpy().T}, jit=False,
)
assert report.equal
"""
CHECK = """
report = jaxtwin.check("gpt2-tiny", dtypes=("float64",), tokens=8)
assert report.equal
"""
FIXTURE = """

def test_equal(parity_check):
    assert parity_check(report) is report
"""
FIXTURE_ON_A_SOURCE = """

def test_equal(parity_check):
    assert parity_check("gpt2-tiny", dtypes=("float64",), tokens=8).equal
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    for name, text in THEIRS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(theirs: Path, *words: str) -> str:
    done = subprocess.run(words, cwd=theirs, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("text", [COMPARE, pytest.param(CHECK, marks=pytest.mark.slow)])
def test_the_functions(theirs: Path, text: str) -> None:
    (theirs / "compared.py").write_text(IMPORTS + text)
    run(theirs, sys.executable, "compared.py")  # their folder stands first on the path


@pytest.mark.parametrize("command", [[COMMAND], [sys.executable, "-m", "jaxtwin"]])
def test_the_command(theirs: Path, command: list[str]) -> None:
    assert '"vocab"' in run(theirs, *command, "inspect", "gpt2-tiny", "--json")


@pytest.mark.slow
def test_the_command_that_compares(theirs: Path) -> None:
    words = ["gpt2-tiny", "--dtype", "float64", "--tokens", "8"]
    assert "EQUAL" in run(theirs, COMMAND, "check", *words)


@pytest.mark.slow
@pytest.mark.parametrize("text", [COMPARE + FIXTURE, FIXTURE_ON_A_SOURCE])
def test_the_plugin(theirs: Path, text: str) -> None:
    (theirs / "tests" / "test_theirs.py").write_text(IMPORTS + text)
    assert "1 passed" in run(theirs, sys.executable, "-m", "pytest", "-q", "tests")
