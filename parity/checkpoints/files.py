"""Lazy readers: from a file's header, its tensors by name, not yet read.

Every problem of a file becomes a BadInput before any value is read: what a header may not say is
refused by the libraries that parse it (safetensors, gguf, NumPy, torch's weights-only loader, which
runs no code), and files that contradict one another are refused by this module.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtwin.configs import BadInput
from jaxtwin.parity.table.axis_ops import Index
from jaxtwin.parity.table.tensors import Tensor, listed

FLOATS: dict[str, np.dtype] = {  # in the order of safetensors' own files
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
# Of masks and tables that are no weights: read to be looked at, and refused as anything else.
OTHERS: dict[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
FP8 = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}  # values only together with their scales
PREFIXES = ("module.", "_orig_mod.")  # left by data-parallel wrappers and torch.compile
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order of preference


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, of which no key is given twice."""
    try:
        return parsed(path.read_bytes(), str(path))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error}") from None


def parsed(text: bytes | str, where: str) -> dict[str, Any]:
    """A JSON object. A key given twice is refused: readers disagree on which of them counts."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            twice = sorted({k for k, _ in pairs if sum(k == other for other, _ in pairs) > 1})
            raise BadInput(f"{where} gives {', '.join(twice)} more than once")
        return out

    try:
        data = json.loads(text, object_pairs_hook=once)
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadInput(f"{where} must hold a JSON object, got {type(data).__name__}")
    return data


def safetensors_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one .safetensors file, float8 ones (float8.py) among them."""
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="np")
        heads = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(head.get_shape()) for name, head in heads.items()}
        dtypes = {name: head.get_dtype() for name, head in heads.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise BadInput(f"{path} is not a sound safetensors file: {error}") from None
    with path.open("rb") as head:  # the library keeps the last of two entries of one name
        length = int.from_bytes(head.read(8), "little")
        entries = parsed(head.read(length), f"the header of {path}")
    known = {**FLOATS, **FP8, **OTHERS}
    odd = [f"  {name}: {dtype}" for name, dtype in dtypes.items() if dtype not in known]
    if odd:
        raise BadInput(
            f"{path} holds tensors that are not of a supported dtype ({', '.join(known)}):\n"
            + listed(odd)
        )

    def tensor(name: str) -> Tensor:
        """Read from the file itself: the library maps all of it, and has no float8 for NumPy."""
        shape, dtype = shapes[name], known[dtypes[name]]
        start, stop = (8 + length + at for at in entries[name]["data_offsets"])

        def dst() -> Path:
            try:
                size = path.stat().st_size
            except OSError as error:
                raise BadInput(f"{path} cannot be read: {error.strerror}") from None
            if size < stop:
                raise BadInput(f"{path} has become shorter since it was opened")
            return path

        def read() -> np.ndarray:
            raw = np.fromfile(dst(), np.uint8, stop - start, offset=start)
            return raw.view(dtype).reshape(shape)

        def slices(index: Index) -> np.ndarray:
            raw = np.memmap(dst(), np.uint8, "r", start, (stop - start,))
            return np.array(raw.view(np.ndarray).view(dtype).reshape(shape)[index])

        return Tensor(shape, dtype, read, slices)

    return {name: tensor(name) for name in heads}


def torch_load(path: Path) -> Any:
    """What a torch file holds, read by the weights-only loader: tensors, numbers, text; no code."""
    try:
        import torch
    except ImportError:
        raise BadInput(
            f"{path} is a torch file, and torch is not installed; pip install 'jaxtwin[torch]'"
        ) from None
    try:
        zipped = zipfile.is_zipfile(path)  # torch before 1.6 wrote no zip, which cannot be mapped
        with warnings.catch_warnings(action="ignore"):  # of pickles that it then refuses
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError:
        raise BadInput(
            f"{path} is no file of tensors alone. Loading whatever else it holds could run code "
            "that came with it, so nothing was loaded; save the weights alone, with "
            "torch.save(module.state_dict(), ...), or get them as .safetensors"
        ) from None
    except Exception as error:  # a damaged file raises many kinds
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f"{path} cannot be read as a torch file: {line}") from None


def torch_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a .bin or .pt file that holds a state dict and nothing else."""
    return torch_tensors(torch_load(path), path)


def torch_tensors(state: Any, path: Path) -> dict[str, Tensor]:
    import torch

    from jaxtwin.parity.table import bridge

    known = [*FLOATS.values(), *OTHERS.values()]
    dtypes = {getattr(torch, str(dtype)): dtype for dtype in known}
    odd = [
        f"  {name}: {getattr(value, 'dtype', type(value).__name__)}"
        for name, value in (state.items() if isinstance(state, Mapping) else [("(whole)", state)])
        if not (isinstance(name, str) and getattr(value, "dtype", None) in dtypes)
    ]
    if odd:
        raise BadInput(
            f"{path} is not a plain state dict of {', '.join(map(str, FLOATS.values()))} tensors:\n"
            + listed(odd)
        )

    def tensor(value: Any) -> Tensor:
        return Tensor(
            tuple(value.shape),
            dtypes[value.dtype],
            lambda: bridge.to_numpy(value),
            lambda index: bridge.to_numpy(value[index]),
        )

    strange = [f"  {name}: {what}" for name, value in state.items() if (what := unlike(value))]
    if strange:
        raise BadInput(f"{path} must hold dense tensors on the CPU only:\n{listed(strange)}")
    return {name: tensor(value) for name, value in state.items()}


def refuse_integers(tensors: Mapping[str, Tensor], where: str) -> None:
    """BadInput where what is left to be weights has another dtype than weights have."""
    odd = [f"  {n}: {t.dtype}" for n, t in tensors.items() if t.dtype in OTHERS.values()]
    if odd:
        raise BadInput(f"{where} holds tensors of no dtype of weights:\n{listed(odd)}")


def unlike(value: Any) -> str:
    """What keeps a torch tensor from being plain values in memory; empty if nothing does."""
    import torch

    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.device.type != "cpu":
        return f"on the device {value.device}"
    if value.layout is not torch.strided or value.is_nested:
        return "nested" if value.is_nested else str(value.layout)
    return "a view that negates or conjugates" if value.is_neg() or value.is_conj() else ""


def npz_file(path: Path) -> dict[str, Tensor]:
    """The arrays of an .npz, from the headers of its members."""
    try:
        file = np.load(path, allow_pickle=False)
        heads = {}
        for name in file.files:
            with file.zip.open(f"{name}.npy") as member:
                version = np.lib.format.read_magic(member)
                read = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }[version]
                heads[name] = read(member)
    except Exception as error:  # a damaged file raises many kinds
        raise BadInput(f"{path} cannot be read as an .npz: {error}") from None
    if bad := [name for name, (_, _, dtype) in heads.items() if dtype.hasobject]:
        raise BadInput(f"{path} holds pickled objects, which are never loaded: {', '.join(bad)}")

    def reader(name: str) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            try:
                return file[name]
            except (ValueError, OSError, zipfile.BadZipFile) as error:
                raise BadInput(f"{path}: {name} cannot be read: {error}") from None

        return read

    return {name: Tensor(shape, dtype, reader(name)) for name, (shape, _, dtype) in heads.items()}


OTHER_FRAMEWORKS = {
    "flax_model.msgpack": "weights of transformers' former Flax classes",
    "tf_model.h5": "TensorFlow's weights",
    "rust_model.ot": "weights of rust-bert",
}
OPENERS = {".safetensors": safetensors_file, ".bin": torch_file}


def folder_tensors(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a Hugging Face folder, single or sharded, and notes for the user.

    safetensors before .bin, and shards named by an index before a single file that lies beside
    them: the index says what belongs together, and a stale file does not.
    """
    for name in WEIGHTS:
        single, index = folder / name, folder / f"{name}.index.json"
        if not single.exists() and not index.exists():
            continue
        notes = []
        if index.exists():
            tensors, read_files = indexed(index)
            if single.exists():
                notes.append(
                    f"{single} is not read: {index.name} names the shards that are "
                    "(transformers would read the single file)"
                )
        else:
            tensors, read_files = OPENERS[single.suffix](single), {single.name}
        return clean(tensors, str(folder), notes), notes + unread(folder, read_files | {name})
    found = sorted(p.name for p in folder.iterdir() if p.suffix in OPENERS)
    if (
        other := [n for n, what in OTHER_FRAMEWORKS.items() if (folder / n).exists()]
    ) and not found:
        raise BadInput(
            f"{folder} holds {other[0]}, {OTHER_FRAMEWORKS[other[0]]}, which is not read; save the "
            "model as .safetensors (transformers: save_pretrained)"
        )
    also = f"; without an index {found[0]} cannot be known to be whole" if found else ""
    raise BadInput(f"{folder} has no {' and no '.join(WEIGHTS)}, single or with an index{also}")


def indexed(index: Path) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors of the shards that an index names, if index and shards agree on all of them."""
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(v, str) for v in where.values()):
        raise BadInput(f"{index} must map every tensor to its shard in weight_map")
    shards = sorted(set(where.values()))
    if bad := [s for s in shards if Path(s).name != s or Path(s).suffix not in OPENERS]:
        raise BadInput(f"{index} names shards that are no files beside it: {', '.join(bad)}")
    if missing := [s for s in shards if not (index.parent / s).is_file()]:
        raise BadInput(
            f"{index.parent} lacks {len(missing)} of the {len(shards)} shards that its index "
            f"names: {', '.join(missing)}; download them again"
        )
    held = {s: OPENERS[Path(s).suffix](index.parent / s) for s in shards}
    homes: dict[str, list[str]] = {}
    for shard, tensors in held.items():
        for name in tensors:
            homes.setdefault(name, []).append(shard)
    problems = [f"  {n}: in {', '.join(s)}; which counts?" for n, s in homes.items() if len(s) > 1]
    for name, shard in where.items():
        if name not in homes:
            problems.append(f"  {name}: in no shard, {shard} according to the index")
        elif shard not in homes[name]:
            problems.append(f"  {name}: in {homes[name][0]}, {shard} according to the index")
    problems += [f"  {n}: in {homes[n][0]}, not in the index" for n in homes.keys() - where.keys()]
    if problems:
        raise BadInput(f"{index} and its shards disagree:\n{listed(sorted(problems))}")
    return {name: held[shard][name] for name, shard in where.items()}, set(shards)


def unread(folder: Path, read_files: Iterable[str]) -> list[str]:
    """A note on every other weight file of the folder."""
    suffixes = {*OPENERS, ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx"}
    names = sorted(p.name for p in folder.iterdir() if p.suffix in suffixes)
    rest = [name for name in names if name not in read_files]
    return [f"not read: {', '.join(rest)} in {folder}"] if rest else []


def clean(tensors: Mapping[str, Tensor], where: str, notes: list[str]) -> dict[str, Tensor]:
    """The tensors under the names that wrappers around a model had put a prefix to.

    BadInput when two names become one, and on a name that could be taken for a path elsewhere.
    """
    out: dict[str, Tensor] = {}
    came: dict[str, str] = {}
    stripped = 0
    for name, tensor in tensors.items():
        if ".." in name or re.search(r"[/\\\0]", name):
            raise BadInput(f"{where}: {name!r} is no name of a tensor but a path; refused")
        bare = name
        while bare.startswith(PREFIXES):
            bare = bare.split(".", 1)[1]
        if bare in out:
            raise BadInput(f"{where}: {came[bare]!r} and {name!r} are the same tensor twice")
        stripped += bare != name
        out[bare], came[bare] = tensor, name
    if stripped:
        notes.append(f"{stripped} names had a wrapper's prefix ({' '.join(PREFIXES)}), now removed")
    return out
