"""Bring your own: any torch module against any JAX function, by a table of your rows."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import BadInput
from jaxtwin.parity.compare import arguments, curves, failure_details, preflight
from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.results import Cause, Check, Difference, Divergence, Point, Report
from jaxtwin.parity.sides import runs, settings
from jaxtwin.parity.sides.outcome import Trace
from jaxtwin.parity.sides.probes import Place, jax_runs, run_torch
from jaxtwin.parity.table import axis_ops
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, backward, forward

if TYPE_CHECKING:
    import torch

    from jaxtwin.parity.sides.hypothesis import PlacedHypothesis

GIVEN = ":in"  # after a submodule's name: what it is given, and not what it returns


@dataclass(frozen=True)
class TorchSide:
    """A torch module on its inputs, seen from inside, that can be made to commit mistakes."""

    model: torch.nn.Module
    places: Mapping[str, Place]
    inputs: Sequence[torch.Tensor]
    order: np.ndarray | None = None  # of the rows, where it is another

    def reordered(self, order: np.ndarray | None) -> TorchSide:
        if order is None:
            return self
        return replace(self, inputs=[x[order] for x in self.inputs], order=order)

    def jittered(self, seed: int) -> TorchSide:
        """With every parameter moved by up to half a unit in its last place: rounded otherwise."""
        import torch

        if not seed:
            return self
        draw = torch.Generator().manual_seed(seed)
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for p in model.parameters():
                within = torch.rand(p.shape, generator=draw).to(p) - 0.5
                p.add_(p * within * torch.finfo(p.dtype).eps)
        return replace(self, model=model)

    def run(self, forced: Trace | None = None, placed: Sequence[PlacedHypothesis] = ()) -> Trace:
        import torch

        from jaxtwin.parity.sides.hypothesis import committing

        def score(output: torch.Tensor) -> torch.Tensor:
            weights = weighing(tuple(output.shape))
            weights = weights if self.order is None else weights[self.order]
            return output * torch.from_numpy(weights).to(output)

        with committing(self.model, placed) if placed else nullcontext():
            return run_torch(
                self.model, self.places, lambda: self.model(*self.inputs), score, forced
            )


Runs = Callable[[Trace | None, np.ndarray | None], Trace]  # forced by, rows in this order


def weighing(shape: tuple[int, ...]) -> np.ndarray:
    """Fixed random weights: the loss is the output's mean with them, so every element counts."""
    return np.random.default_rng(0).normal(size=shape)


def compare(
    torch_module: torch.nn.Module,
    jax_side: Any,
    table: Sequence[Row],
    inputs: Sequence[np.ndarray],
    *,
    probes: Sequence[Row] = (),
    params: Mapping[str, Any] | None = None,
    dtypes: Sequence[str] = ("float64", "float32"),
    jit: bool = True,
) -> Report:
    """Is this JAX model that torch module? Outputs, every gradient, and each probed part alone.

    `jax_side` is a Flax NNX module, or a function f(params, *inputs) with its `params` by path.
    `table` has one row for each parameter: its path in JAX (here), its name in torch (there), and
    how the axes move, torch -> JAX. `probes` are rows of the same kind between the names given to
    `parity.probe` in JAX and torch's submodules, whose output is meant (with ":in" after the name,
    what they are given). The sizes of single letters are read off the tensors.
    Both compute in each dtype in turn, float64 first, on `inputs` (floats are cast). Without `jit`
    nothing is compiled, which for a tiny model is faster. BadInput where an argument or a table
    does not fit.
    """
    import jax

    arguments.call(torch_module, jax_side, table, inputs, probes, params, dtypes)
    report = Report(
        environment={"inputs": [list(np.shape(x)) for x in inputs], "settings": {}},
        notes=settings.notes(torch_module),
    )
    with runs.grads_on(), jax.enable_x64(True), jax.default_matmul_precision("highest"):
        truth = None
        for dtype in dict.fromkeys(["float64", *dtypes]):
            src = _torch_side(torch_module, probes, inputs, dtype)
            with settings.Calls() as calls:
                own = src.run()
            rows, seen = sized(table, own.grads), sized(probes, own.values)
            dst, arrays, read = _jax_side(jax_side, params, rows, seen, inputs, dtype, jit)
            arguments.names(rows, arrays, src.model)
            known = failure_details.axes([*rows, *seen])
            own_settings, jaxs = settings.torch_side(src.model, calls), read()
            report.environment["settings"][dtype] = {"torch": own_settings, "jax": jaxs}
            if dtype in dtypes:
                settings.tell(report, settings.differences(own_settings, jaxs, dtype))
            if truth is None:
                truth = own
                theirs, differ = _weights(src.model, rows, arrays)
                report.preflight += differ
                free, forced = dst(None, None), dst(truth, None)
                report.checks += _strict(free, truth)
                ends, alone = curves.measure(free, truth), curves.measure(forced, truth)
                report.points += curves.points(ends, [alone], truth, dtype)
                if not report.equal:
                    report.divergences = _suspects(src, dst, theirs, truth, free, forced, report)
                failure_details.add(report, report.checks, dtype, truth, free, forced, known)
            elif dtype in dtypes:
                points, checks = _working(src, dst, own, truth, dtype)
                report.points += points
                report.checks += checks
                if len(report.details) < failure_details.MOST and failure_details.chosen(
                    report, dtype
                ):
                    failure_details.add(report, [], dtype, truth, None, dst(truth, None), known)
            report.checks += [
                Check(f"part alone, {p.direction}: {p.probe}", dtype, p.local_error, p.band)
                for p in report.points
                if p.dtype == dtype
            ]
    return report


DRAWS = 8  # of roundings at most, and only while a part is over its band


def _working(
    src: TorchSide, dst: Runs, torchs: Trace, truth: Trace, dtype: str
) -> tuple[list[Point], list[Check]]:
    """The curves and the output in a working dtype; `torchs` is torch's own run in it.

    While something is over, roundings are drawn anew. With the rows of the inputs in another order
    the sums over them that make a parameter's gradient are rounded otherwise, on both sides; and
    torch's parameters are moved within their own rounding, for one row of a few numbers may come
    out right by chance.
    """
    free = dst(None, None)
    ends = curves.measure(free, truth)
    outputs = [_output(free, truth)], [_output(torchs, truth)]
    rounding = _output(
        replace(truth, logits=metrics.rounded(truth.logits, curves.numpy(dtype))), truth
    )
    rng = np.random.default_rng(0)
    alone: list[curves.Errors] = []
    own: list[curves.Errors] = []
    order = None
    while True:
        moved = truth if order is None else _moved(truth, order)
        drawn = src.reordered(order).jittered(len(own))
        forced = drawn.run(moved), dst(moved, order)
        own.append(curves.measure(forced[0], moved))
        alone.append(curves.measure(forced[1], moved))
        found = curves.points(ends, alone, truth, dtype, own)
        checks = [
            Check(
                name,
                dtype,
                float(np.min([draw[name] for draw in outputs[0]])),
                curves.K * float(np.max([draw[name] for draw in outputs[1]])) + rounding[name],
            )
            for name in rounding
        ]
        fine = all(p.ok for p in found) and all(c.ok for c in checks)
        if fine or len(own) == DRAWS:
            return found, checks
        if _rows(src, truth):
            order = rng.permutation(len(src.inputs[0]))
        again = truth if order is None else _moved(truth, order)
        outputs[0].append(_output(dst(None, order), again))
        outputs[1].append(_output(src.reordered(order).jittered(len(own)).run(), again))


def _output(run: Trace, truth: Trace) -> dict[str, float]:
    return {
        "output": curves.error(run.logits, truth.logits),
        "output, worst row": metrics.worst_row(run.logits, truth.logits),
    }


def _moved(truth: Trace, order: np.ndarray) -> Trace:
    """The same run with its rows in that order."""
    values = {name: x[order] for name, x in truth.values.items()}
    cotangents = {name: x[order] for name, x in truth.cotangents.items()}
    return replace(truth, logits=truth.logits[order], values=values, cotangents=cotangents)


def _rows(src: TorchSide, truth: Trace) -> bool:
    """Whether everything is rows of one batch, and can be put in another order."""
    shapes: list[tuple[int, ...]] = [tuple(x.shape) for x in src.inputs]
    shapes += [x.shape for x in truth.values.values()] + [truth.logits.shape]
    return len({shape[:1] for shape in shapes}) == 1 and () not in shapes


def _torch_side(
    module: torch.nn.Module, probes: Sequence[Row], inputs: Sequence[np.ndarray], dtype: str
) -> TorchSide:
    import torch

    kind = getattr(torch, dtype)
    model = copy.deepcopy(module).to(kind).eval()
    known = dict(model.named_modules())
    places = {}
    for row in probes:
        name = row.src.removesuffix(GIVEN)
        if name not in known:
            raise BadInput(f"probe {row.src!r}: the torch module has no submodule {name!r}")
        places[row.src] = Place(name, given=row.src.endswith(GIVEN))
    given = [torch.from_numpy(np.array(x)) for x in inputs]
    given = [x.to(kind) if x.is_floating_point() else x for x in given]
    return TorchSide(model, places, given)


def _jax_side(
    side: Any,
    params: Mapping[str, Any] | None,
    rows: Sequence[Row],
    probes: Sequence[Row],
    inputs: Sequence[np.ndarray],
    dtype: str,
    jit: bool,
) -> tuple[Runs, dict[str, Any], Callable[[], settings.Snapshot]]:
    """Its runs, its parameters as they are stored, and what reads its settings."""
    import jax.numpy as jnp
    from flax import nnx

    model = side if isinstance(side, nnx.Module) else None
    if isinstance(side, nnx.Module):
        split: Any = nnx.split(side, nnx.Param, ...)
        graph, state, rest = split
        flat = dict(nnx.to_flat_state(state))
        paths = {"/".join(map(str, path)): path for path in flat}
        arrays = {name: flat[path].get_value() for name, path in paths.items()}

        def call(params: Mapping[str, Any], *given: Any) -> Any:
            new = {path: flat[path].replace(params[name]) for name, path in paths.items()}
            return nnx.merge(graph, nnx.from_flat_state(new), rest)(*given)
    else:
        arrays, call = dict(params or {}), arguments.reading(side)
    cast = {path: jnp.asarray(x).astype(dtype) for path, x in arrays.items()}
    given = [jnp.asarray(x) for x in inputs]
    given = [x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in given]

    def run(forced: Trace | None, order: np.ndarray | None) -> Trace:
        rows_of = [x if order is None else x[order] for x in given]

        def score(output: Any) -> Any:
            weights = weighing(output.shape)
            weights = weights if order is None else weights[order]
            return output * jnp.asarray(weights, output.dtype)

        return jax_runs(lambda p: call(p, *rows_of), cast, score, rows, probes, jit=jit)(forced)

    def read() -> settings.Snapshot:
        found = settings.jax_side(cast.values(), lambda: call(cast, *given), model)
        return found | {"jit": found["jit"] and jit}

    return run, arrays, read


def sized(rows: Sequence[Row], src: Mapping[str, Any]) -> list[Row]:
    """The rows with the sizes of their single letters, read off torch's tensors."""
    out = []
    for row in rows:
        sizes = dict(row.sizes)
        for move in row.moves():
            if move.src[0] in src:
                groups = re.findall(r"\([^)]*\)|\S+", axis_ops.sides(row.pattern)[0])
                shape = src[move.src[0]].shape
                if len(groups) != len(shape):
                    raise BadInput(f"{row.src}: {row.pattern!r} is not of its shape {shape}")
                sizes |= {g: n for g, n in zip(groups, shape, strict=True) if "(" not in g}
        out.append(replace(row, sizes=sizes))
    return out


def _weights(
    model: torch.nn.Module, rows: Sequence[Row], arrays: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], list[Difference]]:
    """The JAX side's parameters by torch's names, and which are not the same on both sides."""
    want = {name: p.detach().numpy() for name, p in model.named_parameters()}
    dst = {path: Tensor.of(np.asarray(x)) for path, x in arrays.items()}
    named = backward(rows, dst, "the JAX side")
    forward(rows, {n: Tensor.of(x) for n, x in want.items()}, "the torch side")
    got = {name: tensor.read().astype(want[name].dtype) for name, tensor in named.items()}
    return got, [difference for difference, _ in preflight.weights(None, want, got)]


def _strict(free: Trace, truth: Trace) -> list[Check]:
    out = [
        Check(name, "float64", error, curves.FORWARD * (10 if "row" in name else 1))
        for name, error in _output(free, truth).items()
    ]
    grads = curves.errors(free, truth, "parameter")
    return out + [Check(f"grad {n}", "float64", e, curves.BACKWARD) for n, e in grads.items()]


def _suspects(
    src: TorchSide,
    dst: Runs,
    theirs: Mapping[str, np.ndarray],
    truth: Trace,
    free: Trace,
    forced: Trace,
    report: Report,
) -> list[Divergence]:
    """Parts that differ when they are fed the same, and what makes torch's agree with them.

    Where weights differ, torch is given the JAX side's first: what is left has another cause.
    """
    import torch

    from jaxtwin.parity.diagnose.search import Search

    before = curves.final(free, truth)

    given = [
        Divergence(
            d.what.removeprefix("weight: "),
            (),
            "given",
            float("inf"),
            Cause(
                "weights",
                f"has a {d.what.removeprefix('weight: ')} that differs: {d.about}",
                "copy the tensor again",
                d.what.removeprefix("weight: "),
                (),
                0.0,
                False,
            ),
        )
        for d in report.preflight
        if d.what.startswith("weight: ")
    ]
    if given:
        model = copy.deepcopy(src.model)
        model.load_state_dict({n: torch.from_numpy(x) for n, x in theirs.items()}, strict=False)
        src = replace(src, model=model)
        truth = src.run()
        forced = dst(truth, None)
    search = Search(src, truth, forced)
    found = [*given, *(divergence for divergence, _ in search.all())]
    left = curves.final(free, src.run(placed=search.placed))
    share = 1.0 if left <= 1 else float(np.nan_to_num(np.clip(1 - left / before, 0, 1)))
    return [
        divergence
        if divergence.cause is None
        else replace(divergence, cause=replace(divergence.cause, explains=share, proven=left <= 1))
        for divergence in found
    ]
