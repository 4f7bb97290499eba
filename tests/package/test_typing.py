"""Editors and type checkers understand the package: hints resolve, a user's script is strict."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import jaxtwin
from jaxtwin.tests.helpers import ROOT

FUNCTIONS = [n for n in jaxtwin.__all__ if inspect.isfunction(getattr(jaxtwin, n))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hints_resolve_and_no_keyword_hides(name: str) -> None:
    function = getattr(jaxtwin, name)
    parameters = inspect.signature(function).parameters
    assert typing.get_type_hints(function).keys() == {*parameters, "return"}
    kinds = {parameter.kind for parameter in parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds or name == "assert_parity"


def test_hints_import_no_framework() -> None:
    code = (
        "import sys, typing, jaxtwin; typing.get_type_hints(jaxtwin.load)\n"
        "print([m for m in ('jax', 'torch', 'flax') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


SCRIPT = """
import jaxtwin
from jaxtwin import specs


def main() -> None:
    model = jaxtwin.load("gpt2-tiny", dtype="float32")
    print(model.spec.vocab, jaxtwin.__version__)
    report = jaxtwin.check("gpt2-tiny", dtypes=["float64"], tokens=8, names=None)
    assert report.equal
    norm: specs.LN = specs.LN(eps=1e-5)
    mine = jaxtwin.adopt({}, "gpt2-tiny", {"wte": "embed.weight", "mask": None})
    jaxtwin.save(mine, "out", "hf")
    print(norm, jaxtwin.release(mine, "names.toml").keys())
"""
WRONG = """
import jaxtwin

jaxtwin.check("gpt2-tiny", token=8)
jaxtwin.load(3)
"""


@pytest.mark.slow
def test_a_users_script_is_strictly_typed_and_a_mistake_is_seen(tmp_path: Path) -> None:
    """As mypy --strict finds the package outside it: one folder called jaxtwin."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "jaxtwin").symlink_to(ROOT)
    for name, text in {"script.py": SCRIPT, "wrong.py": WRONG}.items():
        (tmp_path / name).write_text(text)
    how = ["--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    env = {**os.environ, "MYPYPATH": str(tmp_path / "packages")}
    run = [sys.executable, "-m", "mypy", *how, "script.py", "wrong.py"]
    out = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "script.py" not in out.stdout
    assert 'Unexpected keyword argument "token" for "check"' in out.stdout
    assert 'Argument 1 to "load" has incompatible type "int"' in out.stdout


def test_the_shell_completes() -> None:
    env = {**os.environ, "_JAXTWIN_COMPLETE": "complete_bash", "COMP_WORDS": "jaxtwin ch",
           "COMP_CWORD": "1"}  # fmt: skip
    run = [sys.executable, "-m", "jaxtwin"]
    out = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    assert out.stdout.split() == ["check"]


def test_no_color_where_none_is_wanted() -> None:
    env = {**os.environ, "NO_COLOR": "1", "FORCE_COLOR": ""}
    run = [sys.executable, "-m", "jaxtwin", "inspect", "gpt2-tiny"]
    out = subprocess.run(run, env=env, capture_output=True, text=True, check=True)
    assert "\x1b[" not in out.stdout
