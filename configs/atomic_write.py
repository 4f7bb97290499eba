"""Results are written completely or not at all, and never over what exists."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxtwin.configs.errors import BadInput

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}  # what only writing can meet


class Unwritable(Exception):
    """For `appearing`: a library has failed to write, with an error of its own kind."""


def refuse_taken(dst: str | os.PathLike[str]) -> Path:
    """The place that `dst` names, absolute and without links and dots in the way to it.

    BadInput where something exists (an empty folder may), and where nothing could be written: below
    what is not a folder, without permission, under a name that is too long.
    """
    if "\0" in os.fspath(dst):  # some of the calls below take that for a missing file
        raise BadInput(f"{os.fspath(dst)!r} cannot be written: a name has no null character")
    try:
        place = _resolved(Path(dst))
        if place.is_dir() and not any(place.iterdir()):
            return place
        if os.path.lexists(place):
            state = "exists and is not empty" if place.is_dir() else "exists"
            raise BadInput(f"{dst} {state}; name another or remove it first")
        missing = [place, *_missing(place)]
        base = missing[-1].parent
        if not base.is_dir():
            raise BadInput(f"{dst} cannot be written: {base} is not a folder")
        if not os.access(base, os.W_OK | os.X_OK):
            raise BadInput(f"{dst} cannot be written: no permission to write in {base}")
        most = os.pathconf(base, "PC_NAME_MAX")
    except BadInput:
        raise
    except (OSError, RuntimeError) as error:  # such as a loop of links
        raise BadInput(f"{dst} cannot be written: {error}") from None
    if any(len(os.fsencode(part.name)) > most for part in missing):
        raise BadInput(f"{dst} cannot be written: a name on that disk has at most {most} bytes")
    return place


@contextlib.contextmanager
def appearing(dst: str | os.PathLike[str]) -> Iterator[Path]:
    """A hidden sibling path to write to (not made yet), renamed to `dst` once all went well.

    BadInput as `refuse_taken`, when something has appeared at `dst` meanwhile (it is left so),
    and when writing fails, on a full disk for one.
    """
    place = refuse_taken(dst)
    new = _missing(place)
    hidden = place.with_name(f".{uuid.uuid4().hex[:12]}.part")  # short: any legal name has room
    try:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{dst} cannot be written: {error}") from None
        yield hidden
        fsync_tree(hidden)  # else the name could survive a power loss, and the bytes not
        _name(hidden, place, dst)
    except BaseException as error:
        absent = 0
        for _ in range(20):  # a library's thread may still be writing into it, or make it again
            absent = 0 if hidden.is_dir() else absent + 1
            if absent == 4:
                break
            shutil.rmtree(hidden, ignore_errors=True)
            time.sleep(0.05)
        with contextlib.suppress(OSError):
            hidden.unlink(missing_ok=True)
        for parent in new:
            with contextlib.suppress(OSError):  # it holds other files by now
                parent.rmdir()
        full = isinstance(error, OSError) and (
            error.errno in FULL or str(error.filename or "").startswith(str(hidden))
        )
        if isinstance(error, Unwritable) or full:
            why = getattr(error, "strerror", None) or str(error)[:200] or type(error).__name__
            raise BadInput(f"{dst} cannot be written: {why}") from error
        raise


def fsync_tree(path: Path) -> None:
    """Waits until a file, or a folder and all in it, is on the disk."""

    def wait(path: Path) -> None:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    with ThreadPoolExecutor(16) as pool:  # at once, which is faster
        list(pool.map(wait, (path, *path.rglob("*"))))


def start_writeback(file: int, at: int = 0, length: int = 0) -> None:
    """Has the disk begin on that part of an open file (all by default), without waiting for it.

    `fsync_tree` then has little left to wait for. Linux takes POSIX_FADV_DONTNEED so; a system
    without it just writes later.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(file, at, length, os.POSIX_FADV_DONTNEED)


def file_place(dst: str | os.PathLike[str]) -> Path:
    """The file that `dst` names, which may exist, absolute and without links.

    BadInput where a file could not be written: no such folder, a folder, no permission.
    """
    try:
        place = Path(dst).resolve()
        folder = place.parent
        if place.is_dir():
            raise BadInput(f"{dst} cannot be written: it is a folder; name a file")
        if not folder.is_dir():
            raise BadInput(f"{dst} cannot be written: there is no folder {folder}; make it first")
        special = os.path.lexists(place) and not place.is_file()
        if not os.access(place if special else folder, os.W_OK):
            raise BadInput(f"{dst} cannot be written: no permission to write in {folder}")
        if len(os.fsencode(place.name)) > os.pathconf(folder, "PC_NAME_MAX"):
            raise BadInput(f"{dst} cannot be written: its name is too long")
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null character
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{os.fspath(dst)!r} cannot be written: {error}") from None
    return place


def write_file(dst: str | os.PathLike[str], text: str) -> None:
    """The text in place of what `dst` held, as UTF-8: all of it or none. BadInput as file_place."""
    place = file_place(dst)
    if os.path.lexists(place) and not place.is_file():  # a pipe or a device is written to
        place.write_text(text, "utf-8")
        return
    hidden = place.with_name(f".{uuid.uuid4().hex[:12]}.part")
    try:
        hidden.write_text(text, "utf-8")
        os.replace(hidden, place)
    except OSError as error:
        raise BadInput(f"{dst} cannot be written: {error}") from None
    finally:
        hidden.unlink(missing_ok=True)


def _resolved(path: Path) -> Path:
    """Its folder resolved, not its name: a dangling link counts as existing."""
    if path.name in ("", "..") or path.is_dir():
        return path.resolve()
    return path.parent.resolve() / path.name


def _missing(place: Path) -> list[Path]:
    """The missing folders above it, the nearest first."""
    return [parent for parent in place.parents if not os.path.lexists(parent)]


def _name(hidden: Path, place: Path, dst: str | os.PathLike[str]) -> None:
    """Gives what is written its name, unless that has been taken meanwhile."""
    try:
        if hidden.is_dir():
            os.rename(hidden, place)  # takes the place of an empty folder and of nothing else
            return
        if place.is_dir():
            place.rmdir()
        try:
            os.link(hidden, place)  # fails where a rename would overwrite
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            place.open("xb").close()
            os.replace(hidden, place)
        else:
            hidden.unlink()
    except OSError as error:
        if os.path.lexists(place):
            raise BadInput(f"{dst} appeared meanwhile and is left as it is") from None
        raise BadInput(f"{dst} cannot be written: {error}") from None


def refuse_names(names: Iterable[str]) -> None:
    """BadInput on what is no plain file name, nor one in a folder: "folder/file"."""
    for name in names:
        parts = name.split("/") if isinstance(name, str) else []
        plain = all(Path(p).name == p and p not in ("", ".", "..") for p in parts)
        if not plain or len(parts) not in (1, 2):
            raise BadInput(
                f"{name!r} cannot be carried along: it must be a plain file name, or in a folder"
            )
