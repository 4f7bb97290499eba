"""What is wrong with a port of anybody's: each place that differs, and what makes torch agree.

A probe is computed by the stretch of code since the probe before it. Mistakes are tried in every
module that runs there, by what it is and not by its name; and on the value itself, by how the two
differ (relations.py, rotation.py, attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtwin.parity.any_model.diagnose import attention, relations, rotation
from jaxtwin.parity.any_model.diagnose.relations import Change, Unlike
from jaxtwin.parity.any_model.sides import JaxSide, TorchSide
from jaxtwin.parity.compare import curves
from jaxtwin.parity.compare.tolerances import BANDS
from jaxtwin.parity.diagnose.hypotheses import ANY, HYPOTHESES
from jaxtwin.parity.diagnose.search import Search, Trial
from jaxtwin.parity.report.results import Divergence
from jaxtwin.parity.sides import probes
from jaxtwin.parity.sides.hypothesis import Hypothesis, PlacedHypothesis
from jaxtwin.parity.sides.outcome import Trace
from jaxtwin.parity.sides.probes import INPUT
from jaxtwin.parity.table import bridge
from jaxtwin.parity.table.row import Row

# From the likeliest, and cheapest to look at.
FINDERS: tuple[Callable[[Unlike], Iterator[Change]], ...] = (
    relations.scaled,
    relations.permuted,
    relations.shifted,
    rotation.rotated,
    attention.mixed_otherwise,
    relations.summed_otherwise,
    relations.stream_otherwise,
)


@dataclass(frozen=True)
class PairOfRuns:
    """torch's run, and JAX's with every part fed torch's values.

    `bands`: what a part may be off, by direction and name, where those are not float64's.
    """

    reference: Trace
    patched: Trace
    bands: Mapping[str, Mapping[str, float]] | None = None


@dataclass(frozen=True)
class Found:
    """The divergences, the earliest first; what explains them; what could not be tried."""

    divergences: list[Divergence]
    placed: list[PlacedHypothesis]
    dropped: list[str]


def search(torch_side: TorchSide, jax_side: JaxSide, seen: PairOfRuns) -> Found:
    """Every divergence of a pair of models."""
    of = _PairSearch(torch_side, jax_side, seen)
    divergences = [divergence for divergence, _ in of.all()]
    return Found(divergences, of.placed, list(dict.fromkeys(of.dropped)))


class _PairSearch(Search):
    unknown_as_one = True

    def __init__(self, torch_side: TorchSide, jax_side: JaxSide, seen: PairOfRuns):
        super().__init__(torch_side, seen.reference, seen.patched)
        self.side, self.seen = torch_side, seen
        self.rows: dict[str, Row] = {row.src: row for row in jax_side.probes}

    def _over(self, direction: str, placed: Sequence[PlacedHypothesis]) -> dict[str, float]:
        if self.seen.bands is None:
            return super()._over(direction, placed)
        exact, _ = self._runs(placed)
        off = curves.errors(self.patched, exact, direction)
        over = {name: e / self.seen.bands[direction][name] for name, e in off.items()}
        return dict(reversed(over.items())) if direction == "backward" else over

    def _with(self, edit: PlacedHypothesis, direction: str, names: Sequence[str]) -> float:
        """How far these are over; and no mistake makes a part differ that agrees without it."""
        before = self._over(direction, self.placed)
        after = self._over(direction, [*self.placed, edit])
        worse = any(before[name] <= 1 and not after[name] <= 1 for name in after)
        return float("inf") if worse else float(np.max([after[name] for name in names]))

    def _first(self) -> tuple[str, list[str], float] | None:
        """The earliest; none going back after one going forward that nothing explains.

        Where the function is another, so are its gradients.
        """
        found = super()._first()
        unexplained = any(direction == "forward" for direction, _ in self.unknown)
        return None if found and found[0] != "forward" and unexplained else found

    def _trials(self, direction: str, names: Sequence[str]) -> Iterator[Trial]:
        if direction != "forward":
            return
        inside = self.side.inside(self.base, self.placed)
        stretch = self._stretch(list(inside), names[0])
        fit = [m for m in HYPOTHESES if ANY in m.parts and m.direction == direction]
        for hypothesis in fit:
            if not hypothesis.fits:
                yield from self._in_modules(hypothesis, stretch, names)
        yield from self._of_value(inside, names)
        # A value is searched in a hundred runs. Almost anything can be scaled, so that is the last.
        for hypothesis in sorted(fit, key=lambda m: m.name == "scaled"):
            if hypothesis.fits:
                yield from self._in_modules(hypothesis, stretch, names)

    def _in_modules(
        self, hypothesis: Hypothesis, stretch: Sequence[str], names: Sequence[str]
    ) -> Iterator[Trial]:
        for module in stretch:
            places = self._alike(module, names)
            if places:
                yield self._of_modules(hypothesis, places, names[0])

    def _of_value(self, inside: Mapping[str, object], names: Sequence[str]) -> Iterator[Trial]:
        """Mistakes that are read off the value."""
        name = names[0]
        exact, _ = self._runs(self.placed)
        band = self.seen.bands["forward"][name] if self.seen.bands else BANDS["forward"]
        unlike = Unlike(
            name,
            bridge.to_torch(self.patched.values[name]).double(),
            bridge.to_torch(exact.values[name]).double(),
            self.rows,
            inside,
            max(1e-9, 10 * band),
            self.modules,
        )
        for find in FINDERS:

            def placed(
                find: Callable[[Unlike], Iterator[Change]] = find,
            ) -> Iterator[PlacedHypothesis]:
                with self.side.widened():  # as it runs
                    edits = list(find(unlike))
                for edit in edits:
                    hypothesis = Hypothesis(edit.name, edit.about, edit.advice, (), "", _nothing)
                    yield PlacedHypothesis(hypothesis, tuple(names), None, edit.of_values)

            yield Trial(find.__name__, placed)

    def _stretch(self, inside: Sequence[str], name: str) -> list[str]:
        """The modules that run between the probe before this one and this one, and their parents.

        `inside`: every place in the order of computation.
        """
        if name not in inside:
            return []
        end = inside.index(name)
        start = max((i for i in range(end) if inside[i] in self.side.places), default=-1)
        ran = [place.removesuffix(INPUT) for place in inside[start + 1 : end + 1]]
        parents = [place.rpartition(".")[0] for place in ran]
        return [m for m in dict.fromkeys([*ran, *parents]) if m and m in self.modules]

    def _alike(self, module: str, names: Sequence[str]) -> tuple[str, ...]:
        """That module of each probe's layer; () where one has none such."""
        at, first = probes.layer(module), probes.layer(names[0])
        if at is None or first is None:
            return (module,) if len(names) == 1 else ()
        numbers = [at + (probes.layer(name) or 0) - first for name in names]
        found = tuple(probes.in_layer(probes.part(module), number) for number in numbers)
        return found if all(name in self.modules for name in found) else ()

    def _alone(self, hypothesis: Hypothesis, module: str, name: str) -> Callable[[float], float]:
        want = self.patched.values[name]
        places = (module,)

        def off(value: float) -> float:
            placed = [*self.placed, PlacedHypothesis(hypothesis, places, value)]
            return curves.error(want, self.reference.run(self.base, placed).values[name])

        return off


def _nothing(module: object, value: object) -> None:
    """The mistake is of a value, and no module is edited."""
