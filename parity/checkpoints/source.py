"""SRC: whatever a person names a model by, opened from headers alone.

`open_source` takes the name of a preset or of an installed model package, a Hugging Face folder, a
folder of Meta's, a .gguf, a .pt of ours, a folder of ours or a golden .npz, and proves that its
tensors are those of its spec before any value is read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import PRESETS, BadInput, Model, nearest, preset
from jaxtwin.configs.presets import NOT_YET
from jaxtwin.configs.shrink import shrunk
from jaxtwin.parity.checkpoints import (
    dialects,
    files,
    float8,
    packages,
    readers,
    redundant,
    token_ids,
    tokenizer,
)
from jaxtwin.parity.checkpoints.dialects import HF_CONFIG, decoder_config
from jaxtwin.parity.checkpoints.packages import PACKAGES
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, backward, forward, moves, prove, src_shapes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IDS = "token_ids.json"  # the bos, eos and pad ids of a config.json, among the carried files
SHORT = {np.dtype(np.float16), files.FLOATS["BF16"]}
CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    token_ids.GENERATION,
    HF_CONFIG,
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
)


@dataclass(frozen=True)
class Source:
    """A model, opened: its spec, its tensors under torchref's names (not yet read), and the rest.

    `published` are the same tensors as the file names them and `dialect` says how; "torchref" for
    files of ours. `carry` are the files that travel with the weights, as bytes or as paths.
    """

    name: str
    kind: str  # preset | hf | meta | gguf | torch | jax | golden
    spec: Model
    tensors: Mapping[str, Tensor]
    published: Mapping[str, Tensor]
    origins: Mapping[str, str]  # torchref's name -> the published one it comes from
    dialect: str = "torchref"
    path: Path | None = None
    ids: Mapping[str, Any] = field(default_factory=dict)  # bos, eos, pad, as config.json has them
    eos: tuple[int, ...] = ()  # every id that ends a text
    notes: tuple[str, ...] = ()
    golden: dict[str, Any] | None = None  # a golden file's recorded results
    carrying: Callable[[], Mapping[str, Path | bytes]] = dict

    @functools.cached_property
    def carry(self) -> Mapping[str, Path | bytes]:
        return self.carrying()

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tensors; of a mixture, the narrowest that holds every value."""
        held = {tensor.dtype for tensor in self.tensors.values()}
        if held >= SHORT:  # each holds what the other cannot; NumPy knows no common one
            held = {*held - SHORT, np.dtype(np.float32)}
        return np.dtype(np.result_type(*held))

    @property
    def config(self) -> dict[str, Any] | None:
        """The config.json that the model came with, from wherever it came."""
        data = self.carry.get(HF_CONFIG)
        return None if data is None else files.parsed(_bytes(data), f"{HF_CONFIG} of {self.name}")

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None where there is none; BadInput if it cannot be built."""
        if (data := self.carry.get("tokenizer.json")) is None:
            return None
        return tokenizer.from_json(_bytes(data), f"tokenizer.json of {self.name}")


def open_source(src: str | os.PathLike[str], *, seed: int = 0) -> Source:
    """The model that SRC names. `seed` is for the random weights of a preset.

    BadInput on an unknown name (with the nearest), on a file that is damaged, incomplete or not
    supported, and on tensors that are not the spec's.
    """
    name = os.fspath(src)
    if name.startswith(("random:", "tiny:")) or (name in PRESETS and name not in PACKAGES):
        return _opened(name, seed)
    try:
        return _opened(name, seed)
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


def _opened(name: str, seed: int) -> Source:
    if name.startswith("random:"):
        return _preset(name, preset(name.removeprefix("random:")), seed)
    if name.startswith("tiny:"):
        return _preset(name, shrunk(preset(name.removeprefix("tiny:"))), seed)
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
            return _hf(path)
        if (path / "params.json").exists():
            return _meta(path)
        raise BadInput(
            f"{path} holds no config.json (Hugging Face), params.json (Meta) or jaxtwin.json (ours)"
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


def _preset(name: str, spec: Model, seed: int, notes: tuple[str, ...] = ()) -> Source:
    """Random weights of a seed, drawn when the first of them is read."""
    from flax import nnx

    from jaxtwin import jaxmodel
    from jaxtwin.jaxmodel import axes

    @functools.cache
    def values() -> dict[str, Any]:
        return axes.arrays(jaxmodel.Decoder(spec, rngs=nnx.Rngs(seed), layout="unroll"))

    def read_one(path: str) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(values()[path])

    shapes = axes.arrays(jaxmodel.abstract(spec, layout="unroll"))
    arrays = {p: Tensor(tuple(x.shape), np.dtype(x.dtype), read_one(p)) for p, x in shapes.items()}
    tensors = backward(decoder_table.rows(spec, "unroll"), arrays, name)
    all_notes = (f"random weights of seed {seed}", *notes)
    return Source(name, "preset", spec, tensors, tensors, {n: n for n in tensors}, notes=all_notes)


def _hf(folder: Path) -> Source:
    where = folder / "config.json"
    outer = files.read_json(where)
    dialect, read = dialects.of_model_type(outer, str(where))
    config, notes = decoder_config(outer, str(where))[0], list[str]()
    spec = read(outer, str(where), notes)
    published, more = files.folder_tensors(folder)
    notes += more
    published = float8.dequantized(published, outer, str(folder), notes)
    published = redundant.deduplicated(published, spec, dialect, str(folder), notes)
    tensors = forward(dialect.rows(spec), published, str(folder))
    stored = sorted({str(tensor.dtype) for tensor in tensors.values()})
    stated = config.get("dtype", config.get("torch_dtype"))
    if stated is not None and stored != [stated]:
        notes.append(
            f"{where} says {stated}, and the tensors are {' and '.join(stored)}, which are used"
        )
    carry = {name: folder / name for name in CARRIED if (folder / name).is_file()}
    carry[HF_CONFIG] = where
    ids = token_ids.from_config(config, spec, str(where), notes)
    return Source(
        name=str(folder),
        kind="hf",
        spec=spec,
        tensors=tensors,
        published=published,
        origins=_origins(dialect.rows(spec)),
        dialect=dialect.name,
        path=folder,
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
    carry = {name: folder / name for name in CARRIED if (folder / name).is_file()}
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
    if lost := sorted(carry.keys() - {IDS, *CARRIED}):
        all_notes.append(f"files that are not known and do not travel along: {', '.join(lost[:8])}")
    rest = {name: data for name, data in carry.items() if name in CARRIED}
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


def _bytes(data: Path | bytes) -> bytes:
    return data if isinstance(data, bytes) else data.read_bytes()


def _generation(carry: Mapping[str, Path | bytes]) -> bytes | None:
    data = carry.get(token_ids.GENERATION)
    return None if data is None else _bytes(data)


def _mixed(tensors: Mapping[str, Tensor], notes: list[str]) -> tuple[str, ...]:
    """The notes, with one more where the tensors are not all of one dtype."""
    held = sorted({str(tensor.dtype) for tensor in tensors.values()})
    return (*notes, *([f"the tensors mix {' and '.join(held)}"] if len(held) > 1 else []))
