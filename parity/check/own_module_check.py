"""JAX against a person's own torch module: logits, losses, every gradient, and what the spec gets
wrong where they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.parity.check.decoder_check import strict
from jaxtwin.parity.compare.draws import Draws, Exact
from jaxtwin.parity.compare.options import CheckOptions
from jaxtwin.parity.compare.working_dtype import unchanged
from jaxtwin.parity.diagnose import spec_search
from jaxtwin.parity.report.results import Check, Report
from jaxtwin.parity.sides import runs
from jaxtwin.parity.sides.inputs import Inputs
from jaxtwin.parity.sides.outcome import Outcome
from jaxtwin.parity.sides.own_module import OwnModule
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
        found = list(strict(self._jax("float64"), reference, self.module.name))
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

    def _jax(self, dtype: str, change: Callable[[Tensors], Tensors] = unchanged) -> Outcome:
        options = self.options
        model = runs.jax_model(
            self.spec, change(self.tensors), dtype, options.layout, options.injected
        )
        return runs.run_jax(model.spec, model, self.inputs, options.layout)

    def _working(self, dtype: str, reference: Outcome) -> Sequence[Check]:
        """As budgets.py judges: the module's own error sets the budget."""

        def torch(change: Callable[[Tensors], Tensors], dtype: str = dtype) -> Outcome:
            return self.module.run(change(self.tensors), self.inputs, dtype)

        draws = Draws(
            self.spec,
            dtype,
            Exact(lambda: reference),
            False,
            lambda change: replace(torch(change, "float64"), terms=reference.terms),
            torch,
            lambda change: self._jax(dtype, change),
            self.inputs.counted,
            self.options.progress,
            (self.module.name, "JAX"),
            self.module.name,
        )
        draws.first()
        if all(check.ok for check in self.report.checks if check.dtype == "float64"):
            draws.until_ok(draws.checks)
        self.report.blind += [draws.overflows] * bool(draws.overflows)
        return draws.checks()
