"""What two forwards return, tuples and dicts too: which output of one is which of the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtwin.configs import BadInput

MAIN = "output"  # the name of the first pair; the others are "output.NAME"
LOGITS = "logits"  # where one side returns several, the one that is taken first


@dataclass(frozen=True)
class Output:
    """One floating array of what a forward returns, by the keys that lead to it."""

    path: tuple[Any, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))


@dataclass(frozen=True)
class Pair:
    """An output of both sides, under one name."""

    name: str
    torch: tuple[Any, ...]
    jax: tuple[Any, ...]
    shape: tuple[int, ...]


def listed(returned: Any, is_array: Callable[[Any], bool]) -> list[Output]:
    """Every array in what was returned that is one, in order."""
    return [Output(path, tuple(x.shape)) for path, x in _walk(returned, ()) if is_array(x)]


def _walk(x: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(x, Mapping):
        inner: Any = x.items()
    elif isinstance(x, list | tuple):
        names = getattr(x, "_fields", range(len(x)))  # of a named tuple
        inner = zip(names, x, strict=True)
    elif dataclasses.is_dataclass(x) and not hasattr(x, "shape"):
        inner = ((field.name, getattr(x, field.name)) for field in dataclasses.fields(x))
    else:
        if hasattr(x, "shape"):
            yield path, x
        return
    for key, value in inner:
        yield from _walk(value, (*path, key))


def at(returned: Any, path: Sequence[Any]) -> Any:
    """The array that these keys lead to."""
    for key in path:
        by_index = isinstance(returned, Mapping) or isinstance(key, int)
        returned = returned[key] if by_index else getattr(returned, key)
    return returned


def paired(torch: Sequence[Output], jax: Sequence[Output]) -> tuple[list[Pair], list[str]]:
    """Which outputs are compared, the main one first; and notes on those that are not.

    Those of one name belong together; without a common name, those in the same place and of the
    same shape. BadInput where nothing does.
    """
    if not torch or not jax:
        side = "JAX" if torch else "torch"
        raise BadInput(f"the {side} side returns no array of floats: there is nothing to compare")
    common = [one.key for one in torch if one.key and one.key in {other.key for other in jax}]
    if common:
        by_key = {other.key: other for other in jax}
        both = [(one, by_key[one.key]) for one in torch if one.key in common]
    elif len(torch) == len(jax):
        both = list(zip(torch, jax, strict=True))
    else:
        both = _by_shape(torch, jax)
    both.sort(key=lambda pair: LOGITS not in (pair[0].key, pair[1].key))  # is stable
    pairs = []
    for i, (one, other) in enumerate(both):
        name = MAIN if i == 0 else f"{MAIN}.{one.key or other.key}"
        if one.shape != other.shape:
            raise BadInput(
                f"what is returned differs in shape: {one.key or 'the output'} is {one.shape} in "
                f"torch, {other.key or 'the output'} {other.shape} in JAX"
            )
        pairs.append(Pair(name, one.path, other.path, one.shape))
    taken = {id(output) for pair in both for output in pair}
    notes = [
        f"the {side} side also returns {output.key or 'an output'} {output.shape}, which has no "
        "partner on the other side and was not compared"
        for side, outputs in (("torch", torch), ("JAX", jax))
        for output in outputs
        if id(output) not in taken
    ]
    return pairs, notes


def _by_shape(torch: Sequence[Output], jax: Sequence[Output]) -> list[tuple[Output, Output]]:
    """The logits first, each with the first of its shape that is left; if none is, the firsts."""
    rest = sorted(jax, key=lambda output: output.key != LOGITS)
    both = []
    for one in sorted(torch, key=lambda output: output.key != LOGITS):
        other = next((output for output in rest if output.shape == one.shape), None)
        if other is not None:
            rest.remove(other)
            both.append((one, other))
    return both or [(torch[0], jax[0])]
