"""Conversion: the same tensors under other names, in other files, and not a value changed.

The proof runs first, on names, shapes and dtypes alone: every source tensor is used exactly once,
every target is filled exactly once, and the way back gives the names and shapes it started from.
Then the tensors are pulled through one at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput
from jaxtwin.configs.spec import to_json
from jaxtwin.parity.checkpoints import state_dict, writers
from jaxtwin.parity.checkpoints.consolidated import EMBEDDING, HEAD
from jaxtwin.parity.checkpoints.dialects import (
    HF_CONFIG,
    META_LLAMA,
    family_of,
    to_hf,
    to_meta,
)
from jaxtwin.parity.checkpoints.loading import jax_tensors, proven_back
from jaxtwin.parity.checkpoints.opened import IDS, Source
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.checkpoints.writers import nbytes, raw
from jaxtwin.parity.naming.names import Naming, read
from jaxtwin.parity.table import axis_ops, decoder_table
from jaxtwin.parity.table.row import Move, Row
from jaxtwin.parity.table.tensors import Tensor, Tensors, backward, forward, moves

Progress = Callable[[str], None]


def convert(
    src: str | os.PathLike[str] | Source,
    dst: str | os.PathLike[str],
    to: str = "jax",
    *,
    layout: str = "scan",
    dry_run: bool = False,
    seed: int = 0,
    shard: int = writers.SHARD,
    sha256: bool = False,
    reading: Mapping[str, Any] | None = None,
    progress: Progress = lambda step: None,
) -> dict[str, Any]:
    """Writes SRC in one of four formats.

    A checkpoint of ours ("jax"), a Hugging Face folder ("hf"), one of Meta's ("meta"), a .pt
    ("torch").

    `reading` are keywords of `open_source`: names, spec, ignore. The names are those that a .pt is
    written under, where SRC is no state dict that they are for.

    Returns a JSON-able report: source, target, spec, tensors, bytes, dtype, notes, and where
    `sha256` is asked for (a third of the work) that of every tensor under torchref's name; with
    `dry_run` instead the plan, from which source tensors each target tensor is made, and nothing is
    written. `layout` is that of a jax target; `seed` is for a preset's random weights; `shard` is
    the size limit of one HF file.

    In memory at a time: a few tensors; the whole model for torch and meta, because torch writes
    from memory. Of a checkpoint that a training run wrote, a stack of layers is read whole.
    BadInput on anything that is wrong with SRC or DST; then nothing is written.
    """
    if to not in TARGETS:
        raise BadInput(f"unknown target {to!r}; known: {', '.join(TARGETS)}")
    dst = Path(dst)
    writers.refuse_taken(dst)
    source = src if isinstance(src, Source) else open_source(src, seed=seed, **(reading or {}))
    names = (reading or {}).get("names")
    progress("proving that every tensor has its place")
    if names is None or source.naming is not None:
        plan = TARGETS[to](source, dst, layout, shard)
    else:
        plan = to_state_dict(source, dst, to, read(names))
    target = {"path": str(dst), "to": to} | ({"layout": layout} if to == "jax" else {})
    report = {**described(source, plan), "target": target, "dry_run": dry_run}
    if dry_run:
        return {**report, "plan": planned(source, plan)}
    seen: dict[str, str] = {}
    with writers.Behind() as behind:

        def hashed(name: str, x: np.ndarray) -> np.ndarray:
            if x.nbytes <= writers.PIECE:  # once for the hash and for the writer
                x = axis_ops.ordered(x)
            behind.call(lambda: seen.update({name: _sha256(x)}))
            return x

        plan.write(_watched(source, hashed if sha256 else None, progress), carried(source))
    return {**report, "sha256": {name: seen[name] for name in source.tensors}} if sha256 else report


def described(source: Source, plan: Plan) -> dict[str, Any]:
    """What is converted, JSON-able."""
    return {
        "source": {
            "name": source.name,
            "kind": source.kind,
            "path": str(source.path) if source.path else None,
            "dialect": source.dialect,
        },
        "spec": to_json(source.spec),
        "tensors": len(source.tensors),
        "bytes": sum(map(nbytes, source.tensors.values())),
        "dtype": str(source.dtype),
        "notes": [*source.notes, *plan.notes],
    }


def hashes(tensors: Tensors) -> dict[str, str]:
    """The sha256 of every tensor's bytes, in C order."""
    return {name: _sha256(tensor.read()) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Step:
    """One target tensor and the tensors (by torchref's names) that it is made of."""

    target: str
    shape: tuple[int, ...]
    pattern: str
    made_of: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A proven way to a target, and how to write it, given the tensors and carried files."""

    steps: Sequence[Step]
    write: Callable[[Tensors, Mapping[str, bytes]], None]
    notes: tuple[str, ...] = ()


def to_jax(source: Source, dst: Path, layout: str, shard: int) -> Plan:
    if layout not in decoder_table.LAYOUTS:
        raise BadInput(f"unknown layout {layout!r}; known: {', '.join(decoder_table.LAYOUTS)}")
    rows = decoder_table.rows(source.spec, layout)
    jax_tensors(source, layout)

    def write(tensors: Tensors, carry: Mapping[str, bytes]) -> None:
        from jaxtwin.jaxmodel import checkpoint

        arrays = forward(rows, tensors, source.name)
        checkpoint.write_lazily(dst, source.spec, layout, arrays, carry=carry)

    return Plan([Step(m.dst, m.dst_shape, m.pattern, m.src) for m in moves(rows)], write)


def to_hf_folder(source: Source, dst: Path, layout: str, shard: int) -> Plan:
    notes: list[str] = []
    config = to_hf(source.spec, str(source.dtype), source.ids, source.config, notes)
    dialect = family_of(config, "the config to be written").dialect
    order = {name: at for at, name in enumerate(source.tensors)}  # a stack's parts stay together
    rows = sorted(dialect.rows(source.spec), key=lambda row: order[moves([row])[0].dst])
    published = backward(rows, source.tensors, source.name)
    proven_back(forward(rows, published, source.name), source)
    other_pairs = {b.attn.rope.pairs for b in source.spec.layers if b.attn.rope} - {dialect.pairs}
    if other_pairs:
        how = f"from {''.join(other_pairs)} to {dialect.pairs} rotary pairs"
        notes.append(f"rows of Q and K are reordered {how}")

    def write(tensors: Tensors, carry: Mapping[str, bytes]) -> None:
        files = {name: data for name, data in carry.items() if name not in (IDS, HF_CONFIG)}
        writers.write_hf(dst, config, backward(rows, tensors, source.name), files, shard=shard)

    return Plan(_of_published(rows), write, tuple(notes))


def _of_published(rows: Sequence[Row]) -> list[Step]:
    """The steps to published names, some of which may hold several tensors of ours."""
    parts: dict[str, list[Move]] = {}
    for move in moves(rows):
        parts.setdefault(move.src[0], []).append(move)
    return [
        Step(
            name,
            group[0].src_shape,
            ", ".join(dict.fromkeys(axis_ops.flip(m.pattern) for m in group)),
            tuple(m.dst for m in group),
        )
        for name, group in parts.items()
    ]


def refuse_other_suffix(dst: Path) -> None:
    """BadInput for what is no name of a torch file, or where torch is not installed."""
    if dst.suffix not in (".pt", ".pth"):
        raise BadInput(f"a torch checkpoint is one file: name it {dst}.pt")
    needs_torch(dst)


def needs_torch(dst: Path) -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise BadInput(f"{dst} needs torch: pip install 'jaxtwin[torch]'") from None


def to_meta_folder(source: Source, dst: Path, layout: str, shard: int) -> Plan:
    needs_torch(dst)
    notes: list[str] = []
    params = to_meta(source.spec, notes)
    rows = META_LLAMA.rows(source.spec)
    published = backward(rows, source.tensors, source.name)
    proven_back(forward(rows, published, source.name), source)

    def write(tensors: Tensors, carry: Mapping[str, bytes]) -> None:
        named = backward(rows, tensors, source.name)
        if source.spec.tied:  # Meta's code has two weights there, and looks for both
            named[HEAD] = named[EMBEDDING]
        files = {name: data for name, data in carry.items() if name not in (IDS, HF_CONFIG)}
        writers.write_meta(dst, params, named, files)

    return Plan(_of_published(rows), write, tuple(notes))


def to_torch(source: Source, dst: Path, layout: str, shard: int) -> Plan:
    refuse_other_suffix(dst)

    def write(tensors: Tensors, carry: Mapping[str, bytes]) -> None:
        writers.write_pt(dst, source.spec, tensors, carry)

    unmoved = [
        Step(name, move.src_shape, " -> ".join([axis_ops.sides(move.pattern)[0]] * 2), (name,))
        for move in moves(decoder_table.rows(source.spec))
        for name in move.src
    ]
    return Plan(unmoved, write)


def to_state_dict(source: Source, dst: Path, to: str, naming: Naming) -> Plan:
    """A plain state dict in a .pt, under a person's own names."""
    if to != "torch":
        raise BadInput(
            f"{naming.where} is for a state dict of your own; {source.name} is none, and --to {to} "
            "writes none (--to torch does)"
        )
    refuse_other_suffix(dst)
    rows = naming.rows(source.spec)
    proven_back(forward(rows, backward(rows, source.tensors, source.name), source.name), source)

    def write(tensors: Tensors, carry: Mapping[str, bytes]) -> None:
        named = state_dict.released(tensors, source.spec, naming, source.name)
        writers.write_state_dict(dst, named)

    notes = (f"a plain state dict under the names of {naming.where}: no tokenizer goes along",)
    return Plan(_of_published(rows), write, notes)


TARGETS: dict[str, Callable[[Source, Path, str, int], Plan]] = {
    "jax": to_jax,
    "hf": to_hf_folder,
    "meta": to_meta_folder,
    "torch": to_torch,
}


def planned(source: Source, plan: Plan) -> list[dict[str, Any]]:
    """Every target tensor with what it is made of in the file, JSON-able."""
    return [
        {
            "source": list(dict.fromkeys(source.origins[name] for name in step.made_of)),
            "torchref": list(step.made_of),
            "pattern": step.pattern,
            "target": step.target,
            "shape": list(step.shape),
            "dtype": str(source.tensors[step.made_of[0]].dtype),
        }
        for step in plan.steps
    ]


def _watched(
    source: Source, also: Callable[[str, np.ndarray], np.ndarray] | None, progress: Progress
) -> dict[str, Tensor]:
    """The source's tensors; reading one says how far along it is, and once does `also`."""
    total, read_before = len(source.tensors), set[str]()

    def watch(name: str, tensor: Tensor) -> Tensor:
        def read() -> np.ndarray:
            x = tensor.read()
            if (x.shape, x.dtype) != (tensor.shape, tensor.dtype):
                raise BadInput(f"{source.name}: {name} is not what its file's header says it is")
            if name not in read_before:  # a fused tensor's part may be asked for again
                read_before.add(name)
                if len(read_before) % max(1, total // 20) == 0:
                    progress(f"{len(read_before)} of {total} tensors")
                x = also(name, x) if also else x
            return x

        return replace(tensor, read=read, slices=None)

    return {name: watch(name, tensor) for name, tensor in source.tensors.items()}


def carried(source: Source) -> dict[str, bytes]:
    """The carried files' bytes, and the config's token ids as one more file."""
    out = {n: d if isinstance(d, bytes) else d.read_bytes() for n, d in source.carry.items()}
    return {**out, IDS: json.dumps(dict(source.ids)).encode()} if source.ids else out


def _sha256(x: np.ndarray) -> str:
    digest = hashlib.sha256()
    for piece in raw(x):
        digest.update(piece)
    return digest.hexdigest()
