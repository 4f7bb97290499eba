"""Mistakes that people make in a decoder's forward pass, as things the reference can be made to do.

The JAX side may be any function: nobody can reach into it and mend it. But the reference can be
made to commit the same mistake, and where it then agrees, the mistake is the cause. Each one here
is written in torch, apart from the faults that `faults/` makes in JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from jaxtwin.parity.sides.hypothesis import Hypothesis

Forward = Callable[..., Any]  # what a module did before it was edited
ANY = "*"  # any part whose module the mistake can be made in


HYPOTHESES: list[Hypothesis] = []


def add(name: str, about: str, advice: str, parts: Any, module: str, edit: Any, **how: Any) -> None:
    """One more mistake of the catalogue; fixed ones are tried before those with a value to fit."""
    parts = (parts,) if isinstance(parts, str) else tuple(parts)
    HYPOTHESES.append(Hypothesis(name, about, advice, parts, module, edit, **how))


def calling(call: Callable[..., Any]) -> Callable[[nn.Module, Any], None]:
    """The module answers with call(its forward, itself, the value, *its arguments)."""

    def edit(module: nn.Module, value: Any) -> None:
        inner = module.forward
        module.__dict__["forward"] = lambda *args, **kwargs: call(
            inner, module, value, *args, **kwargs
        )

    return edit


def setting(**values: Callable[[Any, Any], Any]) -> Callable[[nn.Module, Any], None]:
    """Attributes of the module, from (module, value)."""

    def edit(module: nn.Module, value: Any) -> None:
        module.__dict__.update({name: make(module, value) for name, make in values.items()})

    return edit


def changing(change: Callable[[Any, Any, Tensor], Tensor]) -> Callable[[nn.Module, Any], None]:
    """The module's output becomes change(itself, the value, its output); any aux stays."""

    def call(f: Forward, module: nn.Module, value: Any, *args: Any) -> Any:
        out = f(*args)
        if isinstance(out, tuple):
            return (change(module, value, out[0]), *out[1:])
        return change(module, value, out)

    return calling(call)


def only_in(*classes: type) -> Callable[[nn.Module], Sequence[Any]]:
    """The mistake is possible in modules of these classes alone."""
    return lambda module: (None,) if isinstance(module, classes) else ()
