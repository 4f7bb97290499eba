"""Meta's checkpoint files, and Mistral's: one, or several that are cut for tensor parallelism."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.parity.checkpoints import files, redundant
from jaxtwin.parity.checkpoints.dialects import from_meta
from jaxtwin.parity.checkpoints.dialects.mistral import from_mistral, is_mistral
from jaxtwin.parity.table.tensors import Tensor, listed

NAMES = re.compile(r"consolidated\.(\d+)\.pth")
ONE = "consolidated.safetensors"  # Mistral's
EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"
# The axis that Meta's parallel layers are cut along, by the last part of a tensor's name but one.
# What is not named is whole in every file, and the embedding is cut along either (see `_axis`).
AXES = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w3": 0, "w2": 1, "output": 0}


def opened(folder: Path, notes: list[str]) -> tuple[Model, dict[str, Tensor]]:
    """The spec of a folder of Meta's or Mistral's, and its tensors by their names; adds notes."""
    where = folder / "params.json"
    params = files.read_json(where)
    tensors = folder_tensors(folder, params.get("dim"), notes)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if is_mistral(params):
        return from_mistral(params, tied(tensors), str(where), notes), tensors
    return from_meta(params, shapes, tied(tensors), str(where), notes), tensors


def folder_tensors(folder: Path, dim: Any, notes: list[str]) -> dict[str, Tensor]:
    """The whole tensors of a folder's consolidated.*.pth; `dim` is the model's width.

    BadInput where a file is missing in the row, or where they do not hold parts of one model.
    """
    if (folder / ONE).exists():
        return files.safetensors_file(folder / ONE)
    found = sorted(path for path in folder.iterdir() if NAMES.fullmatch(path.name))
    numbers = [int(path.name.split(".")[1]) for path in found]
    if not found or numbers != list(range(len(found))):
        missing = next(n for n in range(len(found) + 1) if n not in numbers)
        raise BadInput(f"{folder} has a params.json and no consolidated.{missing:02}.pth")
    parts = [files.torch_file(path) for path in found]
    if len(parts) == 1:
        return parts[0]
    first, problems = parts[0], list[str]()
    for path, part in zip(found[1:], parts[1:], strict=True):
        if odd := sorted(part.keys() ^ first.keys()):
            problems.append(f"  {path.name}: {', '.join(odd[:4])} not in every file")
    out = {}
    for name in first:
        same = [part[name] for part in parts if name in part]
        if len({(tensor.shape, tensor.dtype) for tensor in same}) > 1:
            problems.append(f"  {name}: of another shape or dtype in another file")
        elif (axis := _axis(name, same, dim)) is not None:
            out[name] = _joined(same, axis)
        elif all(redundant.same_bits(same[0], tensor) for tensor in same[1:]):
            out[name] = same[0]
        else:
            problems.append(f"  {name}: must be the same in every file, and is not")
    if problems:
        raise BadInput(f"{folder} holds files that do not belong together:\n{listed(problems)}")
    notes.append(f"{len(parts)} tensor-parallel files are put together")
    return out


def _axis(name: str, parts: Sequence[Tensor], dim: Any) -> int | None:
    """The axis that a tensor is cut along, or None where every file has the whole.

    Llama 1 and 2 cut the embedding along the width, Llama 3 along the vocabulary.
    """
    if name == EMBEDDING:
        return 0 if parts[0].shape[-1:] == (dim,) else 1
    axis = AXES.get(name.split(".")[-2]) if "." in name else None
    return axis if len(parts[0].shape) == 2 else None


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    shape = list(parts[0].shape)
    shape[axis] *= len(parts)
    return Tensor(
        tuple(shape),
        parts[0].dtype,
        lambda: np.concatenate([part.read() for part in parts], axis=axis),
    )


def tied(tensors: dict[str, Tensor]) -> bool:
    """Whether the head is the embedding: params.json does not say, and the tensors do."""
    if HEAD not in tensors or EMBEDDING not in tensors:
        return True
    one, other = tensors[EMBEDDING], tensors[HEAD]
    if (one.shape, one.dtype) != (other.shape, other.dtype) or not one.shape:
        return False
    few = tuple(slice(0, 8) for _ in one.shape)  # large, and nearly always these tell
    return np.array_equal(one.part(few), other.part(few)) and redundant.same_bits(one, other)
