"""Destinations that cannot or must not be written: one BadInput, and before any work."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxtwin.configs import BadInput, atomic_write
from jaxtwin.jaxmodel import checkpoint
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.tests.helpers.folders import entries, pt_file, spec_of, torch_state
from jaxtwin.tests.helpers.levels import slow


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return pt_file(tmp_path / "a.pt", spec_of(), torch_state(spec_of(), "float32"))


@pytest.mark.parametrize(("to", "dst"), [("jax", "out"), ("hf", "out"), ("torch", "out.pt")])
def test_what_appears_meanwhile_is_left_alone(
    tmp_path: Path, ours: Path, monkeypatch: pytest.MonkeyPatch, to: str, dst: str
) -> None:
    """The loser of two writers, whichever is faster."""
    name, first = atomic_write._name, {}

    def late(hidden: Path, place: Path, message: Any) -> None:
        if hidden.is_dir():
            place.mkdir()
            (place / "theirs").write_text("theirs")
        else:
            place.write_text("theirs")
        first[place] = True
        name(hidden, place, message)

    monkeypatch.setattr(atomic_write, "_name", late)
    with pytest.raises(BadInput, match=r"out.* appeared meanwhile and is left as it is"):
        convert(ours, tmp_path / dst, to)
    (place,) = first
    kept = place / "theirs" if place.is_dir() else place
    assert kept.read_text() == "theirs"
    assert entries(tmp_path) == {"a.pt", dst}


@pytest.mark.parametrize("links", [True, False])
def test_a_file_takes_its_name_with_and_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with atomic_write.appearing(tmp_path / "a") as hidden:
        hidden.write_text("x")
    assert (tmp_path / "a").read_text() == "x"

    def lose() -> None:
        with atomic_write.appearing(tmp_path / "b") as hidden:
            hidden.write_text("x")
            (tmp_path / "b").write_text("theirs")

    with pytest.raises(BadInput, match="appeared meanwhile"):
        lose()
    assert (tmp_path / "b").read_text() == "theirs"
    assert entries(tmp_path) == {"a", "b"}


@pytest.mark.parametrize(("to", "dst"), [("jax", "out"), ("hf", "out"), ("torch", "out.pt")])
def test_all_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, ours: Path, monkeypatch: pytest.MonkeyPatch, to: str, dst: str
) -> None:
    settled, sync = set(), os.fsync

    def note(file: int) -> None:
        if not (tmp_path / dst).exists():
            settled.add(os.fstat(file).st_ino)
        sync(file)

    monkeypatch.setattr(os, "fsync", note)
    convert(ours, tmp_path / dst, to)
    due = [tmp_path / dst, *(tmp_path / dst).rglob("*")]
    assert {path.name for path in due if path.stat().st_ino not in settled} == set()


@pytest.mark.parametrize(("to", "end"), [("jax", ""), ("hf", ""), ("torch", ".pt")])
def test_a_long_name_is_written_and_one_too_long_refused(
    tmp_path: Path, ours: Path, to: str, end: str
) -> None:
    dst = tmp_path / ("n" * (250 - len(end)) + end)
    convert(ours, dst, to)
    assert open_source(dst).spec.d == 24
    for dry_run in (True, False):
        long = tmp_path / "new" / ("n" * 256 + end)
        with pytest.raises(BadInput, match="a name on that disk has at most 255 bytes"):
            convert(ours, long, to, dry_run=dry_run)
    assert entries(tmp_path) == {"a.pt", dst.name}


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("dst", "message"),
    [
        ("a.pt/out", "cannot be written: .*a.pt is not a folder"),
        ("a.pt/deep/out", "cannot be written: .*a.pt is not a folder"),
        ("new/..", "exists and is not empty; name another"),
        ("new/../a.pt", "a.pt exists; name another"),
        ("o\0ut", "cannot be written: .*null"),
    ],
)
def test_a_destination_that_cannot_be_is_refused_before_any_work(
    tmp_path: Path, ours: Path, dst: str, message: str, dry_run: bool
) -> None:
    for to in ("jax", "hf"):
        with pytest.raises(BadInput, match=message):
            convert("no such source", tmp_path / dst, to, dry_run=dry_run)
    assert entries(tmp_path) == {"a.pt"}


def test_a_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(BadInput, match=f"no permission to write in {tmp_path}"):
        atomic_write.refuse_taken(tmp_path / "new" / "out")


def test_a_checkpoint_refuses_the_same_destinations(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = spec_of()
    for write in (
        lambda dst: checkpoint.begin(dst, spec, "scan"),
        lambda dst: checkpoint.refuse_taken(dst),
    ):
        with pytest.raises(BadInput, match="file is not a folder"):
            write(tmp_path / "file" / "out")
        with pytest.raises(BadInput, match="exists and is not empty"):
            write(tmp_path / "new" / "..")
    assert entries(tmp_path) == {"file"}


def test_folders_made_on_the_way_go_when_the_write_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_write.appearing(tmp_path / "new" / "deep" / "out") as hidden:
            hidden.mkdir()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert entries(tmp_path) == set()
    with atomic_write.appearing(tmp_path / "new" / ".." / "other" / "out") as hidden:
        hidden.mkdir()
    assert entries(tmp_path) == {"other"}


FULL = """
import resource, sys
from jaxtwin.jaxmodel import checkpoint
from jaxtwin.parity.checkpoints.convert import convert

src, dst, to = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    convert(src, dst, to)
except ValueError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("to", "dst"),
    [
        ("jax", "out"),
        slow("hf", "out"),
        slow("torch", "out.pt"),
    ],
)
def test_a_full_disk_is_said_and_nothing_is_left(
    tmp_path: Path, ours: Path, to: str, dst: str
) -> None:
    """Every library has an error of its own for it. Here no file may have over 1,000 bytes."""
    command = [sys.executable, "-c", FULL, str(ours), str(tmp_path / dst), to]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.stdout.startswith(f"BadInput {tmp_path / dst} cannot be written: "), done.stderr
    assert entries(tmp_path) == {"a.pt"}


def test_what_the_system_says_of_the_hidden_name_is_said_of_the_real_one(tmp_path: Path) -> None:
    """As where a folder takes no entries (/proc)."""
    (tmp_path / "deep").mkdir()

    def lose() -> None:
        with atomic_write.appearing(tmp_path / "deep" / "out") as hidden:
            (tmp_path / "deep").rmdir()
            hidden.mkdir()

    with pytest.raises(BadInput, match=r"deep/out cannot be written: No such file or directory$"):
        lose()
