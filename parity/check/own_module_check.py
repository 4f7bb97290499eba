"""JAX against a person's own torch module: logits, losses, every gradient, and what the spec gets
wrong where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.parity.check.decoder_check import strict
from jaxtwin.parity.compare.budgets import DRAWS, Errors, budgeted, errors, rounding
from jaxtwin.parity.compare.options import CheckOptions
from jaxtwin.parity.diagnose import spec_search
from jaxtwin.parity.report.results import Check, Report
from jaxtwin.parity.sides import runs
from jaxtwin.parity.sides.inputs import Inputs
from jaxtwin.parity.sides.outcome import Outcome
from jaxtwin.parity.sides.own_module import OwnModule
from jaxtwin.parity.sides.reordering import Reordering
from jaxtwin.parity.table.tensors import Tensors

SHORT = 24  # tokens that a spec is looked for with


def add(
    report: Report, module: OwnModule, tensors: Tensors, inputs: Inputs, options: CheckOptions
) -> None:
    """Adds the comparisons to the report, and a preflight difference for what explains them."""
    _OwnModuleCheck(report, module, tensors, plain(inputs), options).run()


def plain(inputs: Inputs) -> Inputs:
    """The same ids as rows of one text each: all that somebody's forward is known to take."""
    ids = inputs.ids
    return Inputs(ids, np.tile(np.arange(ids.shape[1]), (len(ids), 1)), np.ones_like(ids))


@dataclass
class _OwnModuleCheck:
    report: Report
    module: OwnModule
    tensors: Tensors
    inputs: Inputs
    options: CheckOptions

    @property
    def spec(self) -> Model:
        return self.module.spec

    def run(self) -> None:
        import jax

        progress, name = self.options.progress, self.module.name
        with runs.grads_on(), jax.enable_x64(True), jax.default_matmul_precision("highest"):
            progress(f"float64: {name}")
            # What a bias's gradient is a sum of is read off the mirror: the module is not ours.
            mirror = runs.run_torch(self.spec, self.tensors, self.inputs, "float64")
            theirs = self.module.run(self.tensors, self.inputs, "float64")
            reference = Outcome(theirs.logits, theirs.nll, theirs.grads, terms=mirror.terms)
            if "float64" in self.options.dtypes:
                self._float64(reference)
        with runs.grads_on(), jax.enable_x64(False), jax.default_matmul_precision("highest"):
            for dtype in [d for d in self.options.dtypes if d != "float64"]:
                self.report.checks += self._working(dtype, reference)

    def _float64(self, reference: Outcome) -> None:
        if narrow := self.module.narrow:
            raise BadInput(
                f"{self.module.name} computes in less than float64 inside ({narrow[0]}), and is "
                "not compared so. If it was there before, name a class or a function that makes "
                "the whole module anew at each call; else compare the rest with --dtype float32"
            )
        found = list(strict(self._jax("float64", 0), reference, self.module.name))
        self.report.checks += found
        if self.options.diagnose and not all(check.ok for check in found):
            self._explain()

    def _explain(self) -> None:
        """Adds what the spec or the names would have to say for it to be that module."""
        ids = self.inputs.ids[:1, :SHORT]
        want = self.module.logits(self.tensors, ids)
        self.report.preflight += spec_search.search(
            self.spec, self.tensors, ids, want, self.module.name, self.options.progress
        )

    def _jax(self, dtype: str, draw: int) -> Outcome:
        order = Reordering(self.spec, draw)
        options = self.options
        model = runs.jax_model(
            self.spec, order.apply(self.tensors), dtype, options.layout, options.injected
        )
        out = runs.run_jax(model.spec, model, self.inputs, options.layout)
        return Outcome(out.logits, out.nll, order.undo(out.grads))

    def _torch(self, dtype: str, draw: int) -> Outcome:
        order = Reordering(self.spec, draw)
        out = self.module.run(order.apply(self.tensors), self.inputs, dtype)
        return Outcome(out.logits, out.nll, order.undo(out.grads))

    def _working(self, dtype: str, reference: Outcome) -> Sequence[Check]:
        """As budgets.py judges: the module's own error sets the budget."""
        noise = rounding(reference, dtype)
        torch_draws: list[Errors] = []
        jax_draws: list[Errors] = []

        def draw(draws: list[Errors], side: str) -> list[Check]:
            self.options.progress(f"{dtype}: {side}" + (f" ({len(draws)})" if draws else ""))
            run = self._jax if draws is jax_draws else self._torch
            draws.append(errors(run(dtype, len(draws)), reference))
            if not (torch_draws and jax_draws):
                return []
            return budgeted(jax_draws, torch_draws, noise, dtype, self.module.name)

        draw(torch_draws, self.module.name)
        checks = draw(jax_draws, "JAX")
        redraw = self.report.equal  # float64 has shown that the function is the same
        for draws, side, most in (
            (torch_draws, self.module.name, DRAWS["torch"]),
            (jax_draws, "JAX", DRAWS["jax"]),
        ):
            while redraw and not all(c.ok for c in checks) and len(draws) < most:
                checks = draw(draws, side)
        return checks
