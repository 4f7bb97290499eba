"""Lazy readers, continued: GGUF files, and models at rest of our own."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.configs.atomic_write import refuse_names
from jaxtwin.configs.spec import from_json
from jaxtwin.parity.checkpoints import files
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.axis_ops import Index
from jaxtwin.parity.table.tensors import Tensor, backward


@functools.lru_cache(maxsize=1)
def gguf_reader(path: str, changed: int) -> Any:
    """The `gguf` package's reader of a file that was changed then: it goes over a vocabulary piece
    by piece, which takes four seconds for 49,152."""
    import gguf

    return gguf.GGUFReader(path)


def gguf_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A GGUF's metadata, and its tensors as float32 (dequantized where they are quantized).

    The `gguf` package reads and dequantizes. BadInput on a damaged file and, from the header alone,
    on a tensor type that it cannot dequantize.
    """
    import gguf

    try:
        reader = gguf_reader(str(path), path.stat().st_mtime_ns)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the package raises many kinds on a damaged file
        raise BadInput(f"{path} cannot be read as GGUF: {error}") from None
    kinds: dict[Any, list[str]] = {}
    for tensor in reader.tensors:
        kinds.setdefault(tensor.tensor_type, []).append(tensor.name)
    if odd := [
        f"  {kind.name}: {', '.join(names[:4])}"
        for kind, names in kinds.items()
        if not _dequantizable(kind)
    ]:
        raise BadInput(f"{path} holds tensors that cannot be dequantized:\n" + "\n".join(odd))
    _in_line(reader, path)

    def lazy(tensor: Any) -> Tensor:
        shape = tuple(map(int, reversed(tensor.shape.tolist())))  # GGUF counts from the last axis

        def read() -> np.ndarray:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            return np.array(values, np.float32).reshape(shape)

        def slices(index: Index) -> np.ndarray:  # whole rows: a row's blocks belong together
            rows = gguf.dequantize(tensor.data[index[:-1]], tensor.tensor_type)
            return np.array(rows[..., index[-1]], np.float32)

        return Tensor(shape, np.dtype(np.float32), read, slices)

    return metadata, {tensor.name: lazy(tensor) for tensor in reader.tensors}


def _in_line(reader: Any, path: Path) -> None:
    """A BadInput unless the tensors lie one behind another, as llama.cpp asks for too.

    What one tensor's entry says wrongly of its type or place is found in no other way.
    """
    due = int(reader.data_offset)
    for tensor in sorted(reader.tensors, key=lambda tensor: int(tensor.data_offset)):
        at = int(tensor.data_offset)
        if at != due:
            raise BadInput(
                f"{path}: {tensor.name} begins at byte {at}, and the one before it leaves off for "
                f"{due}; the file is damaged"
            )
        end = at + int(tensor.n_bytes)
        due = -(-end // reader.alignment) * reader.alignment


def _dequantizable(kind: Any) -> bool:
    """Whether the package can, tried on one block of zeros."""
    import gguf

    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def is_ours(path: Path) -> bool:
    """Whether a torch file says of itself what model it is."""
    if path.suffix not in (".pt", ".pth") or not path.exists():
        return False
    data = files.torch_load(path)
    return isinstance(data, dict) and data.keys() >= {"format", "spec", "state"}


def pt_file(path: Path) -> tuple[Model, dict[str, Tensor], dict[str, bytes]]:
    """A .pt of ours: {"format": 1, "spec": {...}, "state": {...}, "files": {...}}.

    The tensors have torchref's names; `files` (the tokenizer, ...) are byte tensors by file name.
    """
    data = files.torch_load(path)
    if not isinstance(data, dict) or "spec" not in data or "state" not in data:
        raise BadInput(
            f"{path} does not say what model its tensors are of. For a state dict of your own say "
            "which tensor is which, --names my_names.toml (docs/own-names.md; `jaxtwin names` "
            "proposes it); a published model's weights go in a folder, as pytorch_model.bin beside "
            "their config.json"
        )
    if type(data.get("format")) is not int or data["format"] != 1:
        raise BadInput(f"{path}: format {data.get('format')!r} is not known; this version reads 1")
    if odd := sorted(map(str, data.keys() - {"format", "spec", "state", "files"})):
        raise BadInput(f"{path} holds what nothing would read: {', '.join(odd)}")
    tensors = files.torch_tensors(data["state"], path)
    files.refuse_integers(tensors, str(path))
    try:
        json.dumps(data["spec"])
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: spec must be plain data, as JSON has it: {error}") from None
    return from_json(data["spec"], str(path)), tensors, _bytes_by_name(data.get("files", {}), path)


def _bytes_by_name(carried: Any, path: Path) -> dict[str, bytes]:
    import torch

    if not isinstance(carried, Mapping) or not all(
        isinstance(name, str) and not files.unlike(value) and value.dtype == torch.uint8
        for name, value in carried.items()
    ):
        raise BadInput(f"{path}: files must hold byte tensors by file name")
    refuse_names(carried)
    return {name: value.numpy().tobytes() for name, value in carried.items()}


def jax_folder(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """What a folder of ours says of itself, and its tensors under torchref's names."""
    from jaxtwin.jaxmodel import checkpoint

    saved = checkpoint.describe(folder)
    parts = checkpoint.parts(folder, saved)

    def read_one(path: str) -> np.ndarray:
        return checkpoint.read(folder, [path], step=saved.step)[path]

    def tensor(path: str) -> Tensor:
        x = saved.shapes[path]
        if path not in parts:
            return Tensor(tuple(x.shape), x.dtype, lambda: read_one(path))
        part, several = parts[path], saved.chunks[path] != x.shape
        everything = tuple(slice(0, size) for size in x.shape)
        return Tensor(tuple(x.shape), x.dtype, lambda: part(everything), part if several else None)

    rows = decoder_table.rows(saved.spec, saved.layout)
    return saved, backward(rows, {path: tensor(path) for path in saved.shapes}, str(folder))


def golden_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The weights and gradients of a golden .npz by the reference's names, and its other records.

    BadInput when any is missing or not known.
    """
    parts: dict[str, dict[str, Tensor]] = {"weight": {}, "grad": {}, "generate": {}, "": {}}
    records: dict[str, Tensor] = {}
    for name, tensor in files.npz_file(path).items():
        part, _, rest = name.rpartition("/")
        if part not in parts:
            raise BadInput(f"{path}: {name!r} is not known in a golden file")
        parts[part][rest] = tensor
        if part in ("weight", "grad") and tensor.dtype not in files.FLOATS.values():
            raise BadInput(f"{path}: {name} is {tensor.dtype}, no dtype of weights")
        if part not in ("weight", "grad"):
            records[name] = tensor
    wanted = {"": {"config", "ids", "logits", "loss"}, "generate": {*GENERATED, "eos_id"}}
    for part, names in wanted.items():
        if odd := sorted(names ^ parts[part].keys()):
            raise BadInput(f"{path} is not a golden file: {', '.join(odd)} missing or not known")
    if records["config"].dtype.kind != "U" or records["config"].shape != ():
        raise BadInput(f"{path}: config must be one string; {_seen(records['config'])}")
    return parts["weight"], parts["grad"], records


PROMPT = 4  # how many of the ids every recorded generation begins with
GENERATED = {  # name -> the new tokens (None: up to the context's end), and its end token's name
    "greedy8_from_first4": (8, None),
    "greedy8_with_eos": (8, "eos_id"),
    "greedy_to_context": (None, None),
}


def golden_records(records: Mapping[str, Tensor], spec: Model, where: str) -> dict[str, Any]:
    """The recorded results: ids (b t), logits (b t v), loss, and for each recorded generation its

    prompt, its ids and the eos it was given. BadInput, with the array's name, on one that is not of
    the shape, the kind or the vocabulary that its model gives it.
    """

    def need(good: bool, name: str, what: str) -> None:
        if not good:
            raise BadInput(f"{where}: {name} must be {what}; {_seen(records[name])}")

    def integers(name: str, rank: int) -> np.ndarray:
        known = f"ids from 0 to {spec.vocab - 1}"
        what = f"integers (batch, time), {known}" if rank else f"one integer, of the {known}"
        need(records[name].dtype.kind in "iu" and len(records[name].shape) == rank, name, what)
        x = records[name].read()
        need(bool(((x >= 0) & (x < spec.vocab)).all()), name, what)
        return x

    need(records["loss"].dtype.kind == "f" and records["loss"].shape == (), "loss", "one float")
    ids = integers("ids", 2)
    fits = ids.shape[0] > 0 and PROMPT <= ids.shape[1] <= spec.max_len
    need(fits, "ids", f"(batch, {PROMPT} to {spec.max_len})")
    full = (*ids.shape, spec.vocab)
    logits = records["logits"]
    need(logits.dtype.kind == "f" and logits.shape == full, "logits", f"floats {full}")
    eos = int(integers("generate/eos_id", 0))
    generate = {}
    for name, (new, has_eos) in GENERATED.items():
        key = f"generate/{name}"
        shape = (len(ids), spec.max_len if new is None else min(PROMPT + new, spec.max_len))
        tokens = integers(key, 2)
        short = has_eos is not None and PROMPT < tokens.shape[1] < shape[1]
        ended = short and bool((tokens[:, PROMPT:] == eos).any(axis=1).all())
        fits = tokens.shape[0] == shape[0] and (tokens.shape[1] == shape[1] or ended)
        need(fits, key, f"{shape}, the prompt included, or as long as it took every row to end")
        same = np.array_equal(tokens[:, :PROMPT], ids[:, :PROMPT])
        need(same, key, f"a continuation of the first {PROMPT} ids")
        generate[name] = {
            "prompt": ids[:, :PROMPT],
            "ids": tokens,
            "new": spec.max_len if new is None else new,
            "eos": eos if has_eos else None,
        }
    loss = float(records["loss"].read())
    return {"ids": ids, "logits": logits.read(), "loss": loss, "generate": generate}


def _seen(record: Tensor) -> str:
    return f"it is {record.dtype} {record.shape}"
