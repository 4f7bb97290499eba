"""A working dtype: errors from the float64 truth, against budgets that torch's own errors set.

Nobody sets a tolerance. JAX may be off the truth by at most twice what torch, in the same dtype, is
off it, plus what rounding the truth itself costs. Where one draw of roundings leaves a doubt, more
are drawn (see reordering.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np

from jaxtwin.configs import Model
from jaxtwin.parity.compare import curves, decoder_settings, failure_details
from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.results import Check, Report
from jaxtwin.parity.sides import probes, runs, terms
from jaxtwin.parity.sides.inputs import Inputs
from jaxtwin.parity.sides.memory import give_back
from jaxtwin.parity.sides.outcome import Outcome, Trace
from jaxtwin.parity.sides.reordering import Reordering
from jaxtwin.parity.sides.runs import InjectedFault, Reference, Subject, decoder
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensors

K = 2.0  # how many times torch's own error JAX may make
KL = "KL in nats, worst token"
DRAWS = {"torch": 8, "jax": 3}  # at most, and only while a comparison is over its budget
NUMPY = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def errors(got: Outcome, truth: Outcome) -> dict[str, float]:
    """How far a run is off the float64 truth, by every measure that is budgeted."""
    return {
        "logits": metrics.relative_l2(got.logits, truth.logits),
        "logits, worst token": metrics.worst_row(got.logits, truth.logits),
        KL: metrics.worst_kl(got.logits, truth.logits),
        "loss, per target": metrics.relative_l2(got.nll, truth.nll),
        **{f"grad {name}": truth.off(name, got.grads[name]) for name in truth.grads},
    }


def rounding(truth: Outcome, dtype: str) -> dict[str, float]:
    """What it costs to round the truth itself to the dtype: nobody can be nearer than that."""
    near = [metrics.rounded(x, NUMPY[dtype]) for x in (truth.logits, truth.nll)]
    out = errors(Outcome(near[0], near[1], truth.grads), truth)
    for name, grad in truth.grads.items():
        out[f"grad {name}"] = terms.rounding(grad, NUMPY[dtype], truth.terms.get(name))
    return out


def budgeted(
    runs: Sequence[Mapping[str, float]],
    torch: Sequence[Mapping[str, float]],
    noise: Mapping[str, float],
    dtype: str,
    label: str = "",
) -> list[Check]:
    """Every error against its budget; `runs` and `torch` hold the errors of one or more draws.

    The budget is K times the largest error of torch's draws, and the rounding noise. The error is
    the smallest of the draws: a fault is in every one of them, bad luck is not.
    """
    out = []
    for name, least in noise.items():
        # KL grows with the square of the error, so twice the error is four times the KL.
        times = K**2 if name == KL else K
        budget = times * _largest([draw[name] for draw in torch]) + least
        out.append(Check(label + name, dtype, _smallest([draw[name] for draw in runs]), budget))
    return out


def _largest(values: Sequence[float]) -> float:
    return float(np.max(values))  # unlike max, NaN whatever its place


def _smallest(values: Sequence[float]) -> float:
    return float(np.min(values))


def working(
    reference: Reference,
    theirs: tuple[Model, Tensors],
    truth: Outcome,
    dtype: str,
    report: Report,
    read: decoder_settings.Sides,
    *,
    layout: str,
    injected: InjectedFault | None,
    witness: Callable[[Inputs], Outcome] | None,
    redraw: bool,
    look: bool,
    progress: Callable[[str], None],
) -> list[Check]:
    """JAX (and the witness) in a working dtype, against the budget that torch's own error sets.

    While something is over and `redraw` is allowed (float64 has shown that the function is the
    same, or was not asked), roundings are drawn anew: torch first, whose largest error sets the
    budget, then JAX.
    """
    spec, tensors, given = reference.spec, reference.tensors, reference.given
    noise = rounding(truth, dtype)

    def torch_draw(seed: int) -> dict[str, float]:
        give_back()
        progress(f"{dtype}: torch" + (f", roundings drawn anew ({seed})" if seed else ""))
        order = Reordering(spec, seed)
        out = runs.run_torch(spec, order.apply(tensors), given, dtype, read.torch(dtype))
        return errors(replace(out, grads=order.undo(out.grads)), truth)

    def jax_draw(seed: int) -> tuple[dict[str, float], np.ndarray]:
        give_back()
        progress(f"{dtype}: JAX" + (f", roundings drawn anew ({seed})" if seed else ""))
        order = Reordering(spec, seed)
        remat = "full" if look else "none"  # traces are large enough
        model = runs.jax_model(theirs[0], order.apply(theirs[1]), dtype, layout, injected, remat)
        if not seed:
            read.jax(dtype, model)
        if look and not seed:
            subjects.append(decoder(model, layout, given))
            trace = subjects[0].run(None)
            ends.update(curves.measure(trace, seen()))
            return errors(trace, truth), trace.logits
        out = runs.run_jax(model.spec, model, given, layout)
        return errors(replace(out, grads=order.undo(out.grads)), truth), out.logits

    def seen() -> Trace:
        assert isinstance(truth, Trace)  # as it is where `look` is asked
        return truth

    subjects: list[Subject] = []
    ends: curves.Errors = {}
    torch, (first, logits) = [torch_draw(0)], jax_draw(0)
    jax, hf, against = [first], [], []
    if (turned := metrics.flips(logits, truth.logits)).count:
        tokens = f"{turned.count} of {turned.positions} top-1 tokens flip"
        report.notes.append(f"{dtype}: {tokens}, the largest margin {turned.margin:.2g}")
    if witness:
        progress(f"{dtype}: transformers, the third witness")
        third = witness(given)
        read.witness(dtype, witness)
        hf = [errors(third, truth)]
        against = [("JAX against transformers: logits", metrics.relative_l2(logits, third.logits))]
        del third  # its gradients are as large as the model

    def alone() -> Iterator[Check]:
        rows = probes.rows(spec, "unroll", given.ids.shape)
        patched: list[curves.Errors] = []
        own: list[curves.Errors] = []
        while True:
            give_back()
            progress(f"{dtype}: every part alone" + (f" ({len(own)})" if own else ""))
            order = Reordering(spec, len(own), rows)
            moved = order.trace(seen())
            src = replace(reference, tensors=order.apply(tensors), dtype=dtype)
            own.append(curves.measure(src.run(moved), moved))
            del src  # with the model that it made, and its gradients
            give_back()
            if own[1:]:
                there_too = order.apply(theirs[1])
                model = runs.jax_model(theirs[0], there_too, dtype, layout, injected, "full")
                subjects[0] = decoder(model, layout, given)
            patched.append(curves.alone(subjects[0].run, moved))
            found = curves.points(ends, patched, seen(), dtype, own)
            if all(p.ok for p in found) or not redraw or len(own) == DRAWS["jax"]:
                break
        report.points += found
        yield from parts(report, dtype)

    def checks() -> list[Check]:
        out = budgeted(jax, torch, noise, dtype)
        allowed = out[0].budget
        if hf:
            out += budgeted(hf, torch, noise, dtype, "transformers: ")
        return out + [Check(name, dtype, error, allowed) for name, error in against]

    while redraw and not all(c.ok for c in checks()) and len(torch) < DRAWS["torch"]:
        torch.append(torch_draw(len(torch)))
    while redraw and not all(c.ok for c in checks()) and len(jax) < DRAWS["jax"]:
        jax.append(jax_draw(len(jax))[0])
    out = checks()
    if not all(c.ok for c in out) and len(report.details) < failure_details.MOST:
        give_back()
        progress(f"{dtype}: JAX, once more for the details")
        model = runs.jax_model(*theirs, dtype, layout, injected)
        free = runs.run_jax(model.spec, model, given, layout)
        failure_details.add(report, out, dtype, truth, free, None, axes(spec, given))
    report.blind += _hollow(out, dtype)
    return [*out, *(alone() if look else ())]


NOTHING = 0.5  # a relative budget from which on zeros would pass, or nearly


def _hollow(checks: Sequence[Check], dtype: str) -> list[str]:
    """In words: the comparisons whose measured budget lets anything pass."""
    loose = [c.name for c in checks if KL not in c.name and c.budget >= NOTHING]
    if not loose:
        return []
    more = f" and {len(loose) - 1} more" if loose[1:] else ""
    return [f"{loose[0]}{more} in {dtype}: torch's own rounding leaves nothing to compare"]


def axes(spec: Model, given: Inputs) -> failure_details.Axes:
    """The axes of every probe and parameter of a decoder, by torch's names."""
    seen = probes.rows(spec, "unroll", given.ids.shape)
    return failure_details.axes([*seen, *decoder_table.rows(spec, "unroll")])


def parts(report: Report, dtype: str) -> Iterator[Check]:
    """Of the parts alone, the one that uses most of its band, for each direction."""
    for direction in curves.BANDS:
        points = [p for p in report.points if (p.dtype, p.direction) == (dtype, direction)]
        checks = [
            Check(f"part alone, {direction}: {p.probe}", dtype, p.local_error, p.band)
            for p in points
        ]
        yield max(checks, key=lambda c: np.inf if np.isnan(c.error) else c.margin)
