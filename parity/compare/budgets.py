"""A working dtype: errors from the float64 result, against budgets that torch's own errors set.

No budget is set by hand. JAX may be off the float64 result by at most twice what torch, in the same
dtype, is off it, plus what rounding that result costs. Where one draw of roundings leaves a doubt,
more are drawn (see reordering.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.memory import give_back
from jaxtwin.parity.compare import curves, decoder_settings, failure_details
from jaxtwin.parity.compare.curves import NUMPY
from jaxtwin.parity.compare.options import CheckOptions
from jaxtwin.parity.compare.tolerances import BANDS, HOLLOW, K_OF_KL, K
from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.results import Check, Point, Report, worst_first
from jaxtwin.parity.sides import probes, runs, terms
from jaxtwin.parity.sides.inputs import Inputs
from jaxtwin.parity.sides.outcome import Outcome, Trace
from jaxtwin.parity.sides.reordering import Reordering
from jaxtwin.parity.sides.runs import Reference, Subject, decoder
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensors

if TYPE_CHECKING:
    from jaxtwin.jaxmodel import Decoder

DRAWS = {"torch": 8, "jax": 3}  # at most, and only while a comparison is over its budget

Measure = tuple[str, str]  # a check's kind and place
Errors = Mapping[Measure, float]


def errors(got: Outcome, reference: Outcome) -> dict[Measure, float]:
    """How far a run is off the float64 result, by every measure that is budgeted."""
    return {
        ("logits", ""): metrics.relative_l2(got.logits, reference.logits),
        ("worst_token", ""): metrics.worst_row(got.logits, reference.logits),
        ("kl", ""): metrics.worst_kl(got.logits, reference.logits),
        ("loss", ""): metrics.relative_l2(got.nll, reference.nll),
        **{("gradient", n): reference.off(n, got.grads[n]) for n in reference.grads},
    }


def rounding(reference: Outcome, dtype: str) -> dict[Measure, float]:
    """What it costs to round the float64 result to the dtype: nobody can be nearer than that."""
    near = [metrics.rounded(x, NUMPY[dtype]) for x in (reference.logits, reference.nll)]
    out = errors(Outcome(near[0], near[1], reference.grads), reference)
    for name, grad in reference.grads.items():
        of = reference.terms.get(name)
        out["gradient", name] = terms.rounding(grad, NUMPY[dtype], of)
    return out


def budgeted(
    draws: Sequence[Errors], torch: Sequence[Errors], noise: Errors, dtype: str, label: str = ""
) -> list[Check]:
    """Every error against its budget; `draws` and `torch` hold the errors of one or more draws.

    The budget is K times the largest error of torch's draws, and the rounding noise. The error is
    the smallest of the draws: a fault is in every one of them, bad luck is not.
    """
    out = []
    for measure, least in noise.items():
        kind, place = measure
        factor = K_OF_KL if kind == "kl" else K
        budget = factor * _largest([draw[measure] for draw in torch]) + least
        error = _smallest([draw[measure] for draw in draws])
        out.append(Check(kind, dtype, error, budget, place, label))
    return out


def _largest(values: Sequence[float]) -> float:
    return float(np.max(values))  # unlike max, NaN whatever its place


def _smallest(values: Sequence[float]) -> float:
    return float(np.min(values))


@dataclass
class WorkingDtype:
    """JAX (and the witness) in a working dtype, against the budget that torch's own error sets.

    While something is over its budget and `redraw` is true (float64 has shown that the function is
    the same, or was left out), roundings are drawn anew: torch first, whose largest error sets the
    budget, then JAX.
    """

    torch_side: Reference
    jax_side: tuple[Model, Tensors]
    reference: Outcome  # torch in float64; a Trace where the options ask for probes
    dtype: str
    report: Report
    settings: decoder_settings.Sides
    options: CheckOptions
    redraw: bool
    torch_draws: list[Errors] = field(default_factory=list)
    jax_draws: list[Errors] = field(default_factory=list)
    logits: np.ndarray = field(init=False)  # of JAX's first draw
    subject: Subject | None = None  # with probes: JAX's model, and the errors along its first run
    accumulated: curves.Errors = field(default_factory=dict)

    def checks(self, witness: Callable[[Inputs], Outcome] | None = None) -> list[Check]:
        """Every comparison in this dtype; details, points and notes go to the report."""
        self._draw_torch()
        self._draw_jax()
        self._note_flips()
        others = self._witness(witness) if witness else None
        noise = rounding(self.reference, self.dtype)

        def now() -> list[Check]:
            return self._judged(noise, others)

        while self.redraw and not _all_ok(now()) and len(self.torch_draws) < DRAWS["torch"]:
            self._draw_torch()
        while self.redraw and not _all_ok(now()) and len(self.jax_draws) < DRAWS["jax"]:
            self._draw_jax()
        out = now()
        if not _all_ok(out) and len(self.report.details) < failure_details.MOST:
            self._add_details(out)
        self.report.blind += hollow(out, self.dtype)
        if self.options.probes:
            self.report.points += self._local_points()
            out += parts(self.report, self.dtype)
        return out

    def _judged(
        self, noise: Errors, others: tuple[dict[Measure, float], float] | None
    ) -> list[Check]:
        out = budgeted(self.jax_draws, self.torch_draws, noise, self.dtype)
        if others is None:
            return out
        allowed, (witness, between) = out[0].budget, others
        out += budgeted([witness], self.torch_draws, noise, self.dtype, "transformers")
        label = "JAX against transformers"
        return [*out, Check("logits", self.dtype, between, allowed, label=label)]

    def _progress(self, step: str, draw: int = 0) -> None:
        give_back()
        again = f", roundings drawn anew ({draw})" if draw else ""
        self.options.progress(f"{self.dtype}: {step}{again}")

    def _draw_torch(self) -> None:
        draw, side = len(self.torch_draws), self.torch_side
        self._progress("torch", draw)
        order = Reordering(side.spec, draw)
        out = runs.run_torch(
            side.spec,
            order.apply(side.tensors),
            side.inputs,
            self.dtype,
            self.settings.torch(self.dtype),
        )
        self.torch_draws.append(errors(replace(out, grads=order.undo(out.grads)), self.reference))

    def _model(self, order: Reordering, remat: str = "none") -> Decoder:
        spec, tensors = self.jax_side
        options = self.options
        return runs.jax_model(
            spec, order.apply(tensors), self.dtype, options.layout, options.injected, remat
        )

    def _draw_jax(self) -> None:
        draw, layout = len(self.jax_draws), self.options.layout
        self._progress("JAX", draw)
        order = Reordering(self.torch_side.spec, draw)
        # Traces are large enough.
        model = self._model(order, "full" if self.options.probes else "none")
        if draw:
            out = runs.run_jax(model.spec, model, self.torch_side.inputs, layout)
            out = replace(out, grads=order.undo(out.grads))
            self.jax_draws.append(errors(out, self.reference))
            return
        self.settings.jax(self.dtype, model)
        if self.options.probes:
            self.subject = decoder(model, layout, self.torch_side.inputs)
            out = trace = self.subject.run(None)
            self.accumulated = curves.measure(trace, self._trace)
        else:
            out = runs.run_jax(model.spec, model, self.torch_side.inputs, layout)
        self.jax_draws.append(errors(out, self.reference))
        self.logits = out.logits

    @property
    def _trace(self) -> Trace:
        assert isinstance(self.reference, Trace)  # as it is with probes
        return self.reference

    def _note_flips(self) -> None:
        flips = metrics.flips(self.logits, self.reference.logits)
        if flips.count:
            tokens = f"{flips.count} of {flips.positions} top-1 tokens flip"
            note = f"{self.dtype}: {tokens}, the largest margin {flips.margin:.2g}"
            self.report.notes.append(note)

    def _witness(self, run: Callable[[Inputs], Outcome]) -> tuple[dict[Measure, float], float]:
        """transformers' errors from the float64 result, and JAX's logits from transformers'."""
        self.options.progress(f"{self.dtype}: transformers, the third witness")
        out = run(self.torch_side.inputs)
        self.settings.witness(self.dtype, run)
        between = metrics.relative_l2(self.logits, out.logits)
        return errors(out, self.reference), between

    def _add_details(self, checks: Sequence[Check]) -> None:
        self._progress("JAX, once more for the details")
        side = self.torch_side
        model = self._model(Reordering(side.spec, 0))
        out = runs.run_jax(model.spec, model, side.inputs, self.options.layout)
        found = failure_details.Runs(self.reference, out, None)
        axes_of = axes(side.spec, side.inputs)
        failure_details.add(self.report, checks, self.dtype, found, axes_of)

    def _local_points(self) -> list[Point]:
        """Every part alone, drawn anew while one is over its band."""
        side = self.torch_side
        rows = probes.rows(side.spec, "unroll", side.inputs.ids.shape)
        local: list[curves.Errors] = []
        noise: list[curves.Errors] = []
        while True:
            draw = len(noise)
            give_back()
            self.options.progress(
                f"{self.dtype}: every part alone" + (f" ({draw})" if draw else "")
            )
            order = Reordering(side.spec, draw, rows)
            moved = order.trace(self._trace)
            torch = replace(side, tensors=order.apply(side.tensors), dtype=self.dtype)
            noise.append(curves.measure(torch.run(moved), moved))
            del torch  # with the model that it made, and its gradients
            give_back()
            if draw:
                model = self._model(order, "full")
                self.subject = decoder(model, self.options.layout, side.inputs)
            assert self.subject is not None
            local.append(curves.local_errors(self.subject.run, moved))
            found = curves.points(self.accumulated, local, self._trace, self.dtype, noise)
            if all(p.ok for p in found) or not self.redraw or len(noise) == DRAWS["jax"]:
                return found


def _all_ok(checks: Sequence[Check]) -> bool:
    return all(check.ok for check in checks)


def hollow(checks: Sequence[Check], dtype: str) -> list[str]:
    """In words: the comparisons whose measured budget lets anything pass."""
    loose = [c.name for c in checks if c.kind != "kl" and c.budget >= HOLLOW]
    if not loose:
        return []
    more = f" and {len(loose) - 1} more" if loose[1:] else ""
    return [f"{loose[0]}{more} in {dtype}: torch's own rounding leaves nothing to compare"]


def axes(spec: Model, inputs: Inputs) -> failure_details.Axes:
    """The axes of every probe and parameter of a decoder, by torch's names."""
    found = probes.rows(spec, "unroll", inputs.ids.shape)
    return failure_details.axes([*found, *decoder_table.rows(spec, "unroll")])


def parts(report: Report, dtype: str) -> Iterator[Check]:
    """Of the parts alone, the one that uses most of its band, for each direction."""
    for direction in BANDS:
        points = [p for p in report.points if (p.dtype, p.direction) == (dtype, direction)]
        yield max(map(part, points), key=worst_first)


def part(point: Point) -> Check:
    """A part alone, against its band."""
    kind = f"part_{point.direction}"
    return Check(kind, point.dtype, point.local_error, point.band, point.probe)
