"""What the documents point at is there, and a newcomer's two walks are short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxtwin.tests.helpers import ROOT

DOCS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/design.md", "docs/glossary.md",
        "docs/your-own-model.md", "docs/own-names.md", "docs/json.md"]  # fmt: skip
FOLDERS = "configs|torchref|jaxmodel|parity|train|cli|tests|docs|benchmarks"
DESIGN = (ROOT / "docs" / "design.md").read_text("utf-8")
WALKS = ("One weight, from file to shard", "One failing check, to its cause")


@pytest.mark.parametrize("name", DOCS)
def test_every_path_named_exists(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    paths = re.findall(rf"`((?:{FOLDERS})/[\w/.-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", DOCS)
def test_every_link_leads_to_a_file(name: str) -> None:
    page = ROOT / name
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8"))
    files = [link for link in links if not link.startswith("http")]
    assert [link for link in files if not (page.parent / link).exists()] == []


def walk(title: str) -> list[tuple[str, list[str]]]:
    """The numbered items under a heading: each file, and the names that are said to be in it."""
    section = DESIGN.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    items = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    quoted = (re.findall(r"`([^`]+)`", item) for item in items)
    return [(path, names) for path, *names in quoted]


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_opens_at_most_twelve_files_and_none_twice(title: str) -> None:
    files = [path for path, _ in walk(title)]
    assert 8 <= len(files) <= 12
    assert len(set(files)) == len(files)


STOPS = [(path, name) for title in WALKS for path, names in walk(title) for name in names]


@pytest.mark.parametrize(("path", "name"), STOPS, ids="-".join)
def test_what_a_walk_points_at_stands_in_that_file(path: str, name: str) -> None:
    text = Path(ROOT / path).read_text()
    word = re.split(r"[(.]", name)[0]
    assert re.search(rf"\b{re.escape(word)}\b", text), f"{name} is not in {path}"
