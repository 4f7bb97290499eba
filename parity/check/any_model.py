"""Bring your own: any torch module against any JAX function, by a table of your rows."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.parity.check.any_sides import JaxSide, TorchSide, sized
from jaxtwin.parity.compare import arguments, budgets, curves, failure_details, preflight
from jaxtwin.parity.compare.tolerances import BACKWARD, FORWARD, WORST_TOKEN, K
from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.results import Cause, Check, Difference, Divergence, Point, Report
from jaxtwin.parity.sides import runs, settings
from jaxtwin.parity.sides.outcome import Trace
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, backward, forward

if TYPE_CHECKING:
    import torch

DRAWS = 8  # of roundings at most, and only while a part is over its band


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
    `table` has one row for each parameter: its path in JAX (dst), its name in torch (src), and how
    the axes move, torch -> JAX. `probes` are rows of the same kind between the names given to
    `jaxtwin.probe` in JAX and torch's submodules, whose output is meant (with ":in" after the name,
    their first argument). The sizes of single letters are read off the tensors.
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
        reference = None
        for dtype in dict.fromkeys(["float64", *dtypes]):
            torch_side = TorchSide.of(torch_module, probes, inputs, dtype)
            with settings.Calls() as calls:
                torch_run = torch_side.run()
            rows, probed = sized(table, torch_run.grads), sized(probes, torch_run.values)
            other = JaxSide.of(jax_side, params, rows, probed, inputs, dtype, jit)
            arguments.names(rows, other.arrays, torch_side.model)
            both = _Pair(torch_side, other, rows, probed, dtype, report)
            both.tell_settings(calls, dtype in dtypes)
            if reference is None:
                reference = torch_run
                both.float64(reference)
            else:
                both.working(torch_run, reference)
            report.checks += [budgets.part(p) for p in report.points if p.dtype == dtype]
    return report


@dataclass(frozen=True)
class _Pair:
    """Both sides in one dtype, and the report that tells of them."""

    torch_side: TorchSide
    jax_side: JaxSide
    rows: Sequence[Row]
    probes: Sequence[Row]
    dtype: str
    report: Report

    def tell_settings(self, calls: settings.Calls, compared: bool) -> None:
        """Records both sides' settings; what differs is told where the dtype is compared."""
        one, other = settings.torch_side(self.torch_side.model, calls), self.jax_side.settings()
        self.report.environment["settings"][self.dtype] = {"torch": one, "jax": other}
        if compared:
            settings.tell(self.report, settings.differences(one, other, self.dtype))

    def float64(self, reference: Trace) -> None:
        """Fixed bounds and, where one is exceeded, the causes."""
        report, side = self.report, self.jax_side
        theirs, unlike = _weights(self.torch_side.model, self.rows, side.arrays)
        report.preflight += unlike
        got = failure_details.Runs(reference, side.run(None, None), side.run(reference, None))
        assert isinstance(got.end_to_end, Trace)
        assert got.patched is not None
        report.checks += _strict(got.end_to_end, reference)
        accumulated = curves.measure(got.end_to_end, reference)
        local = curves.measure(got.patched, reference)
        report.points += curves.points(accumulated, [local], reference, "float64", kind=_kind)
        if not report.equal:
            report.divergences = _divergences(
                self.torch_side, side, theirs, reference, got.end_to_end, got.patched, unlike
            )
        failure_details.add(report, report.checks, self.dtype, got, self._axes)

    def working(self, torch_run: Trace, reference: Trace) -> None:
        """Measured budgets; `torch_run` is torch's own run in this dtype."""
        report = self.report
        points, checks = self._drawn(torch_run, reference)
        report.points += points
        report.checks += checks
        room = len(report.details) < failure_details.MOST
        if room and failure_details.chosen(report, self.dtype):
            patched = self.jax_side.run(reference, None)
            got = failure_details.Runs(reference, None, patched)
            failure_details.add(report, [], self.dtype, got, self._axes)

    @property
    def _axes(self) -> failure_details.Axes:
        return failure_details.axes([*self.rows, *self.probes])

    def _drawn(self, torch_run: Trace, reference: Trace) -> tuple[list[Point], list[Check]]:
        """The curves and the output.

        While something is over, roundings are drawn anew. With the rows of the inputs in another
        order the sums over them that make a parameter's gradient are rounded otherwise, on both
        sides; and torch's parameters are moved within their own rounding, for one row of a few
        numbers may come out right by chance.
        """
        dtype, rng, order = self.dtype, np.random.default_rng(0), None
        end_to_end = self.jax_side.run(None, None)
        accumulated = curves.measure(end_to_end, reference)
        jax_draws, torch_draws = [_output(end_to_end, reference)], [_output(torch_run, reference)]
        local: list[curves.Errors] = []
        noise: list[curves.Errors] = []
        while True:
            moved = _moved(reference, order)
            drawn = self.torch_side.reordered(order).jittered(len(noise))
            noise.append(curves.measure(drawn.run(moved), moved))
            local.append(curves.measure(self.jax_side.run(moved, order), moved))
            found = curves.points(accumulated, local, reference, dtype, noise, _kind)
            checks = _budgeted(jax_draws, torch_draws, reference, dtype)
            fine = all(p.ok for p in found) and all(c.ok for c in checks)
            if fine or len(noise) == DRAWS:
                return found, checks
            if _is_batch(self.torch_side, reference):
                order = rng.permutation(len(self.torch_side.inputs[0]))
            moved = _moved(reference, order)
            jax_draws.append(_output(self.jax_side.run(None, order), moved))
            drawn = self.torch_side.reordered(order).jittered(len(noise))
            torch_draws.append(_output(drawn.run(), moved))


def _kind(name: str) -> str:
    """The same part of every layer: torch's own names are alike but for their numbers."""
    return re.sub(r"\d+", "*", name)


def _output(run: Trace, reference: Trace) -> dict[str, float]:
    """The output's errors, by the kind of check."""
    return {
        "output": curves.error(run.logits, reference.logits),
        "worst_row": metrics.worst_row(run.logits, reference.logits),
    }


def _strict(got: Trace, reference: Trace) -> list[Check]:
    budgets = {"output": FORWARD, "worst_row": WORST_TOKEN}
    output = _output(got, reference)
    grads = curves.errors(got, reference, "parameter")
    return [
        *(Check(kind, "float64", error, budgets[kind]) for kind, error in output.items()),
        *(Check("gradient", "float64", error, BACKWARD, name) for name, error in grads.items()),
    ]


def _budgeted(
    jax: Sequence[dict[str, float]],
    torch: Sequence[dict[str, float]],
    reference: Trace,
    dtype: str,
) -> list[Check]:
    """The smallest error of JAX's draws, against K times the largest of torch's and a rounding."""
    near = metrics.rounded(reference.logits, curves.NUMPY[dtype])
    rounding = _output(replace(reference, logits=near), reference)
    return [
        Check(
            kind,
            dtype,
            float(np.min([draw[kind] for draw in jax])),
            K * float(np.max([draw[kind] for draw in torch])) + rounding[kind],
        )
        for kind in rounding
    ]


def _moved(reference: Trace, order: np.ndarray | None) -> Trace:
    """The same run with its rows in that order."""
    if order is None:
        return reference
    values = {name: x[order] for name, x in reference.values.items()}
    cotangents = {name: x[order] for name, x in reference.cotangents.items()}
    return replace(reference, logits=reference.logits[order], values=values, cotangents=cotangents)


def _is_batch(torch_side: TorchSide, reference: Trace) -> bool:
    """Whether everything is rows of one batch, and can be put in another order."""
    shapes: list[tuple[int, ...]] = [tuple(x.shape) for x in torch_side.inputs]
    shapes += [x.shape for x in reference.values.values()] + [reference.logits.shape]
    return len({shape[:1] for shape in shapes}) == 1 and () not in shapes


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


def _divergences(
    torch_side: TorchSide,
    jax_side: JaxSide,
    theirs: Mapping[str, np.ndarray],
    reference: Trace,
    end_to_end: Trace,
    patched: Trace,
    unlike: Sequence[Difference],
) -> list[Divergence]:
    """Parts that differ when they are fed the same, and what makes torch's agree with them.

    Where weights differ, torch gets the JAX side's (`theirs`) first: what is left has another
    cause.
    """
    import torch

    from jaxtwin.parity.diagnose.search import Search

    before = curves.final(end_to_end, reference)
    if unlike:
        model = copy.deepcopy(torch_side.model)
        model.load_state_dict({n: torch.from_numpy(x) for n, x in theirs.items()}, strict=False)
        torch_side = replace(torch_side, model=model)
        reference = torch_side.run()
        patched = jax_side.run(reference, None)
    search = Search(torch_side, reference, patched)
    found = [*map(_of_weight, unlike), *(divergence for divergence, _ in search.all())]
    left = curves.final(end_to_end, torch_side.run(placed=search.placed))
    share = 1.0 if left <= 1 else float(np.nan_to_num(np.clip(1 - left / before, 0, 1)))
    return [
        divergence
        if divergence.cause is None
        else replace(divergence, cause=replace(divergence.cause, explains=share, proven=left <= 1))
        for divergence in found
    ]


def _of_weight(unlike: Difference) -> Divergence:
    name = unlike.place
    about = f"has a {name} that differs: {unlike.about}"
    cause = Cause("weights", about, "copy the tensor again", name, (), 0.0, False)
    return Divergence(name, (), "preflight", float("inf"), cause)
