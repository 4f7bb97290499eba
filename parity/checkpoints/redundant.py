"""What published files hold twice or too much, left out before the proof: tied heads, buffers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.configs.spec import Rope
from jaxtwin.parity.checkpoints import files
from jaxtwin.parity.checkpoints.dialects.base import Dialect
from jaxtwin.parity.checkpoints.dialects.gguf_llama import DIVISORS, are_divisors
from jaxtwin.parity.table.tensors import Tensor

FREQUENCIES = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^rope\.freqs$")
MASK = re.compile(r"(^|\.)h\.\d+\.attn\.(masked_)?bias$")  # GPT-2


def deduplicated(
    tensors: Mapping[str, Tensor], spec: Model, dialect: Dialect, where: str, notes: list[str]
) -> dict[str, Tensor]:
    """The published tensors without buffers and second copies; adds notes on what was left out.

    BadInput where something left out would say otherwise than the config.
    """
    kept = without_masks(prefixed(tensors, dialect, notes), where, notes)
    kept = without_tables(kept, spec, where, notes)
    files.refuse_integers(kept, where)
    return tied_once(kept, spec, dialect, where, notes) if spec.tied else kept


def prefixed(
    tensors: Mapping[str, Tensor], dialect: Dialect, notes: list[str]
) -> dict[str, Tensor]:
    """The names as the whole model has them, where a file is of its body alone."""
    bare = not any(name.startswith(dialect.prefix) for name in tensors)
    head = dialect.published("head.weight")
    if bare and tensors:
        notes.append(f"the names are those of the body alone; {dialect.prefix} is put before them")
    add = {name: dialect.prefix if bare and name != head else "" for name in tensors}
    return {add[name] + name: tensor for name, tensor in tensors.items()}


def without_masks(tensors: Mapping[str, Tensor], where: str, notes: list[str]) -> dict[str, Tensor]:
    """Without the causal masks that old GPT-2 code saved, each looked at first."""
    masks = [name for name in tensors if MASK.search(name)]
    for name in masks:
        if not causal(tensors[name].read()):
            raise BadInput(f"{where}: {name} is not a causal mask, and nothing would read it")
    if masks:
        notes.append(f"{len(masks)} stored causal masks are what they should be and are left out")
    return {name: tensor for name, tensor in tensors.items() if name not in masks}


def causal(stored: np.ndarray) -> bool:
    """Ones where a token may look (and 0 elsewhere), or the one number that stands for never."""
    if stored.size == 1 and stored.ndim != 4:
        return bool(stored.item() <= -1e4)
    square = stored.shape[-1:] * 2
    return stored.shape == (1, 1, *square) and np.array_equal(stored[0, 0], np.tri(*square))


def without_tables(
    tensors: Mapping[str, Tensor], spec: Model, where: str, notes: list[str]
) -> dict[str, Tensor]:
    """Without the rotary tables that old code saved, each compared with the spec's own first."""
    tables = [name for name in tensors if FREQUENCIES.search(name) or name == DIVISORS]
    rotary = [(b.attn.rope, b.attn.width) for b in spec.layers if b.attn.rope is not None]
    ropes = {(rope, rope.width or width) for rope, width in rotary}
    for name in tables:
        if not any(agrees(name, tensors[name], rope, width) for rope, width in ropes):
            raise BadInput(
                f"{where}: the rotary frequencies stored in {name} are not those of the config "
                f"({', '.join(f'base {rope.base}' for rope, _ in ropes) or 'no rotary positions'})"
            )
    if tables:
        notes.append(f"{len(tables)} stored rotary tables agree with the config and are left out")
    return {name: tensor for name, tensor in tensors.items() if name not in tables}


def agrees(name: str, stored: Tensor, rope: Rope, width: int) -> bool:
    """Whether a stored table is the spec's, as closely as its dtype and its making allow.

    base^(-2i/h) is computed in float32: rounding the exponent moves the power by log(base)
    roundings, and the power and the division add one each. Then it is rounded to its dtype.
    """
    if stored.shape != (width // 2,):
        return False
    got = stored.read().astype(np.float64)
    if name == DIVISORS:
        return are_divisors(got, rope.base, width, rope.scaling)
    want = rope.base ** (-np.arange(0, width, 2) / width)
    eps = 2.0 ** {"bfloat16": -8, "float16": -11, "float32": -24, "float64": -53}[str(stored.dtype)]
    room = want * ((math.log(rope.base) + 2) * 2.0**-24 + eps)
    # float16's spacing near 0 is 2^-24
    room += 2.0**-25 if stored.dtype == np.float16 else 0
    return bool((np.abs(got - want) <= room).all())


def tied_once(
    tensors: Mapping[str, Tensor], spec: Model, dialect: Dialect, where: str, notes: list[str]
) -> dict[str, Tensor]:
    """One embedding under its own name, whichever of the two tied names the file has.

    BadInput when it has both and they differ: such a model was never tied, whatever its config
    says, and taking either would lose the other.
    """
    embed, head = dialect.published("embed.weight"), dialect.published("head.weight")
    out = dict(tensors)
    if head not in out:
        return out
    if embed not in out:
        notes.append(f"{embed} is tied and was saved as {head}; the head is taken as the embedding")
        out[embed] = out.pop(head)
        return out
    one, other = out[embed], out[head]
    if one.dtype != other.dtype:
        raise BadInput(
            f"{where}: the config ties the embeddings, and {head} is in the file and differs "
            f"from {embed} in dtype ({other.dtype}, not {one.dtype}); store both in one dtype, or "
            f"{embed} alone"
        )
    if one.shape != other.shape or not same_bits(one, other):
        raise BadInput(
            f"{where}: the config ties the embeddings, and {head} is in the file and differs "
            f"from {embed}; set tie_word_embeddings to false if the head is separate"
        )
    notes.append(f"{head} equals the tied {embed}; kept once")
    del out[head]
    return out


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits; -0.0 differs from 0.0, and a NaN equals itself."""
    a, b = (np.ascontiguousarray(tensor.read()).view(np.uint8) for tensor in (one, other))
    return np.array_equal(a, b)
