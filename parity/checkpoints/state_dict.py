"""A state dict under a person's own names, opened: from a file or from memory, and given back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.parity.checkpoints import files, redundant
from jaxtwin.parity.naming.names import Naming
from jaxtwin.parity.table.tensors import Tensor, Tensors, backward, forward

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
WITHIN = ("model", "state_dict", "model_state_dict", "module", "params")  # in training checkpoints
WRAPPED = ("_orig_mod.", "module.")  # by torch.compile, by DistributedDataParallel


def opened(path: Path, notes: list[str]) -> Mapping[str, Any]:
    """The state dict of a file: torch tensors by name, or lazy ones from a .safetensors file.

    A training checkpoint's is found under one of the usual keys; adds a note where it was.
    """
    if not path.exists():
        raise BadInput(f"there is no file {str(path)!r}")
    if path.suffix == ".safetensors":
        return files.safetensors_file(path)
    data = files.torch_load(path)
    if not isinstance(data, Mapping):
        raise BadInput(f"{path} holds a {type(data).__name__}, and no state dict")
    if any(_is_array(value) for value in data.values()):
        return data
    for key in WITHIN:
        inner = data.get(key)
        if isinstance(inner, Mapping) and any(_is_array(value) for value in inner.values()):
            left = sorted(map(str, data.keys() - {key}))
            more = f"; {', '.join(left[:8])} are not read" if left else ""
            notes.append(f"the state dict is {path}'s {key!r}{more}")
            return inner
    held = ", ".join(sorted(map(str, data))[:8]) or "nothing"
    raise BadInput(
        f"{path} holds no state dict, but {held}; known places: {', '.join(WITHIN)}. Save it "
        "alone: torch.save(module.state_dict(), ...)"
    )


def tensors(
    state: Mapping[str, Any], spec: Model, naming: Naming, where: str, notes: list[str]
) -> dict[str, Tensor]:
    """The state's tensors that the naming names, once each, by their own names; adds notes.

    BadInput where a second copy differs from the first, or a tensor has no dtype of weights.
    """
    named = [*(entry.theirs for entry in naming.entries), *naming.left_out]
    state = unwrapped(state, named, notes)
    left = [name for name in state if naming.leaves_out(name)]
    kept = {name: value for name, value in state.items() if name not in set(left)}
    found = _lazy(kept, where)
    if left:
        notes.append(f"left out, as the names say: {_few(left)}")
    for name, first in naming.copies(spec).items():
        if name not in found:
            continue
        if first not in found:
            found[first] = found.pop(name)
            continue
        if not redundant.same_bits(found[name], found[first]):
            raise BadInput(f"{where}: {name} and {first} are named as one tensor, and they differ")
        del found[name]
        notes.append(f"{name} equals {first}, as the names say; kept once")
    return found


def mapped(
    state: Mapping[str, Any], spec: Model, naming: Naming, where: str, notes: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors under torchref's names, proven to be all of the spec's; and under theirs."""
    published = tensors(state, spec, naming, where, notes)
    return forward(naming.rows(spec), published, where), published


def released(ours: Tensors, spec: Model, naming: Naming, where: str) -> dict[str, Tensor]:
    """The inverse: tensors under torchref's names as a state dict under theirs, copies included."""
    out = backward(naming.rows(spec), ours, where)
    return out | {name: out[first] for name, first in naming.copies(spec).items() if first in out}


def unwrapped(
    state: Mapping[str, Any], named: Sequence[str], notes: list[str]
) -> Mapping[str, Any]:
    """Without what wrappers put before every name, unless the names have it too."""
    found = True
    while found:
        found = False
        for prefix in WRAPPED:
            wrapped = bool(state) and all(str(name).startswith(prefix) for name in state)
            if wrapped and not any(name.startswith(prefix) for name in named):
                notes.append(f"every name begins with {prefix}, which is left off")
                state = {name.removeprefix(prefix): value for name, value in state.items()}
                found = True
    return state


def _lazy(state: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    if all(isinstance(value, Tensor) for value in state.values()):
        files.refuse_integers(state, where)
        return dict(state)
    arrays = {n: v for n, v in state.items() if isinstance(v, np.ndarray)}
    rest = {name: value for name, value in state.items() if name not in arrays}
    if odd := [n for n, x in arrays.items() if x.dtype not in files.FLOATS.values()]:
        raise BadInput(f"{where}: {odd[0]} is {arrays[odd[0]].dtype}, no dtype of weights")
    out = {name: Tensor.of(x) for name, x in arrays.items()}
    if rest:
        out |= files.torch_tensors(rest, Path(where))
    files.refuse_integers(out, where)
    return {name: out[name] for name in state}


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
