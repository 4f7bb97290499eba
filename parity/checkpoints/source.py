"""SRC: whatever a person names a model by, opened from headers alone.

`open_source` takes the name of a preset or of an installed model package, a Hugging Face folder, a
folder of Meta's, a .gguf, a .pt of ours, a folder of ours or a golden .npz, and proves that its
tensors are those of its spec before any value is read.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from jaxtwin.configs import PRESETS, BadInput, Model, nearest, preset
from jaxtwin.configs.presets import NOT_YET
from jaxtwin.configs.shrink import shrunk
from jaxtwin.configs.user_code import is_reference
from jaxtwin.parity.checkpoints import (
    dialects,
    files,
    float8,
    packages,
    readers,
    redundant,
    state_dict,
    token_ids,
    tokenizer,
)
from jaxtwin.parity.checkpoints.dialects import HF_CONFIG, decoder_config, family_of, from_hf
from jaxtwin.parity.checkpoints.dialects.hf import text_part, text_tensors
from jaxtwin.parity.checkpoints.opened import IDS, Source, beside, content, is_side
from jaxtwin.parity.checkpoints.packages import PACKAGES
from jaxtwin.parity.naming.names import Names, Naming, spec_named
from jaxtwin.parity.naming.names import read as read_names
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, backward, forward, moves, prove, src_shapes


def open_source(
    src: str | os.PathLike[str],
    *,
    seed: int = 0,
    names: Names | None = None,
    spec: Model | str | None = None,
    ignore: Sequence[str] = (),
) -> Source:
    """The model that SRC names. `seed` is for the random weights of a preset.

    A file of tensors under a person's own names (a state dict) needs `names` that say which is
    which (parity/naming/names.py), and the `spec` where those do not give it. `ignore` are keys of
    a config.json that are not known here and, so the user says, change nothing that is computed.
    BadInput on an unknown name (with the nearest), on a file that is damaged, incomplete or not
    supported, and on tensors that are not the spec's.
    """
    name = os.fspath(src)
    naming = None if names is None else read_names(names)  # it may register parts, so it is first
    own_names = naming is not None and Path(name).suffix in state_dict.SUFFIXES
    if naming is not None and own_names and not readers.is_ours(Path(name)):
        return _own_names(Path(name), naming, spec)
    if spec is not None:
        raise BadInput(f"{name} says itself what model it is; a spec is for a state dict")
    if name.startswith(("random:", "tiny:")) or (name in PRESETS and name not in PACKAGES):
        return _opened(name, seed, ignore)
    try:
        return _opened(name, seed, ignore)
    except (BadInput, ImportError, AssertionError):
        raise
    except Exception as error:  # an odd file can make any library stumble
        raise BadInput(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def _models_in(folder: Path) -> list[str]:
    """What in a folder may be a model, for a hint."""
    try:
        return [p.name for p in folder.iterdir() if p.is_dir() or p.suffix in FILES]
    except OSError:
        return []


def _opened(name: str, seed: int, ignore: Sequence[str]) -> Source:
    if name.startswith("random:"):
        return _preset(name, spec_named(name.removeprefix("random:")), seed)
    if name.startswith("tiny:"):
        return _preset(name, shrunk(spec_named(name.removeprefix("tiny:"))), seed)
    if is_reference(name):
        return _preset(name, spec_named(name), seed)
    taken = name in PACKAGES or name in PRESETS
    hint = f"a file {name!r} exists too and is not read; write ./{name} for it"
    notes = (hint,) if taken and Path(name).exists() else ()
    if name in PACKAGES:
        return _gguf(packages.gguf_in(name), name, notes)
    if name in PRESETS:
        return _preset(name, preset(name), seed, notes)
    path = Path(name)
    if path.is_dir():
        if (path / "jaxtwin.json").exists():
            return _jax(path)
        if (path / "config.json").exists():
            return _hf(path, ignore)
        if (path / "params.json").exists():
            return _meta(path)
        if (path / "adapter_config.json").exists():
            raise BadInput(
                f"{path} is an adapter (LoRA or the like), and no whole model: merge it into its "
                "base model first (PEFT: model.merge_and_unload())"
            )
        raise BadInput(
            f"{path} holds no config.json (Hugging Face), params.json (Meta, Mistral) or "
            "jaxtwin.json (ours)"
            + "".join(f"; give the file itself: {p}" for p in sorted(path.glob("*.gguf"))[:1])
        )
    if not path.exists():
        if name in NOT_YET:
            preset(name)  # says what is missing
        if len(path.parts) > 1 or name.startswith("."):
            alike = get_close_matches(path.name, _models_in(path.parent), n=1)
            hint = f"did you mean {path.with_name(alike[0])}?" if alike else "check the path"
            hub = len(path.parts) == 2 and not path.parent.exists()
            more = " (jaxtwin downloads nothing: fetch a hub's model first)" if hub else ""
            raise BadInput(f"there is no file and no folder {name!r}; {hint}{more}")
        known = {*PRESETS, *PACKAGES, *_models_in(path.parent)}
        raise BadInput(f"there is no model and no file called {name!r}; {nearest(name, known)}")
    if path.suffix in FILES:
        return FILES[path.suffix](path)
    raise BadInput(
        f"{path} is not a supported model file ({', '.join(FILES)}); "
        "of a Hugging Face model give the folder"
    )


def _own_names(path: Path, naming: Naming, spec: Model | str | None) -> Source:
    """A state dict as somebody's own code saved it."""
    notes: list[str] = []
    if isinstance(spec, str):
        spec = spec_named(spec)
    spec = spec or naming.spec
    if spec is None:
        raise BadInput(
            f"{naming.where} names the tensors of {path}, and nothing says what model they are of: "
            'add spec = "my_specs.py:mine" to it, or give --spec'
        )
    if not path.exists():
        raise BadInput(f"there is no file {str(path)!r}")
    tensors, published = state_dict.mapped(
        state_dict.opened(path, notes), spec, naming, str(path), notes
    )
    return Source(
        name=str(path),
        kind="state dict",
        spec=spec,
        tensors=tensors,
        published=published,
        origins=_origins(naming.rows(spec)),
        dialect=naming.where,
        path=path,
        notes=_mixed(tensors, notes),
        naming=naming,
    )


def _preset(name: str, spec: Model, seed: int, notes: tuple[str, ...] = ()) -> Source:
    """Random weights of a seed, drawn when the first of them is read."""

    @functools.cache
    def values() -> dict[str, Any]:
        from flax import nnx

        from jaxtwin import jaxmodel
        from jaxtwin.jaxmodel import axes

        return axes.arrays(jaxmodel.Decoder(spec, rngs=nnx.Rngs(seed), layout="unroll"))

    def read_one(path: str) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(values()[path])

    rows = decoder_table.rows(spec, "unroll")
    float32 = np.dtype("float32")
    arrays = {m.dst: Tensor(m.dst_shape, float32, read_one(m.dst)) for m in moves(rows)}
    tensors = backward(rows, arrays, name)
    all_notes = (f"random weights of seed {seed}", *notes)
    return Source(name, "preset", spec, tensors, tensors, {n: n for n in tensors}, notes=all_notes)


def _hf(folder: Path, ignore: Sequence[str]) -> Source:
    where = folder / "config.json"
    outer, notes = files.read_json(where), list[str]()
    published, more = files.folder_tensors(folder)
    notes += more
    text = text_part(outer, str(where))
    if text is not None:
        published = text_tensors(published, notes)
        outer = text
    dialect = family_of(outer, str(where)).dialect
    config = decoder_config(outer, str(where))[0]
    spec = from_hf(outer, str(where), notes, ignore)
    published = float8.dequantized(published, outer, str(folder), notes)
    published = redundant.deduplicated(published, spec, dialect, str(folder), notes)
    tensors = forward(dialect.rows(spec), published, str(folder))
    stored = sorted({str(tensor.dtype) for tensor in tensors.values()})
    stated = config.get("dtype", config.get("torch_dtype"))
    if stated is not None and stored != [stated]:
        notes.append(
            f"{where} says {stated}, and the tensors are {' and '.join(stored)}, which are used"
        )
    kept = where if text is None else json.dumps(outer).encode()
    carry: dict[str, Path | bytes] = {**beside(folder, notes), HF_CONFIG: kept}
    ids = token_ids.from_config(config, spec, str(where), notes)
    return Source(
        name=str(folder),
        kind="hf",
        spec=spec,
        tensors=tensors,
        published=published,
        origins=_origins(dialect.rows(spec)),
        dialect=dialect.name,
        path=folder if text is None else None,
        ids=ids,
        eos=token_ids.eos_ids(ids, _generation(carry), spec, str(folder), notes),
        notes=_mixed(tensors, notes),
        carrying=lambda: carry,
    )


def _meta(folder: Path) -> Source:
    from jaxtwin.parity.checkpoints import consolidated

    notes: list[str] = []
    spec, held = consolidated.opened(folder, notes)
    rows = dialects.META_LLAMA.rows(spec)
    published = redundant.deduplicated(held, spec, dialects.META_LLAMA, str(folder), notes)
    tensors = forward(rows, published, str(folder))
    carry = beside(folder, notes)
    return Source(
        name=str(folder),
        kind="meta",
        spec=spec,
        tensors=tensors,
        published=published,
        origins=_origins(rows),
        dialect=dialects.META_LLAMA.name,
        path=folder,
        notes=_mixed(tensors, notes),
        carrying=lambda: carry,
    )


def _gguf(path: Path, name: str | None = None, notes: tuple[str, ...] = ()) -> Source:
    metadata, published = readers.gguf_file(path)
    dialect, read = dialects.of_architecture(metadata, str(path))
    all_notes = [*notes]
    spec = read(metadata, published, str(path), all_notes)
    known = (f"{metadata['general.architecture']}.", *dialects.NAMESPACES)
    strange = [key for key in metadata if not key.startswith(known)]
    if strange:
        all_notes.append(f"metadata that nothing reads: {', '.join(sorted(strange)[:8])}")
    published = redundant.deduplicated(published, spec, dialect, str(path), all_notes)
    tensors = forward(dialect.rows(spec), published, str(path))
    ids, eos = token_ids.from_gguf(metadata, spec, str(path), all_notes)
    try:  # weights are of use without a tokenizer
        carry: Mapping[str, bytes] = tokenizer.files_from_gguf(metadata, str(path), spec.vocab)
    except BadInput as error:
        carry = {}
        all_notes.append(f"no tokenizer travels along: {error}")
    return Source(
        name=name or str(path),
        kind="gguf",
        spec=spec,
        tensors=tensors,
        published=published,
        origins=_origins(dialect.rows(spec)),
        dialect=dialect.name,
        path=path,
        ids=ids,
        eos=eos,
        notes=tuple(all_notes),
        carrying=lambda: carry,
    )


def _pt(path: Path) -> Source:
    spec, tensors, carry = readers.pt_file(path)
    prove(src_shapes(decoder_table.rows(spec)), tensors, str(path))
    return _ours("torch", path, spec, tensors, carry, {name: name for name in tensors})


def _jax(folder: Path) -> Source:
    from jaxtwin.jaxmodel import checkpoint

    saved, tensors = readers.jax_folder(folder)
    carry = checkpoint.carried(folder)
    origins = {n: m.dst for m in moves(decoder_table.rows(saved.spec, saved.layout)) for n in m.src}
    notes = () if saved.step == 0 else (f"step {saved.step}, the newest complete one",)
    return _ours("jax", folder, saved.spec, tensors, carry, origins, notes)


def _ours(
    kind: str,
    path: Path,
    spec: Model,
    tensors: Mapping[str, Tensor],
    carry: Mapping[str, bytes],
    origins: Mapping[str, str],
    notes: tuple[str, ...] = (),
) -> Source:
    """A model in a format of ours, with the token ids among its carried files."""
    all_notes = [*notes]
    ids: dict[str, Any] = {}
    if IDS in carry:
        ids = token_ids.from_config(
            files.parsed(carry[IDS], f"{IDS} of {path}"), spec, f"{IDS} of {path}", all_notes
        )
    rest = {n: data for n, data in carry.items() if n == HF_CONFIG or (n != IDS and is_side(n))}
    if lost := sorted(carry.keys() - rest.keys() - {IDS}):
        all_notes.append(f"no side files, and they do not travel along: {', '.join(lost[:8])}")
    return Source(
        name=str(path),
        kind=kind,
        spec=spec,
        tensors=tensors,
        published=tensors,
        origins=origins,
        path=path,
        ids=ids,
        eos=token_ids.eos_ids(ids, _generation(rest), spec, str(path), all_notes),
        notes=_mixed(tensors, all_notes),
        carrying=lambda: rest,
    )


def _golden(path: Path) -> Source:
    """A recorded model (see tests/golden/README.md); BadInput also when a record is missing."""
    from jaxtwin.parity.checkpoints.dialects import REFERENCE, from_reference

    weights, grads, recorded = readers.golden_file(path)
    config = files.parsed(str(recorded["config"].read()), f"config of {path}")
    spec = from_reference(config, f"config of {path}")
    rows, notes = REFERENCE.rows(spec), list[str]()
    published = redundant.deduplicated(weights, spec, REFERENCE, str(path), notes)
    named = forward(rows, grads, f"the gradients of {path}")
    results = readers.golden_records(recorded, spec, str(path))
    return Source(
        name=str(path),
        kind="golden",
        spec=spec,
        tensors=forward(rows, published, str(path)),
        published=published,
        origins=_origins(rows),
        dialect=REFERENCE.name,
        path=path,
        notes=tuple(notes),
        golden={**results, "grads": {name: grad.read() for name, grad in named.items()}},
    )


FILES: dict[str, Callable[[Path], Source]] = {
    ".gguf": _gguf,
    ".pt": _pt,
    ".pth": _pt,
    ".npz": _golden,
}


def _origins(rows: Sequence[Row]) -> dict[str, str]:
    """The published name of every tensor, where no two are fused into one."""
    return {move.dst: move.src[0] for move in moves(rows)}


def _generation(carry: Mapping[str, Path | bytes]) -> bytes | None:
    data = carry.get(token_ids.GENERATION)
    return None if data is None else content(data)


def _mixed(tensors: Mapping[str, Tensor], notes: list[str]) -> tuple[str, ...]:
    """The notes, with one more where the tensors are not all of one dtype."""
    held = sorted({str(tensor.dtype) for tensor in tensors.values()})
    return (*notes, *([f"the tensors mix {' and '.join(held)}"] if len(held) > 1 else []))
