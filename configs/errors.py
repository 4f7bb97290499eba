"""The one error for input that a person can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BadInput(ValueError):
    """What was wrong, where, and what to do. The front door prints it and exits with status 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: the closest known one, or all of them when they are few."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(known) if len(known) <= 24 else f"{len(known)} names are known"
