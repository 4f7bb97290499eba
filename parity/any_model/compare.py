"""Bring your own: any torch module against any JAX function, by a table of your rows."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.parity.any_model import arguments, outputs
from jaxtwin.parity.any_model.sides import JaxSide, TorchSide, sized
from jaxtwin.parity.compare import budgets, curves, failure_details, preflight
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

    `jax_side` is a Flax module, NNX or linen, or a function f(params, *inputs). `params` are those
    of a function or a linen module, nested or by path.
    `table` has one row for each parameter: its path in JAX (dst), its name in torch (src), and how
    the axes move, torch -> JAX. `probes` are rows of the same kind between the names given to
    `jaxtwin.probe` in JAX and in torch, or torch's submodules, whose output is meant (with ":in"
    after the name, their first argument). The sizes of single letters are read off the tensors.
    Either forward may return several arrays (outputs.py).
    Both compute in each dtype in turn, float64 first, on `inputs` (floats are cast). Where one
    computes in fewer digits inside, float64's bounds cannot be held; it is judged by the budget of
    what it does compute in, and that is noted. Without `jit` nothing is compiled, which for a tiny
    model is faster. BadInput where an argument or a table does not fit.
    """
    import jax

    arguments.call(torch_module, jax_side, table, inputs, probes, params, dtypes)
    report = Report(
        environment={"inputs": [list(np.shape(x)) for x in inputs], "settings": {}},
        notes=settings.notes(torch_module),
    )
    of = _Compared(torch_module, jax_side, table, inputs, probes, params, jit, report)
    with runs.grads_on(), jax.enable_x64(True), jax.default_matmul_precision("highest"):
        exact = of.pair("float64", "float64" in dtypes)
        narrower = exact.float64()
        working = [dtype for dtype in dict.fromkeys(dtypes) if dtype != "float64"]
        if narrower and narrower not in working:
            working.insert(0, narrower)
        for dtype in working:
            of.pair(dtype, dtype in dtypes).working(exact if dtype == narrower else None)
    return report


@dataclass
class _Compared:
    """What was given; and the float64 run, once there is one."""

    torch_module: torch.nn.Module
    jax_side: Any
    table: Sequence[Row]
    inputs: Sequence[np.ndarray]
    probes: Sequence[Row]
    params: Mapping[str, Any] | None
    jit: bool
    report: Report
    reference: Trace | None = None

    def pair(self, dtype: str, compared: bool) -> _Pair:
        """Both sides in that dtype; where it is compared, what differs in settings is told."""
        plain = TorchSide.of(self.torch_module, self.inputs, dtype)
        torch_side, returned = plain.probed(self.probes)
        jax_side = JaxSide.of(self.jax_side, self.params, self.inputs, dtype, self.jit)
        names = dict(torch_side.model.named_parameters())
        rows = sized(self.table, names)
        arguments.names(rows, jax_side.arrays, torch_side.model)
        pairs, notes = outputs.paired(returned, jax_side.returned())
        torch_side = torch_side.returning(pairs)
        with settings.Calls() as calls:
            torch_run = torch_side.run()
        probed = sized(self.probes, torch_run.values)
        jax_side = replace(jax_side, rows=rows, probes=probed, pairs=pairs)
        if self.reference is None:
            self.reference = torch_run
            self.report.notes += notes
        one, other = settings.torch_side(torch_side.model, calls), jax_side.settings()
        self.report.environment["settings"][dtype] = {"torch": one, "jax": other}
        if compared:
            settings.tell(self.report, settings.differences(one, other, dtype))
        return _Pair(torch_side, jax_side, torch_run, self.reference, dtype, self.report)


@dataclass
class _Pair:
    """Both sides in one dtype, torch's run and the one in float64, and the report of them."""

    torch_side: TorchSide
    jax_side: JaxSide
    torch_run: Trace
    reference: Trace
    dtype: str
    report: Report
    theirs: dict[str, np.ndarray] = field(default_factory=dict)  # JAX's parameters
    unlike: list[Difference] = field(default_factory=list)  # those that are not torch's
    bands: dict[str, dict[str, float]] | None = None  # of parts alone, where not float64's

    @property
    def outputs(self) -> list[str]:
        return [pair.name for pair in self.torch_side.pairs]

    def float64(self) -> str:
        """Fixed bounds and, where one is exceeded, the causes.

        Returns the dtype to judge by instead where a side computes in that one inside.
        """
        report, side, reference = self.report, self.jax_side, self.reference
        self.theirs, self.unlike = _weights(self.torch_side.model, side.rows, side.arrays)
        report.preflight += self.unlike
        got = failure_details.Runs(reference, side.run(None), side.run(reference))
        assert isinstance(got.end_to_end, Trace)
        assert got.patched is not None
        checks = _strict(got.end_to_end, reference, self.outputs)
        accumulated = curves.measure(got.end_to_end, reference)
        local = curves.measure(got.patched, reference)
        points = curves.points(accumulated, [local], reference, "float64", kind=_kind)
        shown = self._shown(points)
        equal = all(c.ok for c in checks) and all(p.ok for p in shown)
        if not equal and (narrower := self._narrower()):
            return narrower
        report.checks += checks
        report.points += shown
        report.checks += [budgets.part(p) for p in shown]
        if not report.equal:
            self._diagnose(got.end_to_end, got.patched)
        failure_details.add(report, checks, self.dtype, got, self._axes)
        return ""

    def working(self, exact: _Pair | None) -> None:
        """Measured budgets. `exact`: both sides in float64, where one computes in this inside."""
        report = self.report
        points, checks = self._drawn()
        shown = self._shown(points)
        report.points += shown
        report.checks += [*checks, *(budgets.part(p) for p in shown)]
        if exact is not None and not report.equal:
            exact.bands = {way: {} for way in curves.PICK}
            for p in points:
                exact.bands[p.direction][p.probe] = p.band
            side = exact.jax_side
            exact._diagnose(side.run(None), side.run(self.reference))
        room = len(report.details) < failure_details.MOST
        if room and failure_details.chosen(report, self.dtype):
            patched = self.jax_side.run(self.reference)
            got = failure_details.Runs(self.reference, None, patched)
            failure_details.add(report, [], self.dtype, got, self._axes)

    def _narrower(self) -> str:
        """The dtype that a side computes in inside, with a note; "" where none was seen to."""
        found = self.jax_side.narrow()
        lines = [f"JAX computes in {dtype} ({where})" for dtype, where in found]
        lines += [f"torch: {what}" for what in self.torch_side.narrow]
        if not lines:
            return ""
        kinds = ("bfloat16", "float16", "float32")
        named = [*(dtype for dtype, _ in found), *self.torch_side.narrow]
        narrower = next((kind for kind in kinds if any(kind in x for x in named)), "float32")
        more = f" and {len(lines) - 3} more" if lines[3:] else ""
        self.report.notes.append(
            f"float64's bounds cannot be held where a side computes in fewer digits: "
            f"{'; '.join(lines[:3])}{more}. Judged by the budget of {narrower}"
        )
        return narrower

    def _shown(self, points: Sequence[Point]) -> list[Point]:
        """Without the outputs, which have checks of their own.

        Where an output differs and there is no probe to say where, every gradient differs with it.
        """
        shown = [p for p in points if p.probe not in self.outputs]
        bad = any(not p.ok and p.direction == "forward" for p in points)
        if bad and not self.jax_side.probes:
            shown = []
        return shown

    @property
    def _axes(self) -> failure_details.Axes:
        return failure_details.axes([*self.jax_side.rows, *self.jax_side.probes])

    def _diagnose(self, end_to_end: Trace, patched: Trace) -> None:
        """Parts that differ when they are fed the same, and what makes torch's agree with them.

        Where weights differ, torch gets the JAX side's first: what is left has another cause.
        """
        import torch

        from jaxtwin.parity.any_model.diagnose.search import PairOfRuns, search

        side, reference = self.torch_side, self.reference
        if self.unlike:
            model = copy.deepcopy(side.model)
            state = {name: torch.from_numpy(x) for name, x in self.theirs.items()}
            model.load_state_dict(state, strict=False)
            side = replace(side, model=model)
            reference = side.run()
            patched = self.jax_side.run(reference)
        found = search(side, self.jax_side, PairOfRuns(reference, patched, self.bands))
        before = self._final(end_to_end, self.reference)
        left = self._final(end_to_end, side.run(placed=found.placed))
        share = 1.0 if left <= 1 else float(np.nan_to_num(np.clip(1 - left / before, 0, 1)))
        for divergence in [*map(_of_weight, self.unlike), *found.divergences]:
            if divergence.cause is not None:
                cause = replace(divergence.cause, explains=share, proven=left <= 1)
                divergence = replace(divergence, cause=cause)
            self.report.divergences.append(divergence)
        self.report.notes += found.dropped

    def _final(self, got: Trace, want: Trace) -> float:
        """The largest error end to end, in units of what is allowed."""
        if self.bands is None:
            return curves.final(got, want)
        over = [
            error / self.bands[way][name]
            for way in ("forward", "parameter")
            for name, error in curves.errors(got, want, way).items()
            if way == "parameter" or name in self.outputs
        ]
        return float(np.max(over))

    def _drawn(self) -> tuple[list[Point], list[Check]]:
        """The curves and the outputs.

        While something is over, roundings are drawn anew. With the rows of the inputs in another
        order the sums over them that make a parameter's gradient are rounded otherwise, on both
        sides; and torch's parameters are moved within their own rounding, for one row of a few
        numbers may come out right by chance.
        """
        dtype, rng, order, reference = self.dtype, np.random.default_rng(0), None, self.reference
        end_to_end = self.jax_side.run(None)
        accumulated = curves.measure(end_to_end, reference)
        jax_draws = [_output(end_to_end, reference, self.outputs)]
        torch_draws = [_output(self.torch_run, reference, self.outputs)]
        local: list[curves.Errors] = []
        noise: list[curves.Errors] = []
        while True:
            moved = _moved(reference, order)
            drawn = self.torch_side.reordered(order).jittered(len(noise))
            noise.append(curves.measure(drawn.run(moved), moved))
            local.append(curves.measure(self.jax_side.run(moved, order), moved))
            found = curves.points(accumulated, local, reference, dtype, noise, _kind)
            checks = _budgeted(jax_draws, torch_draws, reference, dtype, self.outputs)
            fine = all(p.ok for p in found) and all(c.ok for c in checks)
            if fine or len(noise) == DRAWS:
                return found, checks
            if _is_batch(self.torch_side, reference):
                order = rng.permutation(len(self.torch_side.inputs[0]))
            moved = _moved(reference, order)
            jax_draws.append(_output(self.jax_side.run(None, order), moved, self.outputs))
            drawn = self.torch_side.reordered(order).jittered(len(noise))
            torch_draws.append(_output(drawn.run(), moved, self.outputs))


def _kind(name: str) -> str:
    """The same part of every layer: torch's own names are alike but for their numbers."""
    return re.sub(r"\d+", "*", name)


Measure = tuple[str, str]  # a check's kind and place


def _output(run: Trace, reference: Trace, names: Sequence[str]) -> dict[Measure, float]:
    """The outputs' errors, by the kind of check and the output."""
    found = {}
    for name in names:
        got, want = run.values[name], reference.values[name]
        found["output", _place(name)] = curves.error(got, want)
        found["worst_row", _place(name)] = metrics.worst_row(got, want)
    return found


def _place(output: str) -> str:
    return output.removeprefix(outputs.MAIN).lstrip(".")


def _strict(got: Trace, reference: Trace, names: Sequence[str]) -> list[Check]:
    budgets = {"output": FORWARD, "worst_row": WORST_TOKEN}
    output = _output(got, reference, names)
    grads = curves.errors(got, reference, "parameter")
    return [
        *(Check(kind, "float64", error, budgets[kind], at) for (kind, at), error in output.items()),
        *(Check("gradient", "float64", error, BACKWARD, name) for name, error in grads.items()),
    ]


def _budgeted(
    jax: Sequence[dict[Measure, float]],
    torch: Sequence[dict[Measure, float]],
    reference: Trace,
    dtype: str,
    names: Sequence[str],
) -> list[Check]:
    """The smallest error of JAX's draws, against K times the largest of torch's and a rounding."""
    near = {name: metrics.rounded(reference.values[name], curves.NUMPY[dtype]) for name in names}
    rounding = _output(replace(reference, values=near), reference, names)
    return [
        Check(
            kind,
            dtype,
            float(np.min([draw[kind, place] for draw in jax])),
            K * float(np.max([draw[kind, place] for draw in torch])) + rounding[kind, place],
            place,
        )
        for kind, place in rounding
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


def _of_weight(unlike: Difference) -> Divergence:
    name = unlike.place
    about = f"has a {name} that differs: {unlike.about}"
    cause = Cause("weights", about, "copy the tensor again", name, (), 0.0, False)
    return Divergence(name, (), "preflight", float("inf"), cause)
