"""Is it the same model? Logits, losses and every gradient: float64 first, then measured budgets.

In float64 both mirrors must agree to rounding (1e-13 on logits, 1e-12 on gradients): a gap there is
a bug. In a working dtype nobody sets a tolerance: torch's own error sets it (budgets.py).
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.parity.compare import budgets, curves, decoder_settings, failure_details, preflight
from jaxtwin.parity.diagnose import replay
from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.results import Check, Report
from jaxtwin.parity.sides import runs
from jaxtwin.parity.sides.inputs import Inputs, blind, inputs
from jaxtwin.parity.sides.memory import give_back
from jaxtwin.parity.sides.outcome import Outcome, Trace
from jaxtwin.parity.sides.runs import InjectedFault, Reference, Subject, decoder
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensors, backward, forward, src_shapes

LOGITS, GRADS = 1e-13, 1e-12  # relative L2, float64 against float64
PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "numpy")


def strict(got: Outcome, want: Outcome, label: str = "") -> Iterator[Check]:
    """float64 against float64: nothing but the order of summation may differ."""
    f64 = "float64"
    yield Check(label + "logits", f64, metrics.relative_l2(got.logits, want.logits), LOGITS)
    yield Check(
        label + "logits, worst token", f64, metrics.worst_row(got.logits, want.logits), 1e-12
    )
    yield Check(label + "loss, per target", f64, metrics.relative_l2(got.nll, want.nll), LOGITS)
    for name in want.grads:
        yield Check(f"{label}grad {name}", f64, want.off(name, got.grads[name]), GRADS)


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
    injected: InjectedFault | None = None,
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
    `explain` a failure in float64 is followed to its cause (search.py), and what failed is kept
    in the new folder `keep` (replay.py).
    The float64 run comes first and is the truth that the others are measured from.
    """
    import jax

    _refuse(spec, dtypes, tokens, seed, layout)
    given = inputs(spec, tokens, seed, encode)
    report = Report(environment=environment(spec, tensors, given, layout), blind=blind(spec, given))
    theirs = against or (spec, tensors)
    if (odd := _unlike(spec, theirs[0])) is not None:
        report.checks.append(odd)
        report.preflight = preflight.spec(spec, theirs[0])
        return report
    with runs.grads_on(), jax.enable_x64(True), jax.default_matmul_precision("highest"):
        progress("weights: through the table and back")
        report.checks.append(_returns(spec, tensors, layout))
        progress("float64: torch")
        reference = Reference(spec, tensors, given)
        # With a reference of its own, which is let go: it holds the model and its gradients.
        alone = Reference(spec, tensors, given)
        read = decoder_settings.Sides(given, report)
        if look:
            read.torch("float64")(alone.model)
            truth: Outcome = alone.run()
        else:
            truth = runs.run_torch(spec, tensors, given, "float64", read.torch("float64"))
        del alone
        give_back()
        if "float64" in dtypes:
            progress("float64: JAX")
            model = runs.jax_model(*theirs, "float64", layout, injected, "full" if look else "none")
            read.jax("float64", model)
            if look:
                report.checks += _looked(report, model, layout, given, truth, progress)
            else:
                report.checks += strict(runs.run_jax(model.spec, model, given, layout), truth)
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
    with runs.grads_on(), jax.enable_x64(False), jax.default_matmul_precision("highest"):
        for dtype in [d for d in dtypes if d != "float64"]:
            report.checks += budgets.working(
                reference,
                theirs,
                truth,
                dtype,
                report,
                read,
                layout=layout,
                injected=injected,
                witness=witness if dtype == "float32" else None,
                redraw=report.equal,
                look=look,
                progress=progress,
            )
    return report


def _refuse(spec: Model, dtypes: Sequence[str], tokens: int, seed: int, layout: str) -> None:
    """A BadInput where there is nothing to compare, or no such thing."""
    if not dtypes:
        raise BadInput(f"name at least one dtype to compare in: {', '.join(budgets.NUMPY)}")
    if isinstance(dtypes, str):
        raise BadInput(f"dtypes must be a list, as [{dtypes!r}], got {dtypes!r}")
    unknown = sorted(set(map(str, dtypes)) - set(budgets.NUMPY))
    if unknown:
        raise BadInput(f"no such dtype: {', '.join(unknown)}; known: {', '.join(budgets.NUMPY)}")
    if not isinstance(tokens, int) or tokens < 8:
        raise BadInput(f"a check needs 8 tokens or more, got {tokens}")
    if spec.max_len < 2:
        raise BadInput(f"max_len={spec.max_len}: there is no next token to predict")
    if layout not in decoder_table.LAYOUTS:
        raise BadInput(f"layout must be one of {', '.join(decoder_table.LAYOUTS)}, got {layout!r}")
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise BadInput(f"seed must be a whole number from 0 to 2^32 - 1, got {seed}")


def _unlike(spec: Model, other: Model) -> Check | None:
    """A failed check where the two do not even have the same tensors."""
    one, two = (dict(src_shapes(decoder_table.rows(s, "unroll"))) for s in (spec, other))
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
    changed = metrics.relative_l2(free.logits, runs.logits_jax(model, given))
    yield Check("probes on and off: logits", "float64", changed, LOGITS)
    del free  # a trace is as large as the model, and one more would not fit beside it
    give_back()
    progress("float64: JAX, every part alone")
    alone = curves.alone(subject.run, truth)
    report.points += curves.points(ends, [alone], truth, "float64")
    yield from budgets.parts(report, "float64")


def _explain(report: Report, reference: Reference, subject: Subject, keep: Path | None) -> None:
    from jaxtwin.parity.diagnose.search import Diagnosis, diagnose

    def seen(found: Diagnosis, truth: Trace, free: Trace, forced: Trace) -> None:
        report.preflight += found.preflight
        report.divergences = found.divergences
        report.points, report.heat = found.points, found.heat
        known = budgets.axes(reference.spec, reference.given)
        failure_details.add(report, report.checks, "float64", truth, free, forced, known)
        if keep is not None:
            replay.save(keep, subject.spec, subject.weights, reference.given, truth, report)

    diagnose(reference, subject, seen)


def _returns(spec: Model, tensors: Tensors, layout: str) -> Check:
    """The weights to jaxmodel's layout and back: how many tensors come back with other bytes."""
    rows = decoder_table.rows(spec, layout)
    back = backward(rows, forward(rows, tensors, "the source"), "the JAX side")
    changed = sum(back[n].read().tobytes() != tensors[n].read().tobytes() for n in tensors)
    return Check("weights, there and back", "as stored", float(changed), 0.0)


def _decoding(model: Any, given: Inputs, truth: Outcome) -> Iterator[Check]:
    """The calls that text is generated by, on the row of plain text.

    The ids alone; and the cached path where it computes something of its own: a prefill, then three
    tokens. There the row stands twice, for a cache has rows to mix up.
    """
    row = given.ids[:1]
    t = row.shape[1]
    alone = metrics.relative_l2(runs.logits_of_ids(model, row), truth.logits[:1])
    yield Check("logits, of the ids alone", "float64", alone, LOGITS)
    if t >= 5:
        got = runs.decode_jax(model, np.concatenate((row, row)), prefill=t - 3)
        error = metrics.relative_l2(got, np.repeat(truth.logits[:1, -1], 2, axis=0))
        yield Check("logits, decoded from the cache", "float64", error, LOGITS)


def _recorded(
    spec: Model, tensors: Tensors, model: Any, golden: dict[str, Any], layout: str
) -> Iterator[Check]:
    """What somebody else's run of this model gave: both mirrors must give it too."""
    import torch

    from jaxtwin import jaxmodel, torchref

    ids = golden["ids"]
    plain = Inputs(ids, np.tile(np.arange(ids.shape[1]), (len(ids), 1)), np.ones_like(ids))
    want = Outcome(golden["logits"], np.atleast_1d(golden["loss"]), golden["grads"])
    mirror = runs.torch_model(spec, tensors, "float64")
    both = {
        "recorded, torch: ": runs.run_torch(spec, tensors, plain, "float64"),
        "recorded, JAX: ": runs.run_jax(spec, model, plain, layout),
    }
    for label, got in both.items():
        mean = Outcome(got.logits, got.nll.mean(keepdims=True), got.grads)
        yield from strict(mean, want, label)
    for name, case in golden["generate"].items():
        prompt, tokens, eos = case["prompt"], case["ids"], case["eos"]
        new = spec.max_len if name == "greedy_to_context" else tokens.shape[1] - prompt.shape[1]
        generated = {
            "torch": torchref.generate(mirror, torch.from_numpy(prompt), new, eos=eos).numpy(),
            "JAX": jaxmodel.generate(model, prompt, new, eos=eos),
        }
        for side, made in generated.items():
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
