"""Is it the same model? Logits, losses and every gradient: float64 first, then measured budgets.

In float64 both mirrors must agree to rounding (tolerances.py): a gap there is a bug. In a working
dtype torch's own error sets the budget (budgets.py).
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.memory import give_back
from jaxtwin.parity.compare import budgets, curves, decoder_settings, failure_details, preflight
from jaxtwin.parity.compare.draws import Exact
from jaxtwin.parity.compare.forecast import forecast
from jaxtwin.parity.compare.options import CheckOptions
from jaxtwin.parity.compare.tolerances import BACKWARD, FORWARD, WORST_TOKEN
from jaxtwin.parity.compare.working_dtype import WorkingDtype
from jaxtwin.parity.diagnose import replay
from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.results import Check, Report
from jaxtwin.parity.sides import runs
from jaxtwin.parity.sides.inputs import Inputs, blind, check_inputs
from jaxtwin.parity.sides.outcome import Outcome, Trace
from jaxtwin.parity.sides.runs import Reference, Subject, decoder
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensors, backward, forward, src_shapes

if TYPE_CHECKING:
    from jaxtwin.jaxmodel import Decoder

PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "numpy")


def strict(got: Outcome, want: Outcome, label: str = "") -> Iterator[Check]:
    """float64 against float64: nothing but the order of summation may differ."""

    def check(kind: str, error: float, budget: float, place: str = "") -> Check:
        return Check(kind, "float64", error, budget, place, label)

    yield check("logits", metrics.relative_l2(got.logits, want.logits), FORWARD)
    yield check("worst_token", metrics.worst_row(got.logits, want.logits), WORST_TOKEN)
    yield check("loss", metrics.relative_l2(got.nll, want.nll), FORWARD)
    for name in want.grads:
        yield check("gradient", want.off(name, got.grads[name]), BACKWARD, name)


def check(
    spec: Model,
    tensors: Tensors,
    options: CheckOptions | None = None,
    *,
    encode: Callable[[str], Sequence[int]] | None = None,
    golden: dict[str, Any] | None = None,
    witness: Callable[[Inputs], Outcome] | None = None,
    against: tuple[Model, Tensors] | None = None,
    **changes: Any,
) -> Report:
    """Compares jaxmodel with torchref on the weights (named as torchref names them).

    `changes` are fields of CheckOptions. `encode` is the tokenizer's, where there is one; `golden`
    are recorded results to be met as well; `witness` runs transformers' own model in float32 on the
    same input; `against` is what the JAX side is built from, where that is something else. The
    float64 run comes first, and torch's is the reference that all others are measured from.
    BadInput on options that leave nothing to compare.
    """
    import jax

    options = replace(options or CheckOptions(), **changes)
    options.refuse(spec)
    inputs = check_inputs(spec, options.tokens, options.seed, encode)
    report = Report(
        environment=environment(spec, tensors, inputs, options.layout), blind=blind(spec, inputs)
    )
    jax_side = against or (spec, tensors)
    if (unlike := _shapes(spec, jax_side[0])) is not None:
        report.checks.append(unlike)
        report.preflight = preflight.spec(spec, jax_side[0])
        return report
    expected = forecast(
        spec, inputs.ids.shape, options.dtypes, probes=options.probes, held=_in_memory(tensors)
    )
    options.progress(f"this check takes {expected}")
    both = _DecoderCheck(
        Reference(spec, tensors, inputs), jax_side, options, report, expected.sparing
    )
    with runs.grads_on(), jax.enable_x64(True), jax.default_matmul_precision("highest"):
        options.progress("weights: through the table and back")
        report.checks.append(_round_trip(spec, tensors, options.layout))
        exact = Exact(both.reference)
        if "float64" in options.dtypes:
            both.float64(exact(), golden)
        give_back()
    with runs.grads_on(), jax.enable_x64(False), jax.default_matmul_precision("highest"):
        for dtype in [d for d in options.dtypes if d != "float64"]:
            report.checks += both.working(dtype, exact, witness)
    return report


@dataclass
class _DecoderCheck:
    """Both sides of one check, and what it found."""

    torch_side: Reference
    jax_side: tuple[Model, Tensors]
    options: CheckOptions
    report: Report
    sparing: bool  # computes again what is large, to save memory
    settings: decoder_settings.Sides = field(init=False)

    def __post_init__(self) -> None:
        self.settings = decoder_settings.Sides(self.torch_side.inputs, self.report)

    def reference(self) -> Outcome:
        """torch in float64; with probes, a Trace."""
        self.options.progress("float64: torch")
        read = self.settings.torch("float64")
        # Of a copy, which is let go: it holds the model and its gradients.
        side = replace(self.torch_side)
        if self.options.probes:
            read(side.model)
            return side.run()
        return runs.run_torch(side.spec, side.tensors, side.inputs, "float64", read)

    def float64(self, reference: Outcome, golden: dict[str, Any] | None) -> None:
        """Every comparison in float64 and, where one fails, its cause."""
        options, report, inputs = self.options, self.report, self.torch_side.inputs
        give_back()
        options.progress("float64: JAX")
        model = self._jax_model()
        self.settings.jax("float64", model)
        options.progress("float64: JAX, decoding from the cache")
        later = list(_decoding(model, inputs, reference))
        if golden:
            options.progress("float64: recorded results")
            later += _recorded(self.torch_side, model, golden, options.layout)
        give_back()
        options.progress("float64: JAX, logits and gradients")
        if options.probes:
            report.checks += self._probed(model, reference)
        else:
            out = runs.run_jax(model.spec, model, inputs, options.layout, last=True)
            report.checks += strict(out, reference)
            del out
        report.checks += later
        del model
        give_back()
        if options.diagnose and not report.equal:
            options.progress("float64: looking for the cause")
            subject = decoder(self._jax_model(), options.layout, inputs)
            explain(report, self.torch_side, subject, options.replay)

    def _jax_model(self) -> Decoder:
        """The JAX side in float64."""
        (spec, tensors), options = self.jax_side, self.options
        remat = "full" if options.probes or self.sparing else "none"
        return runs.jax_model(spec, tensors, "float64", options.layout, options.injected, remat)

    def _probed(self, model: Decoder, reference: Outcome) -> Iterator[Check]:
        """The same comparisons with probes, the two curves, and that probes changed nothing."""
        assert isinstance(reference, Trace)
        inputs, report = self.torch_side.inputs, self.report
        subject = decoder(model, self.options.layout, inputs)
        trace = subject.run(None)
        yield from strict(trace, reference)
        accumulated = curves.measure(trace, reference)
        report.heat = curves.heat(trace, reference, len(subject.spec.layers))
        changed = metrics.relative_l2(trace.logits, runs.logits_jax(model, inputs))
        yield Check("probes_off", "float64", changed, FORWARD)
        del trace  # it is as large as the model, and one more would not fit beside it
        give_back()
        self.options.progress("float64: JAX, every part alone")
        local = curves.local_errors(subject.run, reference)
        report.points += curves.points(accumulated, [local], reference, "float64")
        yield from budgets.parts(report, "float64")

    def working(
        self, dtype: str, exact: Exact, witness: Callable[[Inputs], Outcome] | None
    ) -> list[Check]:
        """A working dtype; the witness takes part in float32."""
        run = WorkingDtype(
            self.torch_side,
            self.jax_side,
            exact,
            dtype,
            self.report,
            self.settings,
            self.options,
            redraw=all(check.ok for check in self.report.checks if check.dtype == "float64"),
            sparing=self.sparing,
        )
        return run.checks(witness if dtype == "float32" else None)


def _in_memory(tensors: Tensors) -> int:
    """Bytes of the weights that are held: those of a safetensors file are read when needed."""
    held = (t for t in tensors.values() if t.slices is None)
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in held)


def _shapes(spec: Model, other: Model) -> Check | None:
    """A failed check where the two do not even have the same tensors."""
    one, two = (dict(src_shapes(decoder_table.rows(s, "unroll"))) for s in (spec, other))
    odd = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    return Check("shapes", "int", len(odd), 0.0, odd[0]) if odd else None


def explain(report: Report, torch_side: Reference, subject: Subject, folder: Path | None) -> None:
    """Adds to the report where the two part, why, and the details of what failed.

    With a folder, what failed is written there to be run alone (replay.py).
    """
    from jaxtwin.parity.diagnose.search import Diagnosis, diagnose

    def on_traces(found: Diagnosis, reference: Trace, end_to_end: Trace, patched: Trace) -> None:
        report.preflight += found.preflight
        report.divergences = found.divergences
        report.notes += found.dropped
        report.points, report.heat = found.points, found.heat
        axes_of = budgets.axes(torch_side.spec, torch_side.inputs)
        traces = failure_details.Runs(reference, end_to_end, patched)
        failure_details.add(report, report.checks, "float64", traces, axes_of)
        if folder is not None:
            replay.save(folder, subject.spec, subject.weights, torch_side.inputs, reference, report)

    diagnose(torch_side, subject, on_traces)


def _round_trip(spec: Model, tensors: Tensors, layout: str) -> Check:
    """The weights to jaxmodel's layout and back: how many tensors come back with other bytes."""
    rows = decoder_table.rows(spec, layout)
    back = backward(rows, forward(rows, tensors, "the source"), "the JAX side")
    changed = sum(back[n].read().tobytes() != tensors[n].read().tobytes() for n in tensors)
    return Check("round_trip", "as stored", float(changed), 0.0)


def _decoding(model: Decoder, inputs: Inputs, reference: Outcome) -> Iterator[Check]:
    """The calls that text is generated by, on the row of plain text.

    The ids alone; and the cached path where it computes something of its own: a prefill, then three
    tokens. There the row stands twice, for a cache has rows to mix up.
    """
    row = inputs.ids[:1]
    t = row.shape[1]
    error = metrics.relative_l2(runs.logits_of_ids(model, row), reference.logits[:1])
    yield Check("ids_alone", "float64", error, FORWARD)
    if t >= 5:
        got = runs.decode_jax(model, np.concatenate((row, row)), prefill=t - 3)
        error = metrics.relative_l2(got, np.repeat(reference.logits[:1, -1], 2, axis=0))
        yield Check("decode", "float64", error, FORWARD)


def _recorded(
    torch_side: Reference, model: Decoder, golden: dict[str, Any], layout: str
) -> Iterator[Check]:
    """What somebody else's run of this model gave: both mirrors must give it too."""
    spec, ids = torch_side.spec, golden["ids"]
    plain = Inputs(ids, np.tile(np.arange(ids.shape[1]), (len(ids), 1)), np.ones_like(ids))
    want = Outcome(golden["logits"], np.atleast_1d(golden["loss"]), golden["grads"])
    both = {
        "recorded, torch": runs.run_torch(spec, torch_side.tensors, plain, "float64"),
        "recorded, JAX": runs.run_jax(spec, model, plain, layout),
    }
    for label, got in both.items():
        mean = Outcome(got.logits, got.nll.mean(keepdims=True), got.grads)
        yield from strict(mean, want, label)
    mirror = runs.torch_model(spec, torch_side.tensors, "float64")
    for name, case in golden["generate"].items():
        yield from _generated(spec, mirror, model, name, case)


def _generated(
    spec: Model, mirror: Any, model: Decoder, name: str, case: dict[str, Any]
) -> Iterator[Check]:
    """How many tokens of a recorded continuation are others."""
    import torch

    from jaxtwin import jaxmodel, torchref

    prompt, tokens, eos, new = case["prompt"], case["ids"], case["eos"], case["new"]
    generated = {
        "torch": torchref.generate(mirror, torch.from_numpy(prompt), new, eos=eos).numpy(),
        "JAX": jaxmodel.generate(model, prompt, new, eos=eos),
    }
    for side, ids in generated.items():
        differ = ids.shape != tokens.shape or int((ids != tokens).sum())
        yield Check("tokens", "int", float(differ), 0.0, name, f"recorded, {side}")


def environment(spec: Model, tensors: Tensors, inputs: Inputs, layout: str) -> dict[str, Any]:
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
        "input_shape": list(inputs.ids.shape),
        "input_sha256": hashlib.sha256(inputs.ids.tobytes()).hexdigest(),
        "stored_dtypes": sorted({str(t.dtype) for t in tensors.values()}),
        "parameters": sum(int(np.prod(t.shape)) for t in tensors.values()),
        "layers": len(spec.layers),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
