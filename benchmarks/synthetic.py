"""A checkpoint of any size made of random bytes: a Hugging Face Llama folder in several shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.llama import llama
from jaxtwin.parity.checkpoints import writers
from jaxtwin.parity.checkpoints.dialects import HF_LLAMA, to_hf
from jaxtwin.parity.table import tensors
from jaxtwin.parity.table.tensors import Tensor

SHARD = 2**29


def spec_of(mib: int) -> Model:
    """A Llama of about that many MiB in bfloat16: half of it in the four matrices of its ffn."""
    layers = 16
    # A layer has (2 + 2/4 + 3 * 2) d^2 values and the embedding 4 d^2.
    width = round((mib * 2**19 / (layers * 8.5 + 4)) ** 0.5 / 256) * 256
    return llama(
        vocab=4 * width, d=width, layers=layers, heads=width // 64, kv=width // 256,
        hidden=2 * width, max_len=4096, base=1e4, pairs="half", eps=1e-5, tied=True, width=64,
    )  # fmt: skip


def make(folder: Path, mib: int, seed: int = 0) -> int:
    """The folder, of whose tensors the bytes are random; how many there are."""
    spec = spec_of(mib)
    rng = np.random.default_rng(seed)

    def random(shape: tuple[int, ...]) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            raw = np.frombuffer(rng.bytes(2 * int(np.prod(shape))), np.uint16)
            return raw.view(ml_dtypes.bfloat16).reshape(shape)

        return read

    dtype = np.dtype(ml_dtypes.bfloat16)
    named = {
        name: Tensor(shape, dtype, random(shape))
        for name, shape in tensors.src_shapes(HF_LLAMA.rows(spec))
    }
    writers.write_hf(folder, to_hf(spec, "bfloat16", {}), named, {}, shard=SHARD)
    return sum(map(writers.nbytes, named.values()))
