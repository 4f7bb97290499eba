"""Between NumPy, torch and JAX without changing a bit, bfloat16 included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jaxtwin.parity.table.tensors import Tensor

if TYPE_CHECKING:
    import torch


def to_torch(x: np.ndarray) -> torch.Tensor:
    """A torch tensor of the same bits (its own copy)."""
    import torch

    x = np.array(x, order="C")
    if x.dtype == ml_dtypes.bfloat16:  # torch cannot read NumPy's bfloat16; the bits travel as ints
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """A NumPy array of the same bits."""
    import torch

    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def from_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A torch state dict, or anything of torch tensors by name, as tensors of the table."""
    return {name: Tensor.of(to_numpy(value)) for name, value in state.items()}
