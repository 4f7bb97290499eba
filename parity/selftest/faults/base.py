"""Mistakes that people make in this job, to be made on purpose: the check is itself checked.

Each fault touches the JAX side alone, in one of three places: the spec it is built from, the
weights on their way in, or the finished model. A check that lets one pass is no check, and a
diagnosis that calls it by another name is no help: `cause` is what it has to be called.
"""

from __future__ import annotations

from typing import Any

from jaxtwin.parity.sides.runs import InjectedFault


class NoPlace(LookupError):
    """The model has no part for this fault."""


FAULTS: dict[str, InjectedFault] = {}


def add(name: str, about: str, cause: str = "", *, layered: bool = True, **changes: Any) -> None:
    """One more fault; its cause has the same name unless another is given."""
    if name in FAULTS:
        raise ValueError(f"two faults are called {name!r}")
    FAULTS[name] = InjectedFault(about=about, cause=cause or name, layered=layered, **changes)
