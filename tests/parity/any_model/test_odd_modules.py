"""Modules of any name and structure: right ones are equal, wrong ones are not, none crashes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import jaxtwin
from jaxtwin import Row
from jaxtwin.tests.helpers.levels import full, slow

# Names of torchref's own parts, and others that are like a number, a layer or an attribute.
NAMES = (
    *("norm", "pre_ffn", "post_attn", "ffn", "attn", "layers", "embed", "head", "act", "scale"),
    *("mid", "out", "q", "rotate", "softmax", "first", "0", "h", "l_0", "act_1", "gate", "eps"),
)
WIDTH = 6


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(1 + torch.randn(WIDTH) / 4), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.to(torch.float32)
        size = x32.pow(2).mean(-1, keepdim=True) + self.variance_epsilon
        return self.weight * (x32 * torch.rsqrt(size)).to(x.dtype)


class Chain(nn.Module):
    """Its parts one after another, some with a residual, whatever they are called."""

    def __init__(self, parts: dict[str, nn.Module], returns: str, residual: bool) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.returns, self.residual = returns, residual

    def forward(self, x: torch.Tensor) -> Any:
        for part in self.children():
            y = part(x)
            y = y[0] if isinstance(y, tuple) else y["out"] if isinstance(y, dict) else y
            x = x + y if self.residual else y
        return {"tensor": x, "tuple": (x, None), "dict": {"out": x, "other": x * 2}}[self.returns]


Part = Callable[[Any, Any], Any]


def linear(p: Any, x: Any, name: str) -> Any:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def layer_norm(p: Any, x: Any, name: str) -> Any:
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def rms_norm(p: Any, x: Any, name: str) -> Any:
    size = (x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6
    return p[f"{name}.weight"] * (x * jax.lax.rsqrt(size)).astype(x.dtype)


KINDS: list[tuple[Callable[[], nn.Module], Any]] = [
    (lambda: nn.Linear(WIDTH, WIDTH), linear),
    (lambda: nn.LayerNorm(WIDTH), layer_norm),
    (RMSNorm, rms_norm),
    (nn.GELU, lambda p, x, name: jax.nn.gelu(x, approximate=False)),
    (nn.SiLU, lambda p, x, name: jax.nn.silu(x)),
]


def odd(seed: int) -> tuple[nn.Module, Any, list[Row], list[Row]]:
    """A module of two levels, its port f(params, x, wrong), the table and some probes."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    calls: dict[str, Any] = {}
    residuals: dict[str, bool] = {}
    order: dict[str, list[str]] = {"": []}
    containers = {}
    for outer in rng.choice(NAMES, rng.integers(1, 4), replace=False):
        parts, order[outer] = {}, []
        for inner in rng.choice(NAMES, rng.integers(1, 4), replace=False):
            make, call = KINDS[rng.integers(len(KINDS))]
            parts[str(inner)] = make()
            calls[f"{outer}.{inner}"] = call
            order[outer].append(str(inner))
        residuals[outer] = bool(rng.integers(2))
        returns = str(rng.choice(["tensor", "tuple", "dict"]))
        containers[str(outer)] = Chain(parts, returns, residuals[outer])
        order[""].append(str(outer))
    # What it begins with has parameters, so that a gradient is asked for.
    start, returned = nn.Linear(WIDTH, WIDTH), str(rng.choice(["tensor", "tuple", "dict"]))
    module = Chain({"start": start, **containers}, returned, False).double()
    marked = {name for name in [*order[""], *calls] if rng.integers(2)}

    def port(p: Any, x: Any, wrong: str = "") -> Any:
        x = linear(p, x, "start")
        for outer in order[""]:
            for inner in order[outer]:
                name = f"{outer}.{inner}"
                y = calls[name](p, x, name)
                y = 1.5 * y + 0.25 * x if wrong == name else y
                y = jaxtwin.probe(y, name) if name in marked else y
                x = x + y if residuals[outer] else y
            x = jaxtwin.probe(x, outer) if outer in marked else x
        if returned == "dict":
            return {"other": x * 2, "out": x}
        return (x, jnp.arange(3)) if returned == "tuple" else x

    named = dict(module.named_parameters())
    axes = {n: " ".join("io"[: x.ndim]) for n, x in named.items()}
    table = [Row(name, name, f"{of} -> {of}") for name, of in axes.items()]
    probes = [Row(name, name, "b d -> b d") for name in sorted(marked)]
    return module, port, table, probes


@pytest.mark.parametrize("seeds", [range(6), slow(range(6, 40)), full(range(40, 200))])
def test_no_name_and_no_structure_is_in_the_way(seeds: range) -> None:
    """Each right, and wrong in one part: a mistake that no hypothesis makes."""
    for seed in seeds:
        module, port, table, probes = odd(seed)
        params = {n: p.detach().numpy() for n, p in module.named_parameters()}
        x = [np.random.default_rng(seed).normal(size=(5, WIDTH))]
        how: dict[str, Any] = {"params": params, "probes": probes, "jit": False}
        how["dtypes"] = ["float64"]
        assert jaxtwin.compare(module, port, table, x, **how).equal, seed
        parts = sorted({n.rpartition(".")[0] for n in params} - {"start"})
        if not parts:
            continue
        wrong = functools.partial(port, wrong=parts[0])
        found = jaxtwin.compare(module, wrong, table, x, **how)
        assert not found.equal, seed
        assert found.divergences, seed
        assert found.divergences[0].direction == "forward", seed
