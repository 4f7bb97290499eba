"""Where do the two sides part, and what mistake is it?

Every part of the JAX side is fed the reference's own input (and, going back, the reference's own
cotangent), so a part that gives something else is itself at fault, however many are. The earliest
is taken first; mistakes are tried on the reference in its place. One that makes the reference agree
there is kept, and the search goes on with it made, so a second fault stands out by itself.
What is found is proven at the end: the reference that makes all these mistakes must agree with the
JAX side from end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxtwin.parity.compare import curves
from jaxtwin.parity.compare.tolerances import BANDS, FORWARD, LOSS
from jaxtwin.parity.diagnose import spec_and_weights, torch_cache
from jaxtwin.parity.diagnose.hypotheses import ANY, HYPOTHESES
from jaxtwin.parity.report.results import Cause, Difference, Divergence, Point
from jaxtwin.parity.sides import probes
from jaxtwin.parity.sides.hypothesis import Hypothesis, PlacedHypothesis, committing
from jaxtwin.parity.sides.outcome import Trace
from jaxtwin.parity.sides.probes import Place
from jaxtwin.parity.sides.runs import Reference, Subject
from jaxtwin.parity.table import bridge

MOST = 12  # divergences in one diagnosis; more is another model


@dataclass
class Diagnosis:
    """What was found, the earliest first. Errors are in units of what float64 allows."""

    preflight: list[Difference] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    heat: list[list[float]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # hypotheses that could not be tried
    error: float = 0.0  # end to end
    left: float = 0.0  # and when the reference makes the same mistakes

    @property
    def equal(self) -> bool:
        return not self.preflight and not self.divergences and self.error <= 1


OnTraces = Callable[[Diagnosis, Trace, Trace, Trace], None]  # reference, end to end, patched


def diagnose(reference: Reference, subject: Subject, seen: OnTraces | None = None) -> Diagnosis:
    """Looks for what is wrong with the subject. Both are in float64.

    `seen` is shown the runs at the end: they are too large to be kept.
    """
    reference_run, end_to_end = reference.run(), subject.run(None)
    patched = subject.run(reference_run)
    found = _found(reference, subject, reference_run, end_to_end, patched)
    if seen is not None:
        seen(found, reference_run, end_to_end, patched)
    return found


def _found(
    reference: Reference, subject: Subject, reference_run: Trace, end_to_end: Trace, patched: Trace
) -> Diagnosis:
    found = Diagnosis()
    found.error = found.left = curves.final(end_to_end, reference_run)
    accumulated, parts = (
        curves.measure(end_to_end, reference_run),
        curves.measure(patched, reference_run),
    )
    found.points = curves.points(accumulated, [parts], reference_run, "float64")
    found.heat = curves.heat(end_to_end, reference_run, len(reference.spec.layers))
    base, found.preflight, causes = spec_and_weights.causes(reference, subject)
    if base is None:  # not even the shapes are the same: nothing to feed
        return found
    search = Search(base, reference_run if base is reference else base.run(), patched)
    if base is not reference:
        search.patched = subject.run(search.base)
    divergences = list(search.all())
    found.dropped = search.dropped
    if not causes and not divergences and found.error <= 1:
        found.divergences += _cache(reference, subject, reference_run)
        return found
    if causes or search.placed:
        found.left = _left(end_to_end, base, search.placed)
    tried: list[tuple[Divergence, Reference, list[PlacedHypothesis]]] = [
        (c.divergence, c.reference, []) for c in causes
    ]
    tried += [(divergence, reference, [edit] if edit else []) for divergence, edit in divergences]
    for divergence, isolated, placed in tried:
        if divergence.cause is not None and found.error != 0:  # it may be NaN
            left = found.left if len(tried) == 1 else _left(end_to_end, isolated, placed)
            share = (
                1.0 if left <= 1 else float(np.nan_to_num(np.clip(1 - left / found.error, 0, 1)))
            )
            cause = replace(divergence.cause, explains=share, proven=found.left <= 1)
            divergence = replace(divergence, cause=cause)
        found.divergences.append(divergence)
    return found


def _cache(reference: Reference, subject: Subject, reference_run: Trace) -> Iterator[Divergence]:
    """The cached path, where the rest agrees: a prefill, then three tokens one by one."""
    ids = reference.inputs.ids[:1]
    prefill = ids.shape[1] - 3
    if subject.decode is None or prefill < 2:
        return
    got = subject.decode(ids, prefill)
    off = curves.error(got, reference_run.logits[:1, -1]) / FORWARD
    if off <= 1:
        return
    for name, slip in torch_cache.CACHE_HYPOTHESES.items():
        left = curves.error(got, torch_cache.decode(reference.model, ids, prefill, slip))
        if left <= FORWARD:
            cause = Cause(name, slip.about, slip.advice, "cache", (), 1.0, True)
            yield Divergence("cache", (), "forward", off, cause)
            return
    yield Divergence("cache", (), "forward", off, None)


def _left(end_to_end: Trace, reference: Reference, placed: Sequence[PlacedHypothesis]) -> float:
    """The final error against the reference that makes these mistakes."""
    exact = reference.run(placed=[e for e in placed if not e.hypothesis.rounds])
    if not _dtype(placed):
        return curves.final(end_to_end, exact)
    return curves.final(end_to_end, exact, reference.run(placed=placed), _dtype(placed))


def _dtype(placed: Sequence[PlacedHypothesis]) -> str:
    """The narrowest dtype that a mistake among these loses digits to; "" where none does."""
    lost = {e.hypothesis.rounds for e in placed}
    return next((dtype for dtype in ("bfloat16", "float16", "float32") if dtype in lost), "")


class Trial(NamedTuple):
    """A hypothesis at a place, with each value that it may have there."""

    name: str
    placed: Callable[[], Iterable[PlacedHypothesis]]


class Runs(Protocol):
    """A reference that can be seen from inside and made to commit mistakes."""

    @property
    def model(self) -> Any: ...

    @property
    def places(self) -> Mapping[str, Place]: ...

    def run(
        self, patched: Trace | None = None, placed: Sequence[PlacedHypothesis] = ()
    ) -> Trace: ...


class Search:
    """Functions that differ, one after another, between a patched run and the reference's own."""

    unknown_as_one = False  # whether an unknown mistake of the same part in several layers is one

    def __init__(self, reference: Runs, base: Trace, patched: Trace):
        self.reference, self.base, self.patched = reference, base, patched
        self.modules = dict(reference.model.named_modules())
        self.placed: list[PlacedHypothesis] = []
        self.unknown: set[tuple[str, str]] = set()
        self.dropped: list[str] = []  # hypotheses that could not be tried, and why

    def all(self) -> Iterator[tuple[Divergence, PlacedHypothesis | None]]:
        """Every divergence, the earliest first; `placed` grows by what explains them."""
        for _ in range(MOST):
            group = self._first()
            if group is None:
                return
            direction, names, worst = group
            part = probes.part(names[0])
            edit, cause = self._explained(direction, names), None
            if edit is None and len(names) > 1:  # not the same in all these layers: the first
                edit = self._explained(direction, names[:1])
                names = names if edit is None and self.unknown_as_one else names[:1]
            layers = tuple(i for name in names if (i := probes.layer(name)) is not None)
            if edit is None:
                self.unknown |= {(direction, name) for name in names}
            else:
                self.placed.append(edit)
                about, advice = (
                    edit.worded(s) for s in (edit.hypothesis.about, edit.hypothesis.advice)
                )
                cause = Cause(edit.hypothesis.name, about, advice, part, layers, 0.0, False)
            yield Divergence(part, layers, direction, worst, cause), edit

    def _over(self, direction: str, placed: Sequence[PlacedHypothesis]) -> dict[str, float]:
        """Errors in units of what is allowed, in the order of computation of that direction."""
        exact, lost = self._runs(placed)
        off = curves.errors(self.patched, exact, direction)
        allowed = curves.lossy(exact, lost, direction, _dtype(placed), pooled=True)
        over = {name: e / allowed[name] for name, e in off.items()}
        return dict(reversed(over.items())) if direction == "backward" else over

    def _runs(self, placed: Sequence[PlacedHypothesis]) -> tuple[Trace, Trace]:
        """The reference fed with its own values: with these mistakes, but for lost digits; and all.

        What a part that loses digits may be off is then known from how many the reference loses.
        """
        sharp = [e for e in placed if not e.hypothesis.rounds]
        exact = self.reference.run(self.base, sharp) if sharp else self.base
        lossy = len(sharp) < len(placed)
        return exact, self.reference.run(self.base, placed) if lossy else exact

    def _first(self) -> tuple[str, list[str], float] | None:
        """The earliest divergence, with the same part of other layers beside it."""
        for direction in BANDS:
            over = {
                name: e
                for name, e in self._over(direction, self.placed).items()
                if not e <= 1 and (direction, name) not in self.unknown
            }
            if over:
                part = probes.part(next(iter(over)))
                names = [name for name in over if probes.part(name) == part]
                worst = float(np.max([over[name] for name in names]))
                return direction, sorted(names, key=lambda n: probes.layer(n) or 0), worst
        return None

    def _explained(self, direction: str, names: Sequence[str]) -> PlacedHypothesis | None:
        """The mistake that makes the reference agree in these parts."""
        for trial in self._trials(direction, names):
            try:
                for placed in trial.placed():
                    if self._with(placed, direction, names) <= 1:
                        return placed
            except Exception as error:  # in somebody's code, or of a part that is not as supposed
                told = f"{type(error).__name__}: {error}".splitlines()[0]
                self.dropped.append(f"{trial.name!r} was not tried at {names[0]} ({told})")
        return None

    def _trials(self, direction: str, names: Sequence[str]) -> Iterator[Trial]:
        """What is made in the modules that these probes are of; fixed ones are tried first."""
        at = self.reference.places[names[0]] if direction == "forward" else None
        # The module that gives the probed value may have a name of its own.
        named = "" if at is None or at.is_input else probes.part(at.module)
        part = probes.part(names[0])
        fit = [m for m in HYPOTHESES if {part, named, ANY} & set(m.parts)]
        fit = [m for m in fit if m.direction == direction]
        for hypothesis in sorted(fit, key=lambda m: (m.fits, m.rounds)):
            edited = part if {part, ANY} & set(hypothesis.parts) else named
            modules = tuple(_module(name, hypothesis.module.format(part=edited)) for name in names)
            if any(module not in self.modules for module in modules):
                continue  # a layer of another wiring has no such part
            lone = ANY in hypothesis.parts and part not in hypothesis.parts
            if lone and (at is None or at.is_input or at.module != modules[0]):
                continue  # the probe is not of what this module returns
            yield self._of_modules(hypothesis, modules, names[0])

    def _of_modules(self, hypothesis: Hypothesis, modules: tuple[str, ...], name: str) -> Trial:
        def placed() -> Iterator[PlacedHypothesis]:
            values = list(hypothesis.values(self.modules[modules[0]]))
            if hypothesis.fits and values:
                values = [fitted(self._alone(hypothesis, modules[0], name), values)]
            for value in values:
                yield PlacedHypothesis(hypothesis, modules, value)

        return Trial(hypothesis.name, placed)

    def _alone(self, hypothesis: Hypothesis, module: str, name: str) -> Callable[[float], float]:
        """The error of one probe by the mistake's value, with nothing run but the module it is in.

        A value is searched in a hundred steps, and the whole model would be run for each.
        """
        import torch

        at, model = self.reference.places[name], self.reference.model
        want = self.patched.values[name]
        if not f"{at.module}.".startswith(f"{module}."):  # it is not what gives the probed value

            def of_model(value: float) -> float:
                placed = [*self.placed, PlacedHypothesis(hypothesis, (module,), value)]
                return curves.error(want, self.reference.run(self.base, placed).values[name])

            return of_model
        caught: list[Any] = []
        hook = self.modules[module].register_forward_pre_hook(lambda m, args: caught.append(args))
        try:
            self.reference.run(self.base, self.placed)
        finally:
            hook.remove()
        dst = replace(at, call=0) if at.module == module and at.call else at

        def off(value: float) -> float:
            placed = [*self.placed, PlacedHypothesis(hypothesis, (module,), value)]
            patched = probes.Hooks(model, {name: dst}, self.base)
            with torch.no_grad(), committing(model, placed), patched as hooks:
                self.modules[module](*caught[at.call if dst is not at else 0])
            return curves.error(want, bridge.to_numpy(hooks.values[name]))

        return off

    def _with(self, edit: PlacedHypothesis, direction: str, names: Sequence[str]) -> float:
        """How far these parts are over with one more mistake made."""
        placed = [*self.placed, edit]
        over = self._over(direction, placed)
        worst = float(np.max([over[name] for name in names]))
        if (
            edit.hypothesis.rounds
            and worst <= 1
            and not self._loses_as_much(placed, direction, names)
        ):
            return float("inf")
        return worst

    def _loses_as_much(
        self, placed: Sequence[PlacedHypothesis], direction: str, names: Sequence[str]
    ) -> bool:
        """Whether the last hypothesis, which only costs digits, costs about what these parts lost.

        What is allowed where another one loses more digits explains nothing here: an eps that is
        wrong would pass for a norm in float32 beside a softmax in bfloat16.
        """
        exact, lost = self._runs(placed)
        off = curves.errors(self.patched, exact, direction)
        loss = curves.errors(lost, exact, direction)
        dtype, most = placed[-1].hypothesis.rounds, max(loss[name] for name in names)
        for name in names:
            allowed = BANDS[direction] + LOSS * most
            allowed += curves.rounding(exact, direction, name, dtype)
            if loss[name] > LOSS * off[name] or off[name] > allowed:
                return False
        return True


def _module(name: str, inner: str) -> str:
    return probes.in_layer(inner, probes.layer(name)).rstrip(".")


def fitted(off: Callable[[float], float], values: Sequence[float]) -> float:
    """The value between those tried at which `off` is least, to the last digits.

    The error falls to zero in one point, like a valley with straight sides, so it is narrowed down
    by golden sections; a round number near it is preferred where it does as well.
    """
    from scipy.optimize import golden

    tried = [off(value) for value in values]
    if np.isnan(tried).all():
        return values[0]
    i = int(np.nanargmin(tried))
    if not 0 < i < len(values) - 1:
        return values[i]
    with np.errstate(all="ignore"):
        found = float(golden(off, brack=tuple(values[i - 1 : i + 2]), tol=1e-15, maxiter=200))
    near = [float(f"{found:.{digits}g}") for digits in (3, 4, 5, 6, 8, 10, 12)]
    return min([values[i], *near, found], key=off)
