"""Checking a source from end to end: open it, find its witness, compare, and tell what was done."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.parity.check import decoder_check, own_module_check
from jaxtwin.parity.checkpoints.dialects.hf import is_float8
from jaxtwin.parity.checkpoints.opened import Source
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.compare.options import CheckOptions
from jaxtwin.parity.diagnose import replay
from jaxtwin.parity.naming.names import Names, read
from jaxtwin.parity.report.results import Report
from jaxtwin.parity.sides import own_module
from jaxtwin.parity.sides.inputs import check_inputs
from jaxtwin.parity.sides.own_module import OwnModule
from jaxtwin.parity.sides.witness import find as find_witness
from jaxtwin.parity.sides.witness import refuses
from jaxtwin.parity.table.tensors import Tensor, Tensors
from jaxtwin.parity.training import training_check

EMPTY: Mapping[str, Any] = {}
NO_MODULE = (
    "only the reading of the spec was proven: a state dict has no forward; give your own module, "
    "too (--module my_model.py:GPT)"
)


def check(
    src: str | Source,
    *,
    witness: bool = True,
    export: bool = False,
    against: str | os.PathLike[str] | Source | None = None,
    training: training_check.Plan | None = None,
    reading: Mapping[str, Any] | None = None,
    module: Any = None,
    **changes: Any,
) -> Report:
    """Is the JAX model the PyTorch model? `src` is whatever the front door reads.

    `changes` are fields of CheckOptions; `seed` is that of a preset's random weights too. See
    `decoder_check.check`; a recorded .npz is compared with its own record too, and transformers
    takes part in float32 where it has the model. With `export` a Hugging Face folder is exported
    again, and transformers must take the one for the other (reexport.py). With `training` both
    sides are also trained on the same batches, where all the rest holds (training_check.py).
    `reading` are keywords of `open_source`: names, spec, ignore. `module` is a person's own
    (own_module.found), which JAX must be too; the names are those of its tensors.
    BadInput if the source cannot be read, or if something is at the folder `replay` already.
    """
    options = _options(changes)
    reading = reading or {}
    source = _opened(src, options, reading)
    tokenizer = source.tokenizer()
    encode = None if tokenizer is None else lambda text: tokenizer.encode(text).ids
    run, note = find_witness(source) if witness else (None, "no third witness: turned off")
    tensors = _read(source)
    user_module = _own(source, tensors, reading.get("names"), module)
    other = None if against is None else _opened(against, options)
    jax_side = None if other is None else (other.spec, _read(other))
    report = decoder_check.check(
        source.spec,
        tensors,
        options,
        encode=encode,
        golden=source.golden,
        witness=run,
        against=jax_side,
    )
    if export:
        _exported(report, source, options)
    if user_module is not None:
        inputs = check_inputs(source.spec, options.tokens, options.seed, encode)
        own_module_check.add(report, user_module, tensors, inputs, options)
    elif source.naming is not None:
        report.notes.append(NO_MODULE)
    if training:
        _trained(report, source.spec, tensors, jax_side, training, options)
    written = replay.notes(options.replay, report) if options.replay else []
    report.notes += [*source.notes, note, *written]
    report.environment["source"] = {"name": source.name, "kind": source.kind}
    if other is not None:
        report.environment["against"] = {"name": other.name, "kind": other.kind}
    return report


def _options(changes: dict[str, Any]) -> CheckOptions:
    options = replace(CheckOptions(), **changes)
    if options.replay is not None:
        folder = Path(os.fspath(options.replay))
        replay.ready(folder, options.dtypes)
        options = replace(options, replay=folder)
    return options


def _opened(
    src: str | os.PathLike[str] | Source, options: CheckOptions, reading: Mapping[str, Any] = EMPTY
) -> Source:
    if isinstance(src, Source):
        return src
    options.progress(f"reading {os.fspath(src)}")
    return open_source(src, seed=options.seed, **reading)


def _own(source: Source, tensors: Tensors, names: Names | None, module: Any) -> OwnModule | None:
    """The person's own module, run once: what is wrong with it is told before the work."""
    if module is None:
        return None
    if source.naming is None and names is None:
        raise BadInput("a module of your own needs --names too: which of its tensors is which")
    found = own_module.found(module, source.spec, source.naming or read(names or {}))
    found.logits(tensors, np.zeros((1, 2), np.int64))
    return found


def _read(source: Source) -> Tensors:
    """Its tensors, which several runs go over: read once where a reading costs more than that.

    A GGUF file is dequantized at every reading; a folder's files are in the system's cache.
    """
    if source.kind == "hf" and not is_float8(source.config or {}):
        return source.tensors
    return {name: Tensor.of(tensor.read()) for name, tensor in source.tensors.items()}


def _trained(
    report: Report,
    spec: Model,
    tensors: Tensors,
    jax_side: tuple[Model, Tensors] | None,
    plan: training_check.Plan,
    options: CheckOptions,
) -> None:
    """Trains both sides, or adds a note of why not."""
    if not report.equal:
        report.notes.append("training was not compared: the models differ before the first step")
        return
    training_check.train(
        report,
        spec,
        tensors,
        plan,
        theirs=jax_side,
        dtypes=options.dtypes,
        layout=options.layout,
        seed=options.seed,
        progress=options.progress,
    )


def _exported(report: Report, source: Source, options: CheckOptions) -> None:
    """Adds the checks of the export, or a note of why there are none."""
    if source.kind != "hf" or source.path is None:
        return
    try:
        import transformers  # noqa: F401

        from jaxtwin.parity.compare import reexport
    except ImportError:
        report.notes.append("transformers is not installed: the export was not compared")
        return
    odd = refuses(source.path)
    if odd or is_float8(source.config or {}):
        why = f"transformers does not read it: {odd}" if odd else "its float8 products are exported"
        report.notes.append(f"the export of the folder was not compared: {why}")
        return
    inputs = check_inputs(source.spec, options.tokens, options.seed)
    report.checks += reexport.checks(source, inputs, options.progress)
