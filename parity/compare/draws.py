"""Both sides in a working dtype, their roundings drawn anew while a comparison is over its budget.

Where torch's own first run overflows, nothing can be compared; the rest is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.memory import give_back
from jaxtwin.parity.compare import budgets
from jaxtwin.parity.compare.budgets import Errors, Tokens
from jaxtwin.parity.report.results import Check
from jaxtwin.parity.sides.outcome import Outcome
from jaxtwin.parity.sides.reordering import Neighbours, Reordering, redraw
from jaxtwin.parity.table.tensors import Tensors

DRAWS = {"torch": 8, "jax": 3}  # at most, and only while a comparison is over its budget


class Exact:
    """torch's run in float64, made again where it was let go of to save memory."""

    def __init__(self, make: Callable[[], Outcome]):
        self.make = make
        self.outcome: Outcome | None = None

    def __call__(self) -> Outcome:
        if self.outcome is None:
            self.outcome = self.make()
        return self.outcome

    def let_go(self) -> None:
        """It is as large as the model's gradients and logits."""
        self.outcome = None
        give_back()


Run = Callable[[Callable[[Tensors], Tensors]], Outcome]  # of a side whose tensors are changed so


@dataclass
class Draws:
    """The errors of both sides in one dtype, draw by draw.

    torch's largest error sets the budget, and JAX's smallest is held to it: a fault is in every
    draw, bad luck is not. `exact`, `torch` and `jax` run torch in float64, torch and JAX in the
    dtype. No draw of JAX's changes a budget.
    """

    spec: Model
    dtype: str
    reference: Exact  # of the tensors as they are
    sparing: bool  # lets it go while another is there
    exact: Run
    torch: Run
    jax: Run
    counted: np.ndarray  # (b t-1): of Inputs
    progress: Callable[[str], None]
    names: tuple[str, str] = ("torch", "JAX")
    label: str = ""
    torch_errors: list[Errors] = field(default_factory=list)
    jax_errors: list[Errors] = field(default_factory=list)
    tokens: Tokens | None = None  # those that torch's first run has numbers for; None: all
    overflows: str = ""  # what torch's own run has no numbers for, in words

    def first(self) -> None:
        """One draw of each side, as they are."""
        order = redraw(self.spec, self.dtype, 0)
        self._draw_jax(order, self._draw(order))
        self.noise = self._noise()

    def until_ok(self, judged: Callable[[], Sequence[Check]]) -> None:
        """More draws while something is over its budget and there are any left."""
        while len(self.torch_errors) < DRAWS["torch"] and not all(c.ok for c in judged()):
            order = redraw(self.spec, self.dtype, len(self.torch_errors))
            reference = self._draw(order)
            if len(self.jax_errors) < DRAWS["jax"] and not all(c.ok for c in judged()):
                self._draw_jax(order, reference)
            del reference  # before the next is made

    def checks(self) -> list[Check]:
        """JAX's errors against the budgets so far."""
        return self.judged(self.jax_errors)

    def judged(self, errors: Sequence[Errors], label: str = "") -> list[Check]:
        """Somebody's errors against the budgets so far."""
        label = label or self.label
        return budgets.budgeted(errors, self.torch_errors, self.noise, self.dtype, label)

    def errors(self, run: Outcome) -> Errors:
        """How far a run on the tensors as they are is off the float64 result."""
        return budgets.errors(run, self.reference(), self.tokens)

    def _draw(self, order: Reordering | Neighbours) -> Outcome:
        """torch's next draw; what it is measured from."""
        if order.same_function:
            reference = self.reference()
        else:
            if self.sparing:
                self.reference.let_go()
            self._tell("float64", order.seed)
            reference = self.exact(order.apply)
        self._tell(self.names[0], order.seed)
        run = self.torch(order.apply)
        if not order.seed:
            self.tokens = budgets.finite_tokens(run.logits, reference.logits, self.counted)
        found = budgets.errors(replace(run, grads=order.undo(run.grads)), reference, self.tokens)
        if order.seed:  # one that overflows allows nothing
            found = {measure: e if np.isfinite(e) else 0.0 for measure, e in found.items()}
        self.torch_errors.append(found)
        return reference

    def _draw_jax(self, order: Reordering | Neighbours, reference: Outcome) -> None:
        self._tell(self.names[1], order.seed)
        run = self.jax(order.apply)
        run = replace(run, grads=order.undo(run.grads))
        self.jax_errors.append(budgets.errors(run, reference, self.tokens))

    def _tell(self, side: str, draw: int) -> None:
        give_back()
        again = f", roundings drawn anew ({draw})" if draw else ""
        self.progress(f"{self.dtype}: {side}{again}")

    def _noise(self) -> Errors:
        """What rounding costs, without the measures that torch's first run has no number for."""
        reference = self.reference()
        noise = budgets.rounding(reference, self.dtype, self.tokens)
        first = self.torch_errors[0]
        lost = {m for m, e in noise.items() if np.isfinite(e) and not np.isfinite(first[m])}
        tokens, gradients = reference.logits[..., 0].size, len(reference.grads)
        kept = tokens if self.tokens is None else int(self.tokens.of_logits.sum())
        counts = {
            f"of {tokens} tokens": tokens if ("logits", "") in lost else tokens - kept,
            f"of {gradients} gradients": sum(kind == "gradient" for kind, _ in lost),
        }
        if parts := " and ".join(f"{count} {what}" for what, count in counts.items() if count):
            side = self.names[0]
            self.overflows = f"{parts} in {self.dtype}: {side}'s own run overflows there"
        return {measure: e for measure, e in noise.items() if measure not in lost}
