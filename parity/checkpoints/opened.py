"""A model, opened: its spec, its tensors not yet read, and the files that travel with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.parity.checkpoints import files, tokenizer
from jaxtwin.parity.checkpoints.dialects import HF_CONFIG
from jaxtwin.parity.naming.names import Naming
from jaxtwin.parity.table.tensors import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IDS = "token_ids.json"  # the bos, eos and pad ids of a config.json, among the carried files
SHORT = {np.dtype(np.float16), files.FLOATS["BF16"]}
# Files of weights, of this format or another, and what belongs to them.
WEIGHTS = frozenset(
    [
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".gguf",
        ".h5",
        ".msgpack",
        ".onnx",
        ".onnx_data",
        ".npz",
        ".ot",
        ".pkl",
        ".tflite",
        ".mlmodel",
        ".mlpackage",
        ".tar",
        ".zip",
        ".gz",
    ]
)
INDEX = ".index.json"
LARGEST = 64 * 2**20  # bytes; what is larger is no side file
OURS = ("config.json", "params.json", HF_CONFIG)  # written anew, or kept under a name of its own


@dataclass(frozen=True)
class Source:
    """A model, opened: its spec, its tensors under torchref's names (not yet read), and the rest.

    `published` are the same tensors as the file names them and `dialect` says how; "torchref" for
    files of ours. `carry` are the files that travel with the weights, as bytes or as paths.
    """

    name: str
    kind: str  # preset | hf | meta | gguf | torch | jax | golden | state dict
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
    naming: Naming | None = None  # of a state dict under a person's own names

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
        return None if data is None else files.parsed(content(data), f"{HF_CONFIG} of {self.name}")

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None where there is none; BadInput if it cannot be built."""
        if (data := self.carry.get("tokenizer.json")) is None:
            return None
        return tokenizer.from_json(content(data), f"tokenizer.json of {self.name}")


def content(data: Path | bytes) -> bytes:
    """What a carried file holds."""
    return data if isinstance(data, bytes) else data.read_bytes()


def beside(folder: Path, notes: list[str]) -> dict[str, Path]:
    """The side files of a folder by name, those of its own folders as "folder/file".

    A note says which files are too large to be any.
    """
    out: dict[str, Path] = {}
    large = []
    for path in sorted(folder.iterdir()):
        inner = sorted(path.iterdir()) if path.is_dir() and _plain(path) else [path]
        for file in inner:
            name = file.relative_to(folder).as_posix()
            if not file.is_file() or not _plain(file) or not is_side(name):
                continue
            if file.stat().st_size > LARGEST:
                large.append(name)
            else:
                out[name] = file
    if large:
        notes.append(f"too large to travel along: {', '.join(large[:8])}")
    return out


def is_side(name: str) -> bool:
    """Whether a file of that name is none of weights, nor one that is written anew."""
    return name not in OURS and Path(name).suffix not in WEIGHTS and not name.endswith(INDEX)


def _plain(path: Path) -> bool:
    """Neither hidden nor a tool's own."""
    return not path.name.startswith((".", "_"))
