"""Checking a source from end to end: open it, find its witness, compare, and say what was seen."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.checkpoints.dialects.hf import is_float8
from jaxtwin.parity.checkpoints.source import Source, open_source
from jaxtwin.parity.diagnose import replay
from jaxtwin.parity.report.results import Report
from jaxtwin.parity.sides import witness
from jaxtwin.parity.sides.inputs import inputs
from jaxtwin.parity.sides.runs import InjectedFault
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.parity.training import training_check


def check(
    src: str | Source,
    *,
    dtypes: Sequence[str] = ("float64", "float32"),
    tokens: int = 300,
    layout: str = "scan",
    use_witness: bool = True,
    seed: int = 0,
    injected: InjectedFault | None = None,
    against: str | Source | None = None,
    look: bool = False,
    keep: str | os.PathLike[str] | None = None,
    train: training_check.Plan | None = None,
    export: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> Report:
    """Is the JAX model the PyTorch model? `src` is whatever the front door reads.

    See `judge.check`; a recorded .npz is compared with its own record too, and transformers
    takes part in float32 where it has the model. With `export` a Hugging Face folder is exported
    again, and transformers must take the one for the other (reexport.py). With `train` both sides
    are also trained on the same batches, where all the rest holds (training_check.py). BadInput if
    the source cannot be read, or if something is at `keep` already.
    """
    if keep is not None:
        keep = Path(keep)
        replay.ready(keep, dtypes)
    progress(f"reading {src if isinstance(src, str) else src.name}")
    source = src if isinstance(src, Source) else open_source(src, seed=seed)
    tokenizer = source.tokenizer()
    run, note = witness.of(source) if use_witness else (None, "the third witness was not asked")
    # Read once: several runs go over them, and a GGUF file is dequantized at every reading.
    tensors = {name: Tensor.of(tensor.read()) for name, tensor in source.tensors.items()}
    theirs, other = None, None
    if against is not None:
        progress(f"reading {against if isinstance(against, str) else against.name}")
        other = against if isinstance(against, Source) else open_source(against, seed=seed)
        theirs = other.spec, {n: Tensor.of(t.read()) for n, t in other.tensors.items()}
    report = decoder_check.check(
        source.spec,
        tensors,
        dtypes=dtypes,
        tokens=tokens,
        seed=seed,
        encode=None if tokenizer is None else lambda text: tokenizer.encode(text).ids,
        layout=layout,
        golden=source.golden,
        witness=run,
        injected=injected,
        against=theirs,
        look=look,
        keep=keep,
        progress=progress,
    )
    if export:
        _exported(report, source, tokens, seed, progress)
    if train and report.equal:
        training_check.train(
            report,
            source.spec,
            tensors,
            train,
            theirs=theirs,
            dtypes=dtypes,
            layout=layout,
            seed=seed,
            progress=progress,
        )
    elif train:
        report.notes.append("training was not compared: the models differ before the first step")
    report.notes += [*source.notes, note, *(replay.notes(keep, report) if keep else [])]
    report.environment["source"] = {"name": source.name, "kind": source.kind}
    if other is not None:
        report.environment["against"] = {"name": other.name, "kind": other.kind}
    return report


def _exported(
    report: Report, source: Source, tokens: int, seed: int, progress: Callable[[str], None]
) -> None:
    """Adds the checks of the export, or a note of why there are none."""
    if source.kind != "hf":
        return
    try:
        import transformers  # noqa: F401

        from jaxtwin.parity.compare import reexport
    except ImportError:
        report.notes.append("transformers is not installed: the export was not compared")
        return
    odd = witness.refuses(source.path)
    if odd or is_float8(source.config or {}):
        why = f"transformers does not read it: {odd}" if odd else "its float8 products are exported"
        report.notes.append(f"the export of the folder was not compared: {why}")
        return
    given = inputs(source.spec, tokens, seed)
    report.checks += reexport.checks(source, given, progress)
