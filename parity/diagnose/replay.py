"""A part that failed, by itself: its inputs, weights and expected output, and a script to run it.

A patched run shows a part on the reference's own input. What it was given there is all that it
takes to run it again, with nothing else of the model: `save` writes one folder for each part that
is at fault, and the script in it calls jaxmodel's own code. It needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxtwin.configs import BadInput, Model
from jaxtwin.configs.atomic_write import appearing, refuse_taken
from jaxtwin.configs.spec import Run, from_json, to_json
from jaxtwin.parity.compare import curves, failure_details
from jaxtwin.parity.diagnose.recipe import Recipe, recipe
from jaxtwin.parity.diagnose.replay_script import script
from jaxtwin.parity.report.results import Point, Report
from jaxtwin.parity.sides import probes
from jaxtwin.parity.sides.inputs import Inputs
from jaxtwin.parity.table import axis_ops, decoder_table
from jaxtwin.parity.table.row import Move
from jaxtwin.parity.table.tensors import moves

if TYPE_CHECKING:
    from jaxtwin.parity.sides.outcome import Trace

BACK = "cotangent "  # before a probe's name: the cotangent there, and not the value


# ---- what a script runs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What a replay's script works with, in JAX's layout. Paths are those of a model of one layer.

    `ids` (b t), `x` (b t d) is the stage's input, `values` and `cotangents` the reference's at the
    probes, by path; `seeds` are zeros whose gradients are the cotangents that arrive.
    """

    name: str
    direction: str
    layer: int | None
    spec: Model
    ids: Any
    positions: Any
    segments: Any
    x: Any
    values: Mapping[str, Any]
    cotangents: Mapping[str, Any]
    weights: Mapping[str, Any]
    expected: np.ndarray
    letters: str  # of the expected value's axes

    @property
    def context(self) -> Any:
        """What attention is told beside x."""
        import jax.numpy as jnp

        from jaxtwin.jaxmodel.cache import AttentionContext, causal_segment_mask

        b, t = self.ids.shape
        start = jnp.zeros((), jnp.int32)
        mask = causal_segment_mask(b, t, t, start, self.segments)
        return AttentionContext(
            self.positions, self.positions, self.positions.max() + 1, start, mask
        )

    @property
    def seeds(self) -> dict[str, Any]:
        import jax.numpy as jnp

        return {path: jnp.zeros_like(x) for path, x in {**self.cotangents, **self.values}.items()}

    def slots(self, seeds: Mapping[str, Any]) -> dict[str, Any]:
        """What is put in at the probes."""
        from jaxtwin.jaxmodel.probe import Slot

        return {
            path: Slot(seed, self.values.get(path), self.cotangents.get(path))
            for path, seed in seeds.items()
        }

    def model(self, weights: Mapping[str, Any]) -> Any:
        """jaxmodel with the one layer and these weights. The layer's other weights are zero, and
        all others are shapes only: such a part cannot run."""
        import jax.numpy as jnp

        from jaxtwin.jaxmodel import abstract, axes

        empty = abstract(self.spec, dtype=jnp.float64, layout="unroll")

        def other(path: str, x: Any) -> Any:
            runs = self.layer is not None and path.startswith("stack/")
            return jnp.zeros(x.shape, x.dtype) if runs else x

        shapes = axes.arrays(empty)
        filled = {path: weights.get(path, other(path, x)) for path, x in shapes.items()}
        return axes.with_arrays(empty, filled)

    def verdict(self, got: Any) -> int:
        """Prints how far `got` is off, and where most. 1 where that is over the band, else 0."""
        got, want, band = np.asarray(got), self.expected, curves.BANDS[self.direction]
        error = curves.error(got, want)
        word = "ok" if error <= band else "WRONG"
        print(f"{self.name}, {self.direction}: relative L2 {error:.6e}, at most {band:.0e}: {word}")
        if got.shape != want.shape:
            print(f"expected the shape {want.shape}, got {got.shape}")
        elif word != "ok":
            gap = np.abs(got - want)
            at = np.unravel_index(np.argmax(gap), gap.shape)  # a NaN counts as the largest
            where = ", ".join(f"{a} {i}" for a, i in zip(self.letters.split(), at, strict=True))
            print(f"largest at {where}: expected {want[at]:.17g}, got {got[at]:.17g}")
        return int(word != "ok")


def opened(folder: Path, name: str, direction: str) -> Part:
    """The folder of a replay, read again. BadInput where a file is missing or does not fit.

    weights.safetensors may hold more than is needed, such as a whole model in torchref's names.
    """
    import jax.numpy as jnp

    at = folder / "spec.json"
    try:
        model = from_json(json.loads(at.read_text("utf-8")), str(at))
    except (OSError, ValueError) as error:
        raise BadInput(f"{at} cannot be read: {error}") from None
    todo = recipe(model, name, direction)
    if todo is None:
        raise BadInput(f"{name}, {direction}: the loss computes that, and no part of the model")
    block = model.layers[todo.layer or 0]
    spec = replace(model, runs=(Run(blocks=(block,), repeats=1),))
    inputs, weights, expected = (
        _loaded(folder / f"{file}.safetensors") for file in ("input", "weights", "expected")
    )
    ids = inputs["ids"]
    known = _moves(probes.rows(spec, "unroll", ids.shape), todo)
    if todo.entry is not None:
        known[todo.entry] = replace(known["norm"], dst="in")  # of the same axes
    parameters = _moves(decoder_table.rows(spec, "unroll"), todo)
    move = parameters[name] if direction == "parameter" else known[name]

    def dst(file: str, arrays: Mapping[str, Any], names: Sequence[str], back: str = "") -> Any:
        table = parameters if file == "weights" else known
        return {
            table[n].dst.removeprefix("" if file == "weights" else "stack/layers/0/"): jnp.asarray(
                _moved(folder / f"{file}.safetensors", arrays, back + n, table[n]),
                jnp.float64,
            )
            for n in names
        }

    values = dst("input", inputs, todo.values)
    entry = None if todo.entry is None else known[todo.entry].dst
    x = values.pop(entry) if entry else jnp.zeros((*ids.shape, spec.d), jnp.float64)
    return Part(
        name=name,
        direction=direction,
        layer=todo.layer,
        spec=spec,
        ids=jnp.asarray(inputs["ids"]),
        positions=jnp.asarray(inputs["positions"]),
        segments=jnp.asarray(inputs["segments"]),
        x=x,
        values=values,
        cotangents=dst("input", inputs, todo.cotangents, BACK),
        weights=dst("weights", weights, todo.weights),
        expected=_moved(folder / "expected.safetensors", expected, name, move),
        letters=axis_ops.sides(move.pattern)[1],
    )


def _moves(rows: Sequence[Any], todo: Recipe) -> dict[str, Move]:
    """The table of the one layer, by its names in the whole model."""
    layer = f"layers.{todo.layer or 0}."
    return {m.src[0].replace("layers.0.", layer): m for m in moves(rows)}


def _loaded(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None


def _moved(path: Path, arrays: Mapping[str, np.ndarray], name: str, move: Move) -> np.ndarray:
    """One tensor of a file, in JAX's layout."""
    if name not in arrays:
        raise BadInput(f"{path} has no {name!r}; it holds {', '.join(arrays) or 'nothing'}")
    x = arrays[name]
    if x.shape != move.src_shape:
        raise BadInput(f"{path}: {name!r} has the shape {x.shape}, expected {move.src_shape}")
    return axis_ops.rearrange(x, move.pattern, move.sizes)


# ---- saving -------------------------------------------------------------------------------------


def save(
    folder: Path,
    spec: Model,
    weights: Mapping[str, np.ndarray],
    inputs: Inputs,
    reference_run: Trace,
    report: Report,
) -> None:
    """A folder for the first divergence and one for each further one, below a new folder.

    `spec` and `weights` (in torch's names and layout) are the JAX side's, `reference_run` is the
    reference's on `inputs`. Nothing is written where no part is at fault alone. BadInput where
    something is there already.
    """
    found = [
        (p, r) for p in failure_details.chosen(report) if (r := recipe(spec, p.probe, p.direction))
    ]
    if not found:
        return
    paths = {name: m.dst for m in moves(decoder_table.rows(spec, "unroll")) for name in m.src}
    with appearing(folder) as hidden:
        for point, todo in found:
            place = hidden / label(point)
            place.mkdir(parents=True)
            arrays = {"ids": inputs.ids, "positions": inputs.positions, "segments": inputs.segments}
            arrays |= {name: reference_run.values[name] for name in todo.values}
            arrays |= {BACK + name: reference_run.cotangents[name] for name in todo.cotangents}
            want = getattr(reference_run, curves.PICK[point.direction])[point.probe]
            files = {
                "input": arrays,
                "weights": {name: weights[name] for name in todo.weights},
                "expected": {point.probe: want},
            }
            for name, held in files.items():
                contiguous = {key: np.ascontiguousarray(x) for key, x in held.items()}
                save_file(contiguous, place / f"{name}.safetensors")
            (place / "spec.json").write_text(json.dumps(to_json(spec), indent=1) + "\n", "utf-8")
            (place / "replay.py").write_text(script(point, todo, paths), "utf-8")


def label(point: Point) -> str:
    """The name of a point's folder."""
    more = {"forward": "", "backward": ".backward", "parameter": ".gradient"}
    return point.probe + more[point.direction]


def ready(folder: Path, dtypes: Sequence[str]) -> None:
    """BadInput where a replay could not be written, or not be made."""
    place = refuse_taken(folder)
    if not place.parent.is_dir():
        raise BadInput(
            f"{folder} cannot be written: there is no folder {place.parent}; make it first"
        )
    if "float64" not in dtypes:
        raise BadInput("--replay needs the comparison in float64; add --dtype float64")


def notes(folder: Path, report: Report) -> list[str]:
    """What was written for a check that failed, or why nothing was."""
    if report.equal:
        return []
    found = sorted(p.parent.name for p in folder.glob("*/replay.py"))
    if not found:
        return ["no replay: no part is off in float64 when it is run alone"]
    return [f"to run what failed by itself: python {folder / name / 'replay.py'}" for name in found]
