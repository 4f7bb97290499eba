"""Differences of spec and weights, as causes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput, Model, dataflow
from jaxtwin.configs.spec import from_json, to_json
from jaxtwin.parity.compare import preflight
from jaxtwin.parity.compare.preflight import Explanation
from jaxtwin.parity.report.results import Cause, Difference, Divergence
from jaxtwin.parity.sides import probes
from jaxtwin.parity.sides.runs import Reference, Subject
from jaxtwin.parity.table.tensors import Tensor, Tensors


@dataclass(frozen=True)
class IsolatedCause:
    """One cause, and the reference with this one thing as the JAX side has it."""

    divergence: Divergence
    reference: Reference


def causes(
    reference: Reference, subject: Subject
) -> tuple[Reference | None, list[Difference], list[IsolatedCause]]:
    """The reference given what the subject has, what differs, and each cause by itself.

    The first is None where torchref cannot be built so: the shapes do not fit.
    """
    want = {name: t.read().astype(np.float64) for name, t in reference.tensors.items()}
    fields = preflight.spec(reference.spec, subject.spec)
    stored = {name: t.dtype for name, t in reference.tensors.items()}
    tensors = preflight.weights(reference.spec, want, subject.weights, stored)
    differences = fields + [difference for difference, _ in tensors]
    if not differences:
        return reference, [], []
    theirs = {name: Tensor.of(x) for name, x in subject.weights.items()}
    both = _made(reference, subject.spec, theirs)
    if both is None:
        return None, differences, []
    causes = [*_of_spec(reference, subject, fields), *_of_weights(reference, theirs, tensors)]
    return both, differences, causes


def _made(reference: Reference, spec: Model, tensors: Tensors) -> Reference | None:
    changed = replace(reference, spec=spec, tensors=tensors)
    try:
        changed.model  # noqa: B018  (built, to see whether it can be)
    except (RuntimeError, BadInput):
        return None
    return changed


def _of_spec(
    reference: Reference, subject: Subject, fields: Sequence[Difference]
) -> Iterator[IsolatedCause]:
    """One cause for each kind of field and part, in all the layers where it differs."""
    groups: dict[tuple[Explanation, str], list[str]] = {}
    for difference in fields:
        name = difference.place
        groups.setdefault((preflight.field_explanation(difference), field_part(name)), []).append(
            name
        )
    found = []
    for (explanation, part), names in groups.items():
        layers = tuple(sorted({i for n in names for i in layers_of(n, reference.spec)}))
        mixed = _mixed(reference.spec, subject.spec, names)
        isolated = _made(reference, mixed, reference.tensors)
        if isolated is not None:
            found.append(IsolatedCause(_divergence(explanation, part, layers), isolated))
    yield from sorted(found, key=lambda cause: _place(cause.divergence))


def _place(divergence: Divergence) -> tuple[float, int]:
    """The order of computation."""
    first = (
        divergence.layers[0] if divergence.layers else np.inf if divergence.part == "norm" else -1
    )
    return first, dataflow.NAMES.index(divergence.part) if divergence.part in dataflow.NAMES else -1


def _mixed(spec: Model, other: Model, names: Sequence[str]) -> Model:
    """The spec with these fields as the other has them; the other, where that is no spec."""
    mine, theirs = to_json(spec), to_json(other)
    try:
        for name in names:
            *path, last = (int(x) if x.isdigit() else x for x in name.split("."))
            to: Any = mine
            source: Any = theirs
            for at in path:
                to, source = to[at], source[at]
            to[last] = source[last]
        return from_json(mine, "the mixed spec")
    except (BadInput, KeyError, IndexError, TypeError):
        return other


def _of_weights(
    reference: Reference, theirs: Tensors, tensors: Sequence[tuple[Difference, Explanation | None]]
) -> Iterator[IsolatedCause]:
    """One cause for each slip and part, in all the layers where it was made.

    An exchange is one cause, though it shows in two parts.
    """
    groups: dict[tuple[str, str], list[tuple[str, Explanation]]] = {}
    for difference, explanation in tensors:
        name = difference.place
        explanation = explanation or Explanation(
            "weights", f"differs: {difference.about}", "copy the tensor again"
        )
        part = "" if explanation.name == "weights-swapped" else probes.part(name)
        groups.setdefault((explanation.name, part), []).append((name, explanation))
    for found in groups.values():
        names = [name for name, _ in found]
        mixed = {n: theirs[n] if n in names else t for n, t in reference.tensors.items()}
        layers = tuple(sorted({i for n in names if (i := probes.layer(n)) is not None}))
        explanation = replace(found[0][1], about=f"has a {names[0]} that {found[0][1].about}")
        isolated = _made(reference, reference.spec, mixed)
        if isolated is not None:
            yield IsolatedCause(_divergence(explanation, probes.part(names[0]), layers), isolated)


def _divergence(explanation: Explanation, part: str, layers: tuple[int, ...]) -> Divergence:
    named = Cause(explanation.name, explanation.about, explanation.advice, part, layers, 0.0, False)
    return Divergence(part, layers, "preflight", float("inf"), named if explanation.name else None)


def field_part(field: str) -> str:
    """The part of the model that a field of the spec belongs to: "attn", "norm", ..."""
    names = field.split(".")
    return names[4] if names[0] == "runs" and len(names) > 4 else names[0]


def layers_of(field: str, spec: Model) -> Iterator[int]:
    """The layers whose block a field of the spec is in: "runs.0.blocks.1.attn.rope.base"."""
    for r, run in enumerate(spec.layer_numbers()):
        for i, layers in enumerate(run):
            if field.startswith(f"runs.{r}.blocks.{i}."):
                yield from layers
