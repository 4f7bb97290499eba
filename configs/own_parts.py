"""Kinds of part that a person adds: an activation or a norm, as a function for each mirror.

A spec names them (`Mlp(act="squared_relu", ...)`, `OwnNorm(name="unit", ...)`), and both mirrors
take the function from here when they are built. They are registered in a file of one's own, which
--names, --spec or FILE.py:NAME runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtwin.configs.errors import BadInput, nearest

BUILT_IN = ("gelu", "gelu_tanh", "relu", "silu")  # the activations that both mirrors have


@dataclass(frozen=True)
class Both:
    """One function twice: of an activation f(x), of a norm f(x, weight, eps)."""

    torch: Callable[..., Any]
    jax: Callable[..., Any]


ACTIVATIONS: dict[str, Both] = {}
NORMS: dict[str, Both] = {}


def register_activation(
    name: str, *, torch: Callable[[Any], Any], jax: Callable[[Any], Any]
) -> None:
    """Makes an activation known to specs by that name. BadInput where the name is taken."""
    if name in BUILT_IN:
        raise BadInput(f"an activation {name!r} is built in; give yours another name")
    ACTIVATIONS[name] = Both(_function(torch, name), _function(jax, name))


def register_norm(name: str, *, torch: Callable[..., Any], jax: Callable[..., Any]) -> None:
    """Makes a norm known to `OwnNorm(name=...)`: f(x, weight, eps), over x's last axis.

    `weight` has one number for each entry of that axis, 1 at first; a bias is the spec's and is
    added afterwards. What it returns has the dtype of x, which may be a narrow one.
    """
    NORMS[name] = Both(_function(torch, name), _function(jax, name))


def known_activation(name: str) -> str:
    """The name, or a ValueError that says which there are."""
    if name not in BUILT_IN and name not in ACTIVATIONS:
        raise ValueError(_unknown("activation", name, [*BUILT_IN, *ACTIVATIONS]))
    return name


def known_norm(name: str) -> str:
    if name not in NORMS:
        raise ValueError(_unknown("norm", name, NORMS))
    return name


def _unknown(kind: str, name: str, known: Any) -> str:
    listed = nearest(name, known) if known else "none is registered"
    return (
        f"no {kind} is called {name!r}; {listed}; one of your own must be registered first "
        f"(jaxtwin.register_{kind}), in a file that --names or --spec runs"
    )


def _function(function: Any, name: str) -> Callable[..., Any]:
    if not callable(function):
        raise BadInput(f"{name}: torch and jax must be functions, got {function!r:.60}")
    known: Callable[..., Any] = function
    return known
