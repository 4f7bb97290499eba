"""Mistakes that people make in a decoder's forward pass, as things the reference can be made to do.

The JAX side may be any function: nobody can reach into it and mend it. But the reference can be
made to commit the same mistake, and where it then agrees, the mistake is the cause. Each one here
is written in torch, apart from the faults that `faults/` makes in JAX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

Forward = Callable[..., Any]  # what a module did before it was edited
ANY = "*"  # any part whose module the mistake can be made in


@dataclass(frozen=True)
class Mistake:
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


@dataclass(frozen=True)
class Edit:
    """A mistake at a place: modules by name, and its value."""

    mistake: Mistake
    modules: tuple[str, ...]
    value: Any = None

    def say(self, text: str) -> str:
        value = f"{self.value:.6g}" if isinstance(self.value, float) else str(self.value)
        return text.replace("{}", value)


@contextlib.contextmanager
def edited(model: nn.Module, edits: Sequence[Edit]) -> Iterator[None]:
    """Within: the model makes these mistakes."""
    saved = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        for edit in edits:
            for name in edit.modules:
                edit.mistake.edit(model.get_submodule(name), edit.value)
        yield
    finally:
        for module, state in saved:
            module.__dict__.clear()
            module.__dict__.update(state)


MISTAKES: list[Mistake] = []


def add(name: str, about: str, advice: str, parts: Any, module: str, edit: Any, **how: Any) -> None:
    """One more mistake of the catalogue; fixed ones are tried before those with a value to fit."""
    parts = (parts,) if isinstance(parts, str) else tuple(parts)
    MISTAKES.append(Mistake(name, about, advice, parts, module, edit, **how))


def calling(call: Callable[..., Any]) -> Callable[[nn.Module, Any], None]:
    """The module answers with call(its forward, itself, the value, *its arguments)."""

    def edit(module: nn.Module, value: Any) -> None:
        inner = module.forward
        module.__dict__["forward"] = lambda *args: call(inner, module, value, *args)

    return edit


def setting(**values: Callable[[Any, Any], Any]) -> Callable[[nn.Module, Any], None]:
    """Attributes of the module, from (module, value)."""

    def edit(module: nn.Module, value: Any) -> None:
        module.__dict__.update({name: make(module, value) for name, make in values.items()})

    return edit


def kind(*names: str) -> Callable[[nn.Module], Sequence[Any]]:
    """The mistake is possible in modules of these classes alone."""
    return lambda module: (None,) if type(module).__name__ in names else ()
