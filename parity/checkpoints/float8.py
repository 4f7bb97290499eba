"""Float8 weights as they are published: each block of a matrix has a scale of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints.files import FLOATS, FP8
from jaxtwin.parity.table.axis_ops import Index
from jaxtwin.parity.table.tensors import Tensor, listed

SCALE = "_scale_inv"  # behind the name of a float8 tensor: the factors of its blocks


def dequantized(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], where: str, notes: list[str]
) -> dict[str, Tensor]:
    """Float8 tensors with scales for their blocks as float32 ones; any other tensor as it is.

    Of X.weight (float8, r c) the block that holds [i, j] has its factor in X.weight_scale_inv
    (floats, one for each begun block). `config` is the config.json, whose quantization_config gives
    the block's size. The product is float32, because no narrower dtype holds it; a note says so.
    BadInput on a float8 tensor without a scale, on a scale without one, and on another shape.
    """
    small = {name: tensor for name, tensor in tensors.items() if tensor.dtype in FP8.values()}
    stated = config.get("quantization_config")
    if not small and stated is None:
        return dict(tensors)
    block = _block(small, stated, where)
    problems, out = [], dict(tensors)
    for name, tensor in small.items():
        scale = out.pop(name + SCALE, None)
        due = tuple(-(-n // size) for n, size in zip(tensor.shape, block, strict=False))
        if len(tensor.shape) != 2:
            problems.append(f"  {name}: shape {tensor.shape}; blocks are of two axes")
        elif scale is None:
            near = sorted(n for n in tensors if "scale" in n and _stem(n) == _stem(name))
            hint = f"; {', '.join(near)} is not known to be its scale" if near else ""
            problems.append(f"  {name}: float8 without a scale {name + SCALE}{hint}")
        elif scale.dtype not in FLOATS.values() or scale.shape != due:
            problems.append(
                f"  {name + SCALE}: {scale.dtype} {scale.shape}, expected floats {due}, one for "
                f"each block of {block[0]} x {block[1]} of {tensor.shape}"
            )
        else:
            out[name] = _scaled(tensor, scale, block)
    problems += [
        f"  {name}: a scale, and {name.removesuffix(SCALE)} is not float8"
        for name in out
        if name.endswith(SCALE) and name.removesuffix(SCALE) not in small
    ]
    if problems:
        raise BadInput(f"{where} holds float8 tensors that cannot be scaled:\n{listed(problems)}")
    notes.append(
        f"{len(small)} float8 tensors are given as float32: each value times its block's scale"
    )
    return out


def _block(small: Iterable[str], stated: Any, where: str) -> tuple[int, int]:
    """The block size of quantization_config; BadInput if that scheme is not supported."""
    if stated is None:
        raise BadInput(
            f"{where} holds tensors that are not of a supported dtype ({', '.join(FLOATS)}) "
            "without the quantization_config that would say how they are scaled:\n"
            + listed([f"  {name}: {code}" for name in small for code in FP8])
        )
    stated = stated if isinstance(stated, Mapping) else {"quant_method": stated}
    method = stated.get("quant_method")
    if method != "fp8" or stated.get("fmt", "e4m3") != "e4m3":
        raise BadInput(f"{where} is quantized by {method!r}, only fp8 (e4m3) is supported")
    block = stated.get("weight_block_size")
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in block):
        raise BadInput(
            f"{where}: weight_block_size must be two positive integers, got {block!r}; "
            "one scale for a whole tensor is not supported"
        )
    return block[0], block[1]


def _stem(name: str) -> str:
    return name.rsplit(".", 1)[0]


def _scaled(tensor: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The product, computed a row of blocks at a time."""

    def slices(index: Index) -> np.ndarray:
        (top, bottom), (left, right) = ((at.start, at.stop) for at in index)
        out = tensor.part(index).astype(np.float32)
        factors = scale.read().astype(np.float32)[:, np.arange(left, right) // block[1]]
        for row in range(top // block[0], -(-bottom // block[0])):
            dst = slice(max(row * block[0], top) - top, (row + 1) * block[0] - top)
            out[dst] *= factors[row]
        return out

    def read() -> np.ndarray:
        rows, columns = tensor.shape
        return slices((slice(0, rows), slice(0, columns)))

    return Tensor(tensor.shape, np.dtype(np.float32), read, slices)
