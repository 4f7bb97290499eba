"""A crowd of right models, no two of them alike: none may be called wrong, in any dtype.

    python -m jaxtwin.tests.helpers.crowd 0 200        (of model 0 up to 200; --help says more)

A third are of every family as its own initialization draws them, a third random specs with lively
weights, and a third of every family drawn like trained ones: outliers, large norms, dead units.
The worst share of a budget is printed: a crowd at 99% is an alarm to come.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.presets import PRESETS
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.report.results import Report, worst_first
from jaxtwin.parity.selftest import tiny_models
from jaxtwin.parity.table.tensors import Tensor, Tensors

DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Member:
    """One model of the crowd."""

    name: str
    spec: Model
    tensors: Tensors


def member(number: int) -> Member:
    """The model of that number: its kind goes round by three."""
    kind, of_kind = number % 3, number // 3
    if kind == 1:
        spec = tiny_models.arbitrary(of_kind)
        return Member(f"random spec {of_kind}, lively", spec, tiny_models.weights(spec, of_kind))
    # The tiny twin of each preset: those of one family differ in little else than their sizes.
    preset = sorted(PRESETS)[of_kind % len(PRESETS)]
    source = open_source(f"tiny:{preset}", seed=number)
    if kind == 0:
        return Member(f"{preset}, as it is initialized", source.spec, source.tensors)
    return Member(f"{preset}, as if trained", source.spec, trained(source.tensors, number))


def trained(tensors: Tensors, seed: int) -> Tensors:
    """Outliers in the matrices, a few large scales and biases, units that do nothing."""
    rng = np.random.default_rng((seed, 12))

    def drawn(x: np.ndarray) -> np.ndarray:
        x = np.array(x, np.float64)
        if x.ndim == 1:  # a scale or a bias
            few = rng.random(x.shape) < 0.1
            return np.where(few, x * rng.uniform(2, 12, x.shape) + 0.1, x) + rng.normal(
                0, 0.02, x.shape
            )
        x *= np.where(rng.random(x.shape) < 0.01, rng.uniform(5, 20, x.shape), 1)
        x *= rng.lognormal(0, 0.4, (x.shape[0], *(1 for _ in x.shape[1:])))
        return x * (rng.random((x.shape[0], *(1 for _ in x.shape[1:]))) > 0.05)

    return {name: Tensor.of(drawn(t.read())) for name, t in tensors.items()}


def checked(number: int, **how: Any) -> tuple[Member, Report]:
    one = member(number)
    how = {"dtypes": DTYPES, "tokens": 24, "seed": number, "diagnose": False, **how}
    return one, decoder_check.check(one.spec, one.tensors, **how)


def told(one: Member, report: Report) -> str:
    """One line: the verdict, and in each dtype what comes nearest to its budget."""
    shares = []
    for dtype in DTYPES:
        checks = [c for c in report.checks if c.dtype == dtype]
        if checks:
            worst = max(checks, key=worst_first)
            shares.append(f"{dtype} {worst.margin:.0%} ({worst.name})")
    lost = [line for line in report.blind if "overflows" in line or "rounding leaves" in line]
    verdict = "equal" if report.equal else "ALARM"
    return f"{verdict}  {one.name}: {', '.join(shares)}" + "; ".join(["", *lost])


def main(arguments: list[str]) -> int:
    """From, up to and, where only every so many are wanted, the step."""
    if not 2 <= len(arguments) <= 3 or not all(a.isdigit() for a in arguments):
        print("usage: python -m jaxtwin.tests.helpers.crowd FROM UP_TO [STEP]")
        return 2
    start, alarms, worst, models = time.time(), 0, 0.0, 0
    for number in range(*map(int, arguments)):
        one, report = checked(number)
        alarms += not report.equal
        worst, models = max(worst, *(c.margin for c in report.checks)), models + 1
        print(f"{number:4d} {told(one, report)}", flush=True)
    minutes = (time.time() - start) / 60
    print(f"{models} models, {alarms} false alarms, worst share {worst:.0%}, {minutes:.0f} min")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
