"""A decoder in a working dtype: every comparison, the third witness, and every part alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.memory import give_back
from jaxtwin.parity.compare import budgets, curves, decoder_settings, failure_details
from jaxtwin.parity.compare.draws import DRAWS, Draws, Exact
from jaxtwin.parity.compare.options import CheckOptions
from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.results import Check, Point, Report
from jaxtwin.parity.sides import probes, runs
from jaxtwin.parity.sides.inputs import Inputs
from jaxtwin.parity.sides.outcome import Outcome, Trace
from jaxtwin.parity.sides.reordering import redraw
from jaxtwin.parity.sides.runs import Reference, Subject, decoder
from jaxtwin.parity.table.tensors import Tensors

if TYPE_CHECKING:
    from jaxtwin.jaxmodel import Decoder

Change = Callable[[Tensors], Tensors]


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


@dataclass
class WorkingDtype:
    """JAX (and the witness) in a working dtype, against the budget that torch's own error sets.

    While something is over its budget and `redraw` is true (float64 has shown that the function is
    the same, or was left out), roundings are drawn anew (draws.py).
    """

    torch_side: Reference
    jax_side: tuple[Model, Tensors]
    exact: Exact  # torch in float64; a Trace where the options ask for probes
    dtype: str
    report: Report
    settings: decoder_settings.Sides
    options: CheckOptions
    redraw: bool
    sparing: bool
    draws: Draws = field(init=False)
    logits: np.ndarray | None = None  # of JAX's first draw
    subject: Subject | None = None  # with probes: JAX's model, and the errors along its first run
    accumulated: curves.Errors = field(default_factory=dict)

    def __post_init__(self) -> None:
        side = self.torch_side
        self.draws = Draws(
            side.spec,
            self.dtype,
            self.exact,
            self.sparing,
            lambda change: runs.run_torch(side.spec, change(side.tensors), side.inputs, "float64"),
            self._torch,
            self._jax,
            side.inputs.counted,
            self.options.progress,
        )

    def checks(self, witness: Callable[[Inputs], Outcome] | None = None) -> list[Check]:
        """Every comparison in this dtype; details, points and notes go to the report."""
        draws = self.draws
        draws.first()
        self._note_flips()
        others = list(self._witness(witness)) if witness else []
        self.logits = None

        def now() -> list[Check]:
            return [*draws.checks(), *(check for judged in others for check in judged())]

        if self.redraw:
            draws.until_ok(now)
        out = now()
        if not all(c.ok for c in out) and len(self.report.details) < failure_details.MOST:
            self._add_details(out)
        self.report.blind += [draws.overflows] * bool(draws.overflows)
        self.report.blind += budgets.hollow(out, self.dtype)
        if self.options.probes:
            self.report.points += self._local_points()
            out += budgets.parts(self.report, self.dtype)
        return out

    def _torch(self, change: Change) -> Outcome:
        side, read = self.torch_side, self.settings.torch(self.dtype)
        return runs.run_torch(side.spec, change(side.tensors), side.inputs, self.dtype, read)

    def _model(self, change: Change, remat: str = "none") -> Decoder:
        spec, tensors = self.jax_side
        options = self.options
        return runs.jax_model(
            spec, change(tensors), self.dtype, options.layout, options.injected, remat
        )

    def _jax(self, change: Change) -> Outcome:
        layout, inputs = self.options.layout, self.torch_side.inputs
        first = not self.draws.jax_errors
        # Traces are large enough.
        model = self._model(change, "full" if self.options.probes and first else "none")
        if not first:
            return runs.run_jax(model.spec, model, inputs, layout, last=True)
        self.settings.jax(self.dtype, model)
        if self.options.probes:
            self.subject = decoder(model, layout, inputs)
            out: Outcome = self.subject.run(None)
            assert isinstance(out, Trace)
            self.accumulated = curves.measure(out, self._trace)
        else:
            out = runs.run_jax(model.spec, model, inputs, layout, last=True)
        self.logits = out.logits
        return out

    @property
    def _trace(self) -> Trace:
        trace = self.exact()
        assert isinstance(trace, Trace)  # as it is with probes
        return trace

    def _note_flips(self) -> None:
        assert self.logits is not None
        flips = metrics.flips(self.logits, self.exact().logits)
        if flips.count:
            tokens = f"{flips.count} of {flips.positions} top-1 tokens flip"
            note = f"{self.dtype}: {tokens}, the largest margin {flips.margin:.2g}"
            self.report.notes.append(note)

    def _witness(self, run: Callable[[Inputs], Outcome]) -> Iterator[Callable[[], Sequence[Check]]]:
        """transformers from the float64 result, and JAX's logits from transformers', as judged."""
        self.options.progress(f"{self.dtype}: transformers, the third witness")
        out = run(self.torch_side.inputs)
        self.settings.witness(self.dtype, run)
        assert self.logits is not None
        between = metrics.relative_l2(self.logits, out.logits)
        errors = self.draws.errors(out)
        yield lambda: self.draws.judged([errors], "transformers")
        label = "JAX against transformers"
        yield lambda: [
            replace(check, error=between, label=label)
            for check in self.draws.checks()
            if check.kind == "logits"
        ]

    def _add_details(self, checks: Sequence[Check]) -> None:
        self.options.progress(f"{self.dtype}: JAX, once more for the details")
        side = self.torch_side
        model = self._model(unchanged)
        out = runs.run_jax(model.spec, model, side.inputs, self.options.layout, last=True)
        found = failure_details.Runs(self.exact(), out, None)
        axes_of = budgets.axes(side.spec, side.inputs)
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
            again = f" ({draw})" if draw else ""
            self.options.progress(f"{self.dtype}: every part alone{again}")
            order = redraw(side.spec, self.dtype, draw, rows)
            moved = replace(side, tensors=order.apply(side.tensors))
            exact = order.trace(self._trace) if order.same_function else moved.run()
            torch = replace(moved, dtype=self.dtype)
            noise.append(curves.measure(torch.run(exact), exact))
            del moved, torch  # with the models that they made, and their gradients
            give_back()
            if draw:
                model = self._model(order.apply, "full")
                self.subject = decoder(model, self.options.layout, side.inputs)
            assert self.subject is not None
            local.append(curves.local_errors(self.subject.run, exact))
            found = curves.points(self.accumulated, local, self._trace, self.dtype, noise)
            if all(p.ok for p in found) or not self.redraw or len(noise) == DRAWS["jax"]:
                return found
