"""Gradients of biases, measured by what they are sums of.

A bias's gradient is the sum of its output's cotangents over all tokens. Where these cancel, nothing
but rounding is left: no softmax sees what is added to every score alike, so that without rotation
the gradient of a key's bias is 0, and two right sides agree in no digit of it. So a sum's error is
measured by the sum of its terms' absolute values, which bounds what rounding can do to it (Higham,
Accuracy and Stability of Numerical Algorithms, section 4.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.parity.report import metrics

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Terms:
    """What is known of the terms that a bias's gradient is the sum of.

    size: the L2 norm of the sums of absolute values. rounded: by dtype, that of what the sum is off
    when each of its terms is rounded to the dtype: nobody can be nearer.
    """

    size: float
    rounded: Mapping[str, float]


def relative(got: Any, want: Any, terms: Terms | None = None) -> float:
    """Relative L2, by the terms' size where they are known."""
    if terms is None or np.shape(got) != np.shape(want) or not 0 < terms.size < np.inf:
        return metrics.relative_l2(got, want)
    gap = np.asarray(got, np.float64) - np.asarray(want, np.float64)
    return float(np.linalg.norm(gap) / terms.size)


def rounding(want: Any, dtype: np.dtype, terms: Terms | None = None) -> float:
    """The relative error of rounding the exact value, or its terms where that is more."""
    near = relative(metrics.rounded(want, dtype), want, terms)
    if terms is None or not terms.size or str(dtype) not in terms.rounded:
        return near
    return max(near, terms.rounded[str(dtype)] / terms.size)


@dataclass
class Sums:
    """Over all tokens, so far: of absolute values, and of what rounding each value costs."""

    absolute: torch.Tensor | float = 0.0
    rounded: dict[str, torch.Tensor | float] = field(
        default_factory=lambda: dict.fromkeys(DTYPES, 0.0)
    )


class Watch:
    """While open, sums up what the biases of a torch module get their gradients from."""

    def __init__(self, model: torch.nn.Module):
        import torch

        from jaxtwin.torchref.bias import Bias

        self.at: dict[str, torch.nn.Module] = {}
        for name, module in model.named_modules():
            if isinstance(module, Bias):
                self.at[f"{name}.weight".lstrip(".")] = module
            elif isinstance(getattr(module, "bias", None), torch.nn.Parameter):
                self.at[f"{name}.bias".lstrip(".")] = module
        self.sizes = {n: p.shape for n, p in model.named_parameters() if n in self.at}
        self.sums = {name: Sums() for name in self.at}

    def __enter__(self) -> Watch:
        self.handles = [
            module.register_forward_hook(self._hook(self.sums[name], self.sizes.get(name)))
            for name, module in self.at.items()
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _hook(self, sums: Sums, shape: Any) -> Any:
        import torch

        def back(g: torch.Tensor) -> None:
            flat = g.detach().reshape(-1, g.shape[-1]).double()
            sums.absolute = sums.absolute + flat.abs().sum(0)
            for dtype in DTYPES:
                off = flat.to(getattr(torch, dtype)).double() - flat
                sums.rounded[dtype] = sums.rounded[dtype] + off.sum(0)

        def forward(module: Any, args: Any, out: Any) -> None:
            # Where the bias is one number for each entry of the last axis; a convolution's is not.
            if isinstance(out, torch.Tensor) and out.requires_grad and out.shape[-1:] == shape:
                out.register_hook(back)

        return forward

    def terms(self) -> dict[str, Terms]:
        """What was seen, by the parameter's name."""
        import torch

        def norm(x: torch.Tensor | float) -> float:
            return float(torch.as_tensor(x).norm())

        return {
            name: Terms(norm(s.absolute), {d: norm(x) for d, x in s.rounded.items()})
            for name, s in self.sums.items()
        }
