"""Gradients of biases and of norms' scales, measured by what they are sums of.

A bias's gradient is the sum of its output's cotangents over all tokens. Where these cancel, nothing
but rounding is left: no softmax sees what is added to every score alike, so that without rotation
the gradient of a key's bias is 0, and two right sides agree in no digit of it. So a sum's error is
measured by the sum of its terms' absolute values, which bounds what rounding can do to it (Higham,
Accuracy and Stability of Numerical Algorithms, section 4.2).

A scale's gradient is the sum of cotangent times normed input. It is measured by its own size until
its terms' absolute values sum up to more than SCALE times that: then a term may be off by what a
value may be off. In Gemma 3 270M one of them was seen to cancel to an 80th of them.
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
SCALE = 10.0  # in float64 a gradient may be off by that many times what a value may be off


@dataclass(frozen=True)
class Terms:
    """What is known of the terms that a gradient is the sum of.

    size: the L2 norm of the sums of absolute values (of a scale, over SCALE). rounded: of a bias,
    by dtype, that of what the sum is off when each of its terms is rounded to the dtype: nobody can
    be nearer.
    """

    size: float
    rounded: Mapping[str, float]


def relative(got: Any, want: Any, terms: Terms | None = None) -> float:
    """Relative L2, by the terms' size where that is known and is more."""
    if terms is None or np.shape(got) != np.shape(want) or not 0 < terms.size < np.inf:
        return metrics.relative_l2(got, want)
    size = metrics.norm(want)
    return metrics.relative_l2(got, want) if size > terms.size else _by(terms, got, want)


def _by(terms: Terms, got: Any, want: Any) -> float:
    return metrics.distance(got, want) / terms.size


def rounding(want: Any, dtype: np.dtype, terms: Terms | None = None) -> float:
    """The relative error of rounding the exact value, or its terms where that is more."""
    near = relative(np.asarray(want).astype(dtype), want, terms)
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
    """While open, sums up what a torch module's biases and scales get their gradients from.

    A scale is the `weight` of a part whose output has its input's shape, over the last axis. What
    it multiplies is read off the part itself: what comes out with ones, less that with zeros.
    """

    def __init__(self, model: torch.nn.Module):
        import torch

        from jaxtwin.torchref.bias import Bias

        self.biases: dict[str, torch.nn.Module] = {}
        self.scales: dict[str, torch.nn.Module] = {}
        for name, module in model.named_modules():
            if isinstance(module, Bias):
                self.biases[f"{name}.weight".lstrip(".")] = module
            elif isinstance(getattr(module, "bias", None), torch.nn.Parameter):
                self.biases[f"{name}.bias".lstrip(".")] = module
            weight = module._parameters.get("weight")
            if not isinstance(module, Bias) and weight is not None and weight.ndim == 1:
                self.scales[f"{name}.weight".lstrip(".")] = module
        self.sizes = {n: p.shape for n, p in model.named_parameters()}
        self.sums = {name: Sums() for name in (*self.biases, *self.scales)}

    def __enter__(self) -> Watch:
        self.handles = []
        for hook, modules in ((self._of_bias, self.biases), (self._of_scale, self.scales)):
            for name, module in modules.items():
                summing = hook(self.sums[name], self.sizes.get(name))
                self.handles.append(module.register_forward_hook(summing))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _of_bias(self, sums: Sums, shape: Any) -> Any:
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

    def _of_scale(self, sums: Sums, shape: Any) -> Any:
        import torch

        def forward(module: Any, args: Any, out: Any) -> None:
            x = args[0] if len(args) == 1 else None
            if not (isinstance(x, torch.Tensor) and isinstance(out, torch.Tensor)):
                return
            if not (x.shape == out.shape and x.shape[-1:] == shape and out.requires_grad):
                return
            x = x.detach()

            def back(g: torch.Tensor) -> None:
                terms = g.detach().double() * multiplied(module, x).double()
                sums.absolute = sums.absolute + terms.abs().reshape(-1, *shape).sum(0) / SCALE

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


def multiplied(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a module's weight multiplies, where its output is linear in the weight."""
    import torch

    weight = module._parameters["weight"]
    assert weight is not None
    try:
        with torch.no_grad():
            module._parameters["weight"] = torch.nn.Parameter(torch.ones_like(weight))
            ones = module.forward(x)
            module._parameters["weight"] = torch.nn.Parameter(torch.zeros_like(weight))
            return ones - module.forward(x)
    finally:
        module._parameters["weight"] = weight
