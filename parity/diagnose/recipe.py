"""What it takes to compute one value or gradient of a model alone: its inputs and its weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxtwin.configs import Model, dataflow
from jaxtwin.parity.sides import probes
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import src_shapes


@dataclass(frozen=True)
class Recipe:
    """What it takes to compute one thing alone, in torch's names."""

    stages: tuple[str, ...]  # what is run: "embed", "layers.3", "norm" or "head"
    values: tuple[str, ...]  # probes whose values are given
    cotangents: tuple[str, ...]  # probes whose cotangents are given
    weights: tuple[str, ...]

    @property
    def layer(self) -> int | None:
        return probes.layer(self.stages[0])

    @property
    def entry(self) -> str | None:
        """The probe that is the stage's own input x; None where it is not asked for."""
        inner = f"{self.stages[0]}."
        return next((name for name in self.values if not name.startswith(inner)), None)


def recipe(spec: Model, name: str, direction: str) -> Recipe | None:
    """Of a probe's value ("forward"), its cotangent ("backward") or a "parameter"'s gradient.

    None for the cotangent of the logits, which comes from the loss and from no part of the model.
    """
    steps, weights = dataflow.model_steps(spec), _weights(spec)
    if direction == "forward":
        run = [name]
    elif direction == "backward":
        run = [probe for probe, step in steps.items() if name in step.inputs]
    else:
        run = [probe for probe, of_probe in weights.items() if name in of_probe]
    if not run:
        return None
    return Recipe(
        _once(".".join(p.split(".")[:2]) if probes.layer(p) is not None else p for p in run),
        _once(value for probe in run for value in steps[probe].inputs),
        () if direction == "forward" else tuple(run),
        _once(weight for probe in run for weight in weights.get(probe, ())),
    )


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _weights(spec: Model) -> dict[str, list[str]]:
    """The weights that each probe of the model is computed with: those of its step's parts."""
    out: dict[str, list[str]] = {"head": ["embed.weight"] if spec.tied else []}
    steps = dataflow.model_steps(spec)
    by_part = {part: name for name, step in steps.items() for part in step.parts}
    for name, _ in src_shapes(decoder_table.rows(spec, "unroll")):
        part = name
        while part not in by_part:
            part = part.rpartition(".")[0]  # "layers.0.ffn.down.bias" is of layers.0.ffn
        out.setdefault(by_part[part], []).append(name)
    return out
