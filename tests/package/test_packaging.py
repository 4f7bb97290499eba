"""What is installed is what is written here: requirements, files, and no torch needed."""

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

FOLDERS = ("cli", "configs", "jaxmodel", "torchref", "parity", "train")
TOP = ("__init__.py", "__main__.py", "api.py", "py.typed")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
CORE = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
REQUIREMENTS = CORE + [Requirement(line) for extra in EXTRAS.values() for line in extra]
OTHERS = [r for r in REQUIREMENTS if r.name != "jaxtwin"]


def pins(file: str) -> dict[str, str]:
    found = re.findall(r"^(\S+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


# The two sets of versions that are tested; which of them is installed, JAX's own version says.
SETS = {name: pins(name) for name in ("constraints.txt", "constraints-newest.txt")}
PINS = next(
    (p for p in SETS.values() if p["jax"] == importlib.metadata.version("jax")),
    SETS["constraints.txt"],
)
ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(absent + ".") for absent in {absent}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def tracked(*paths: str) -> list[str]:
    """The files that git knows there and that exist."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


# --- requirements


@pytest.mark.parametrize("requirement", OTHERS, ids=lambda r: r.name)
def test_the_tested_version_is_within_bounds(requirement: Requirement) -> None:
    """Bounded below and above, pinned in both sets, one of which is what is installed."""
    signs = {spec.operator for spec in requirement.specifier}
    assert signs == {">=", "<"}, "a lower and an upper bound"
    name = canonicalize_name(requirement.name)
    assert all(requirement.specifier.contains(pins[name]) for pins in SETS.values())
    installed = importlib.metadata.version(requirement.name)
    assert installed.split("+")[0] == PINS[name]


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
    kernels = {name for name in reached if re.match("nvidia-|cuda-|triton", name)}  # torch's
    assert reached - kernels == set(PINS)


# Modules whose distribution has another name.
DISTRIBUTION = {"absl": "absl-py", "orbax": "orbax-checkpoint"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_a_folder_imports_is_required(folder: str) -> None:
    """Only torch, transformers and what draws a page may come from an extra.

    (And pytest, which is there where its plugin is loaded.)
    """
    modules: set[str] = set()
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.split(".")[0])
    modules -= set(sys.stdlib_module_names) | {"jaxtwin"}
    extras = {"torch", "transformers", "jinja2", "matplotlib", "pytest"}
    known = {canonicalize_name(r.name) for r in CORE} | extras
    assert {canonicalize_name(DISTRIBUTION.get(m, m)) for m in modules} <= known


# --- files


def packages() -> set[str]:
    """Every folder of code that is to be installed."""
    folders = {(ROOT / name).parent for name in tracked(*FOLDERS) if name.endswith(".py")}
    return {".".join(("jaxtwin", *folder.relative_to(ROOT).parts)) for folder in folders}


def test_every_folder_of_code_is_a_package_that_is_installed() -> None:
    assert {"jaxtwin"} | packages() == set(PROJECT["tool"]["setuptools"]["packages"])
    for name in packages():
        assert (ROOT.joinpath(*name.split(".")[1:]) / "__init__.py").exists(), name


def test_every_other_file_is_declared_as_data() -> None:
    declared = set()
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        declared |= {str(f.relative_to(ROOT)) for p in patterns for f in folder.glob(p)}
    assert {n for n in tracked(*FOLDERS, *TOP) if not n.endswith(".py")} == declared


@pytest.mark.slow
def test_a_wheel_holds_every_file_in_one_package(tmp_path: Path) -> None:
    wanted = tracked(*FOLDERS, *TOP)
    source = tmp_path / "source"  # a copy: building leaves files behind, and takes old ones up
    more = tracked("tests/conftest.py", "benchmarks")  # which do not go in
    for name in [*wanted, *more, "pyproject.toml", "README.md", "LICENSE"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, source]
    subprocess.run(command, check=True, timeout=280)
    (wheel,) = tmp_path.glob("jaxtwin-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata
    (info,) = {name.split("/")[0] for name in names} - {"jaxtwin"}
    assert re.fullmatch(r"jaxtwin-[\d.]+\.dist-info", info)
    assert f"{info}/licenses/LICENSE" in names
    assert {n for n in names if n.startswith("jaxtwin/")} == {f"jaxtwin/{n}" for n in wanted}


# --- what imports without what


def modules(*folders: str) -> list[str]:
    files = [path.relative_to(ROOT) for f in folders for path in (ROOT / f).rglob("*.py")]
    named = (".".join(("jaxtwin", *file.with_suffix("").parts)) for file in files)
    return sorted(name.removesuffix(".__init__") for name in named)


def imported_without(absent: set[str], names: list[str]) -> None:
    code = ABSENT.format(absent=absent) + "\n".join(f"import {name}" for name in names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Modules about torch's own forward: hypotheses to try in it.
ABOUT_TORCH = ("jaxtwin.parity.diagnose", "jaxtwin.parity.any_model.diagnose")


def test_every_module_imports_without_torch() -> None:
    """But for the diagnosis, with torch, transformers and torchref not to be found."""
    names = ["jaxtwin", "jaxtwin.api", *modules("configs", "jaxmodel", "train", "parity", "cli")]
    names = [name for name in names if not name.startswith(ABOUT_TORCH)]
    assert len(names) > 100
    imported_without({"torch", "transformers", "jaxtwin.torchref"}, names)


def test_torchref_imports_without_jax() -> None:
    absent = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "transformers"}
    imported_without(absent | {"jaxtwin.jaxmodel"}, modules("configs", "torchref"))


@pytest.mark.parametrize("absent", ["torch", "jaxtwin.torchref"])
def test_an_absent_module_is_seen(absent: str) -> None:
    with pytest.raises(AssertionError, match=f"No module named '{absent}'"):
        imported_without({absent}, ["jaxtwin.torchref.model"])
