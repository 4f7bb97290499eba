"""A mistake that the reference can be made to commit: what a diagnosis supposes of the JAX side.

The JAX side may be any function: nobody can reach into it and mend it. But the reference can be
made to commit the same mistake, and where it then agrees, the mistake is the cause. The catalogue
is in `diagnose/hypotheses`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Hypothesis:
    """One mistake in one kind of module.

    `parts` are the probes that show it when every part is fed the reference's input, and `module`
    is what is edited, named within its layer ("{part}": the part itself). `values` are what it may
    depend on (a base, a scale): tried in turn or, with `fits`, searched between them.
    """

    name: str
    about: str
    advice: str
    parts: tuple[str, ...]
    module: str
    edit: Callable[[nn.Module, Any], None]
    values: Callable[[nn.Module], Sequence[Any]] = lambda module: (None,)
    fits: bool = False
    direction: str = "forward"
    rounds: str = ""  # a dtype: it only costs digits, and two frameworks lose different ones


Live = Mapping[str, Any]  # torch tensors of a run by place, on its graph: see probes.Hooks
ValueEdit = Callable[[Any, Live, str], Any]  # the value at a probe of that name, as it is computed


@dataclass(frozen=True)
class PlacedHypothesis:
    """A mistake at a place: modules by name, and its value.

    With `of_values` it is made at probes, whose names `modules` holds: each value becomes
    `of_values(the value, what else the run has computed, the probe's name)`.
    """

    hypothesis: Hypothesis
    modules: tuple[str, ...]
    value: Any = None
    of_values: ValueEdit | None = None

    def worded(self, text: str) -> str:
        value = f"{self.value:.6g}" if isinstance(self.value, float) else str(self.value)
        return text.replace("{}", value)


@contextlib.contextmanager
def committing(model: nn.Module, placed: Sequence[PlacedHypothesis]) -> Iterator[None]:
    """Within: the model makes these mistakes."""
    saved = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        for edit in placed:
            for name in edit.modules if edit.of_values is None else ():
                edit.hypothesis.edit(model.get_submodule(name), edit.value)
        yield
    finally:
        for module, state in saved:
            module.__dict__.clear()
            module.__dict__.update(state)
