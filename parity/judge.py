"""Is it the same model? Logits, losses and every gradient: float64 first, then measured budgets.

In float64 both mirrors must agree to rounding (1e-13 on logits, 1e-12 on gradients): a gap there is
a bug. In a working dtype nobody sets a tolerance: JAX may be off the float64 truth by at most twice
what torch, in the same dtype, is off it, plus what rounding the truth itself costs. Where one draw
of roundings leaves a doubt, more are drawn (see redraw.py).
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from configs import BadInput, Model
from parity import curves, metrics, preflight, probes, replay, sides, table
from parity.findings import Check, Report
from parity.inputs import Inputs, blind, inputs
from parity.memory import give_back
from parity.probes import Trace
from parity.redraw import Reordering
from parity.sides import Outcome, Wrong
from parity.subject import Reference, Subject, decoder
from parity.tensors import Tensors, backward, forward, shapes_there

LOGITS, GRADS = 1e-13, 1e-12  # relative L2, float64 against float64
K = 2.0  # how many times torch's own error JAX may make
KL = "KL in nats, worst token"
DRAWS = {"torch": 8, "jax": 3}  # at most, and only while a comparison is over its budget
NUMPY = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "numpy")


def strict(got: Outcome, want: Outcome, label: str = "") -> Iterator[Check]:
    """float64 against float64: nothing but the order of summation may differ."""
    f64 = "float64"
    yield Check(label + "logits", f64, metrics.relative_l2(got.logits, want.logits), LOGITS)
    yield Check(
        label + "logits, worst token", f64, metrics.worst_row(got.logits, want.logits), 1e-12
    )
    yield Check(label + "loss, per target", f64, metrics.relative_l2(got.nll, want.nll), LOGITS)
    for name, grad in want.grads.items():
        yield Check(f"{label}grad {name}", f64, metrics.relative_l2(got.grads[name], grad), GRADS)


def errors(got: Outcome, truth: Outcome) -> dict[str, float]:
    """How far a run is off the float64 truth, by every measure that is budgeted."""
    return {
        "logits": metrics.relative_l2(got.logits, truth.logits),
        "logits, worst token": metrics.worst_row(got.logits, truth.logits),
        KL: metrics.worst_kl(got.logits, truth.logits),
        "loss, per target": metrics.relative_l2(got.nll, truth.nll),
        **{
            f"grad {name}": metrics.relative_l2(got.grads[name], grad)
            for name, grad in truth.grads.items()
        },
    }


def rounding(truth: Outcome, dtype: str) -> dict[str, float]:
    """What it costs to round the truth itself to the dtype: nobody can be nearer than that."""
    near = [metrics.rounded(x, NUMPY[dtype]) for x in (truth.logits, truth.nll)]
    grads = {name: metrics.rounded(x, NUMPY[dtype]) for name, x in truth.grads.items()}
    return errors(Outcome(near[0], near[1], grads), truth)


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


def check(
    spec: Model,
    tensors: Tensors,
    *,
    dtypes: Sequence[str] = ("float64", "float32"),
    tokens: int = 300,
    seed: int = 0,
    encode: Callable[[str], Sequence[int]] | None = None,
    layout: str = "scan",
    golden: dict[str, Any] | None = None,
    witness: Callable[[Inputs], Outcome] | None = None,
    wrong: Wrong | None = None,
    against: tuple[Model, Tensors] | None = None,
    look: bool = False,
    explain: bool = True,
    keep: Path | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Report:
    """Compares jaxmodel with torchref on the weights (named as torchref names them).

    `encode` is the tokenizer's, where there is one; `golden` are recorded results to be met as
    well; `witness` runs transformers' own model in float32 on the same input; `wrong` is a mistake
    to make on the JAX side (see faults/). `against` is what the JAX side is built from, where that
    is something else. With `look` every part is also judged alone, in every dtype (curves.py); with
    `explain` a failure in float64 is followed to its cause (diagnose.py), and what failed is kept
    in the new folder `keep` (replay.py).
    The float64 run comes first and is the truth that the others are measured from.
    """
    import jax

    if not dtypes:
        raise BadInput(f"name at least one dtype to compare in: {', '.join(NUMPY)}")
    if tokens < 8:
        raise BadInput(f"a check needs 8 tokens or more, got {tokens}")
    unknown = sorted(set(dtypes) - set(NUMPY))
    if unknown:
        raise BadInput(f"no such dtype: {', '.join(unknown)}; known: {', '.join(NUMPY)}")
    given = inputs(spec, tokens, seed, encode)
    report = Report(environment=environment(spec, tensors, given, layout), blind=blind(spec, given))
    theirs = against or (spec, tensors)
    if (odd := _unlike(spec, theirs[0])) is not None:
        report.checks.append(odd)
        report.preflight = preflight.spec(spec, theirs[0])
        return report
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        progress("weights: through the table and back")
        report.checks.append(_returns(spec, tensors, layout))
        progress("float64: torch")
        reference = Reference(spec, tensors, given)
        # With a reference of its own, which is let go: it holds the model and its gradients.
        alone = Reference(spec, tensors, given)
        truth = alone.run() if look else sides.run_torch(spec, tensors, given, "float64")
        del alone
        give_back()
        if "float64" in dtypes:
            progress("float64: JAX")
            model = sides.jax_model(*theirs, "float64", layout, wrong, "full" if look else "none")
            if look:
                report.checks += _looked(report, model, layout, given, truth, progress)
            else:
                report.checks += strict(sides.run_jax(model.spec, model, given, layout), truth)
            progress("float64: JAX, decoding from the cache")
            report.checks += _decoding(model, given, truth)
            if golden:
                progress("float64: recorded results")
                report.checks += _recorded(spec, tensors, model, golden, layout)
            if explain and not report.equal:
                progress("float64: looking for the cause")
                _explain(report, reference, decoder(model, layout, given), keep)
            del model
        give_back()
    with jax.enable_x64(False), jax.default_matmul_precision("highest"):
        for dtype in [d for d in dtypes if d != "float64"]:
            report.checks += working(
                reference,
                theirs,
                truth,
                dtype,
                report,
                layout=layout,
                wrong=wrong,
                witness=witness if dtype == "float32" else None,
                redraw="float64" in dtypes and report.equal,
                look=look,
                progress=progress,
            )
    return report


def _unlike(spec: Model, other: Model) -> Check | None:
    """A failed check where the two do not even have the same tensors."""
    one, two = (dict(shapes_there(table.rows(s, "unroll"))) for s in (spec, other))
    odd = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    if not odd:
        return None
    return Check(f"tensors of another name or shape, the first {odd[0]}", "int", len(odd), 0.0)


def _looked(
    report: Report,
    model: Any,
    layout: str,
    given: Inputs,
    truth: Outcome,
    progress: Callable[[str], None],
) -> Iterator[Check]:
    """The same comparisons seen from inside, the two curves, and that looking changed nothing."""
    assert isinstance(truth, Trace)
    subject = decoder(model, layout, given)
    free = subject.run(None)
    yield from strict(free, truth)
    ends = curves.measure(free, truth)
    report.heat = curves.heat(free, truth, len(subject.spec.layers))
    changed = metrics.relative_l2(free.logits, sides.logits_jax(model, given))
    yield Check("probes on and off: logits", "float64", changed, LOGITS)
    del free  # a trace is as large as the model, and one more would not fit beside it
    give_back()
    progress("float64: JAX, every part alone")
    alone = curves.measure(subject.run(truth), truth)
    report.points += curves.points(ends, [alone], truth, "float64")
    yield from _parts(report, "float64")


def _parts(report: Report, dtype: str) -> Iterator[Check]:
    """Of the parts alone, the one that uses most of its band, for each direction."""
    for direction in curves.BANDS:
        points = [p for p in report.points if (p.dtype, p.direction) == (dtype, direction)]
        checks = [
            Check(f"part alone, {direction}: {p.probe}", dtype, p.injected, p.band) for p in points
        ]
        yield max(checks, key=lambda c: np.inf if np.isnan(c.error) else c.margin)


def _explain(report: Report, reference: Reference, subject: Subject, keep: Path | None) -> None:
    from parity.diagnose import diagnose

    found = diagnose(reference, subject)
    report.preflight, report.suspects = found.preflight, found.suspects
    report.points, report.heat = found.points, found.heat
    if keep is not None:
        truth = reference.run()  # once more: the diagnosis keeps no traces, they are too large
        replay.save(keep, subject.spec, subject.weights, reference.given, truth, report)


def working(
    reference: Reference,
    theirs: tuple[Model, Tensors],
    truth: Outcome,
    dtype: str,
    report: Report,
    *,
    layout: str,
    wrong: Wrong | None,
    witness: Callable[[Inputs], Outcome] | None,
    redraw: bool,
    look: bool,
    progress: Callable[[str], None],
) -> list[Check]:
    """JAX (and the witness) in a working dtype, against the budget that torch's own error sets.

    While something is over and `redraw` is allowed (float64 has shown that the function is the
    same), roundings are drawn anew: torch first, whose largest error sets the budget, then JAX.
    """
    spec, tensors, given = reference.spec, reference.tensors, reference.given
    noise = rounding(truth, dtype)

    def torch_draw(seed: int) -> dict[str, float]:
        give_back()
        progress(f"{dtype}: torch" + (f", roundings drawn anew ({seed})" if seed else ""))
        order = Reordering(spec, seed)
        out = sides.run_torch(spec, order.apply(tensors), given, dtype)
        return errors(replace(out, grads=order.undo(out.grads)), truth)

    def jax_draw(seed: int) -> tuple[dict[str, float], np.ndarray]:
        progress(f"{dtype}: JAX" + (f", roundings drawn anew ({seed})" if seed else ""))
        order = Reordering(spec, seed)
        remat = "full" if look else "none"  # traces are large enough
        model = sides.jax_model(theirs[0], order.apply(theirs[1]), dtype, layout, wrong, remat)
        if look and not seed:
            subjects.append(decoder(model, layout, given))
            trace = subjects[0].run(None)
            ends.update(curves.measure(trace, seen()))
            return errors(trace, truth), trace.logits
        out = sides.run_jax(model.spec, model, given, layout)
        return errors(replace(out, grads=order.undo(out.grads)), truth), out.logits

    def seen() -> Trace:
        assert isinstance(truth, Trace)  # as it is where `look` is asked
        return truth

    subjects: list[Subject] = []
    ends: curves.Errors = {}
    torch, (first, logits) = [torch_draw(0)], jax_draw(0)
    jax, hf, against = [first], [], []
    if witness:
        progress(f"{dtype}: transformers, the third witness")
        third = witness(given)
        hf = [errors(third, truth)]
        against = [("JAX against transformers: logits", metrics.relative_l2(logits, third.logits))]

    def alone() -> Iterator[Check]:
        rows = probes.rows(spec, "unroll", given.ids.shape)
        parts: list[curves.Errors] = []
        own: list[curves.Errors] = []
        while True:
            give_back()
            progress(f"{dtype}: every part alone" + (f" ({len(own)})" if own else ""))
            order = Reordering(spec, len(own), rows)
            moved = order.trace(seen())
            there = replace(reference, tensors=order.apply(tensors), dtype=dtype)
            own.append(curves.measure(there.run(moved), moved))
            if own[1:]:
                there_too = order.apply(theirs[1])
                model = sides.jax_model(theirs[0], there_too, dtype, layout, wrong, "full")
                subjects[0] = decoder(model, layout, given)
            parts.append(curves.measure(subjects[0].run(moved), moved))
            found = curves.points(ends, parts, seen(), dtype, own)
            if all(p.ok for p in found) or not redraw or len(own) == DRAWS["jax"]:
                break
        report.points += found
        yield from _parts(report, dtype)

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
    return [*checks(), *(alone() if look else ())]


def _returns(spec: Model, tensors: Tensors, layout: str) -> Check:
    """The weights to jaxmodel's layout and back: how many tensors come back with other bytes."""
    rows = table.rows(spec, layout)
    back = backward(rows, forward(rows, tensors, "the source"), "the JAX side")
    changed = sum(back[n].read().tobytes() != tensors[n].read().tobytes() for n in tensors)
    return Check("weights, there and back", "as stored", float(changed), 0.0)


def _decoding(model: Any, given: Inputs, truth: Outcome) -> Iterator[Check]:
    """The cached path, where it computes something of its own: a prefill, then three tokens."""
    t = given.ids.shape[1]
    if t >= 5:
        got = sides.decode_jax(model, given.ids[:1], prefill=t - 3)
        error = metrics.relative_l2(got, truth.logits[:1, -1])
        yield Check("logits, decoded from the cache", "float64", error, LOGITS)


def _recorded(
    spec: Model, tensors: Tensors, model: Any, golden: dict[str, Any], layout: str
) -> Iterator[Check]:
    """What somebody else's run of this model gave: both mirrors must give it too."""
    import torch

    import jaxmodel
    import torchref

    ids = golden["ids"]
    plain = Inputs(ids, np.tile(np.arange(ids.shape[1]), (len(ids), 1)), np.ones_like(ids))
    want = Outcome(golden["logits"], np.atleast_1d(golden["loss"]), golden["grads"])
    mirror = sides.torch_model(spec, tensors, "float64")
    both = {
        "recorded, torch: ": sides.run_torch(spec, tensors, plain, "float64"),
        "recorded, JAX: ": sides.run_jax(spec, model, plain, layout),
    }
    for label, got in both.items():
        mean = Outcome(got.logits, got.nll.mean(keepdims=True), got.grads)
        yield from strict(mean, want, label)
    for name, case in golden["generate"].items():
        prompt, tokens, eos = case["prompt"], case["ids"], case["eos"]
        new = spec.max_len if name == "greedy_to_context" else tokens.shape[1] - prompt.shape[1]
        runs = {
            "torch": torchref.generate(mirror, torch.from_numpy(prompt), new, eos=eos).numpy(),
            "JAX": jaxmodel.generate(model, prompt, new, eos=eos),
        }
        for side, made in runs.items():
            differ = made.shape != tokens.shape or int((made != tokens).sum())
            yield Check(f"recorded, {side}: {name}, tokens that differ", "int", float(differ), 0.0)


def environment(spec: Model, tensors: Tensors, given: Inputs, layout: str) -> dict[str, Any]:
    """Everything that could make another run differ."""
    import jax
    import torch

    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {name: _version(name) for name in PACKAGES},
        "jax_devices": [str(device.device_kind) for device in jax.devices()],
        "jax_matmul_precision": "highest",
        "torch_matmul_precision": torch.get_float32_matmul_precision(),
        "torch_threads": torch.get_num_threads(),
        "layout": layout,
        "input_shape": list(given.ids.shape),
        "input_sha256": hashlib.sha256(given.ids.tobytes()).hexdigest(),
        "stored_dtypes": sorted({str(t.dtype) for t in tensors.values()}),
        "parameters": sum(int(np.prod(t.shape)) for t in tensors.values()),
        "layers": len(spec.layers),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
