"""A decoder as people write it in torch, and three ports of it: functions, linen, NNX.

The torch side is written like Meta's: a complex table of rotations in a buffer, norms that compute
in float32, a dict for what it returns. The ports take a mistake by name, to see it found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from flax import linen, nnx
from torch import nn

from jaxtwin import Row, probe

VOCAB, WIDTH, HEADS, KV, HEAD, HIDDEN, LAYERS, LENGTH, BASE, EPS = (
    23,
    24,
    4,
    2,
    6,
    40,
    2,
    9,
    1e4,
    1e-5,
)

# ---- torch --------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.eps = EPS
        self.weight = nn.Parameter(1 + torch.randn(width) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.wq = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.wk = nn.Linear(WIDTH, KV * HEAD, bias=False)
        self.wv = nn.Linear(WIDTH, KV * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k = self.wq(x).view(b, t, HEADS, HEAD), self.wk(x).view(b, t, KV, HEAD)
        v = self.wv(x).view(b, t, KV, HEAD).transpose(1, 2)
        q = probe(self.turned(q, turns), f"{self.name}.q").transpose(1, 2)
        k = probe(self.turned(k, turns), f"{self.name}.k").transpose(1, 2)
        k, v = (y.repeat_interleave(HEADS // KV, dim=1) for y in (k, v))
        scores = q @ k.transpose(2, 3) / HEAD**0.5
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.wo(mixed.transpose(1, 2).reshape(b, t, -1))

    @staticmethod
    def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[: x.shape[1], None]).flatten(3).type_as(x)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm, self.pre_ffn = RMSNorm(WIDTH), RMSNorm(WIDTH)  # names that torchref has too
        self.attn, self.ffn = Attention(f"{name}.attn"), FeedForward()

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm(x), turns)
        return x + self.ffn(self.pre_ffn(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        layers = [Layer(f"transformer.h.{i}") for i in range(LAYERS)]
        self.transformer = nn.ModuleDict({"h": nn.ModuleList(layers), "last": RMSNorm(WIDTH)})
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        rates = BASE ** (-torch.arange(0, HEAD, 2).double() / HEAD)
        angles = torch.outer(torch.arange(LENGTH).double(), rates)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(ids) * WIDTH**0.5
        for layer in self.transformer["h"]:
            x = layer(x, self.freqs_cis)
        x = self.transformer["last"](x)
        return {"logits": self.head(x), "hidden": x}


# ---- the ports ----------------------------------------------------------------------------------

MISTAKES = {
    "kv heads tiled": "tile-not-repeat",
    "mask off by one": "causal-corner",
    "pairs swapped": "rope-pairing",
    "base": "rope-base",
    "scale missing": "scale-missing",
    "w1 and w3": "parts-exchanged",
    "residual": "residual-from-elsewhere",
    "embedding scale": "scaled",
    "eps": "norm-eps",
    "activation": "activation",
    "plus one": "norm-plus-one",
    "positions from one": "position-offset",
}


def norm(x: Any, weight: Any, wrong: str) -> Any:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + (1e-6 if wrong == "eps" else EPS))
    return y.astype(x.dtype) * (weight + 1 if wrong == "plus one" else weight)


def turned(x: Any, wrong: str) -> Any:
    """x (b t n h), adjacent pairs turned."""
    base = 5e5 if wrong == "base" else BASE
    rates = base ** (-jnp.arange(0, HEAD, 2, dtype=x.dtype) / HEAD)
    start = 1 if wrong == "positions from one" else 0
    angles = jnp.outer(jnp.arange(start, start + x.shape[1]), rates)[:, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if wrong == "pairs swapped":
        one, other = jnp.split(x, 2, axis=-1)
        return jnp.concatenate((one * cos - other * sin, one * sin + other * cos), axis=-1)
    one, other = x[..., 0::2], x[..., 1::2]
    return jnp.stack((one * cos - other * sin, one * sin + other * cos), -1).reshape(x.shape)


def attention(w: Mapping[str, Any], x: Any, name: str, wrong: str) -> Any:
    b, t, _ = x.shape
    q, k = ((x @ w[n]).reshape(b, t, -1, HEAD) for n in ("wq", "wk"))
    q = probe(turned(q, wrong), f"{name}/q")
    k = probe(turned(k, wrong), f"{name}/k")
    v = probe(x @ w["wv"], f"{name}/v").reshape(b, t, KV, HEAD)
    if wrong == "kv heads tiled":
        k, v = (jnp.tile(y, (1, 1, HEADS // KV, 1)) for y in (k, v))
    else:
        k, v = (jnp.repeat(y, HEADS // KV, axis=2) for y in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / (1 if wrong == "scale missing" else HEAD**0.5)
    ahead = 1 if wrong == "mask off by one" else 0
    seen = jnp.tril(jnp.ones((t, t), bool), ahead)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(b, t, -1)
    return probe(mixed, f"{name}/mixed") @ w["wo"]


def ffn(w: Mapping[str, Any], x: Any, wrong: str) -> Any:
    gate, up = ("w3", "w1") if wrong == "w1 and w3" else ("w1", "w3")
    act = jax.nn.gelu if wrong == "activation" else jax.nn.silu
    return (act(x @ w[gate]) * (x @ w[up])) @ w["w2"]


def layer(w: Mapping[str, Any], x: Any, name: str, wrong: str) -> Any:
    y = norm(x, w["norm"], wrong)
    x = (y if wrong == "residual" else x) + attention(w["attn"], y, f"{name}/attn", wrong)
    return probe(x + ffn(w["ffn"], norm(x, w["pre_ffn"], wrong), wrong), name)


def model(w: Mapping[str, Any], ids: Any, wrong: str = "") -> dict[str, Any]:
    """The port as functions; its probes are in six lines."""
    x = w["tokens"][ids] * (1 if wrong == "embedding scale" else WIDTH**0.5)
    x = probe(x, "embed")
    for i in range(LAYERS):
        x = layer(w["layers"][f"layer_{i}"], x, f"layer_{i}", wrong)
    x = norm(x, w["last"], wrong)
    return {"logits": x @ w["head"], "hidden": x}


class Linen(linen.Module):
    """The port whose parameters linen makes."""

    wrong: str = ""

    @linen.compact
    def __call__(self, ids: Any) -> dict[str, Any]:
        def made(path: str, shape: Any) -> Any:
            if not isinstance(shape, tuple):
                return {k: made(f"{path}_{k}" if path else k, s) for k, s in shape.items()}
            return self.param(path, linen.initializers.normal(), shape)

        return model(made("", SHAPES), ids, self.wrong)


class Nnx(nnx.Module):
    """The port as an NNX module, with nnx.Embed, which fixes its dtype when it is made."""

    def __init__(self, params: Mapping[str, Any], wrong: str = "") -> None:
        self.wrong = wrong
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=nnx.Rngs(0))
        self.tokens.embedding.set_value(jnp.asarray(params["tokens"], jnp.float32))
        rest = {name: value for name, value in params.items() if name != "tokens"}
        self.rest = nnx.data(jax.tree.map(lambda x: nnx.Param(jnp.asarray(x)), rest))

    def __call__(self, ids: Any) -> dict[str, Any]:
        weights = jax.tree.map(
            lambda p: p[...], self.rest, is_leaf=lambda p: isinstance(p, nnx.Param)
        )
        looked_up = self.tokens(jnp.arange(VOCAB))
        return model({**weights, "tokens": looked_up}, ids, self.wrong)


SHAPES: dict[str, Any] = {
    "tokens": (VOCAB, WIDTH),
    "layers": {
        f"layer_{i}": {
            "norm": (WIDTH,),
            "pre_ffn": (WIDTH,),
            "attn": {
                "wq": (WIDTH, HEADS * HEAD),
                "wk": (WIDTH, KV * HEAD),
                "wv": (WIDTH, KV * HEAD),
                "wo": (HEADS * HEAD, WIDTH),
            },
            "ffn": {"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)},
        }
        for i in range(LAYERS)
    },
    "last": (WIDTH,),
    "head": (WIDTH, VOCAB),
}


def _table() -> list[Row]:
    rows = [
        Row("tokens", "tokens.weight", "v d -> v d"),
        Row("last", "transformer.last.weight", "d -> d"),
        Row("head", "head.weight", "v d -> d v"),
    ]
    for i in range(LAYERS):
        dst, src = f"layers/layer_{i}", f"transformer.h.{i}"
        rows += [Row(f"{dst}/{n}", f"{src}.{n}.weight", "d -> d") for n in ("norm", "pre_ffn")]
        for part in [f"attn/w{n}" for n in "qkvo"] + [f"ffn/w{n}" for n in "123"]:
            name = f"{src}.{part.replace('/', '.')}.weight"
            rows.append(Row(f"{dst}/{part}", name, "o i -> i o"))
    return rows


def _probes() -> list[Row]:
    rows = [Row("embed", "transformer.h.0:in", "b t d -> b t d")]
    sizes = {"n": HEADS, "k": KV, "h": HEAD}
    for i in range(LAYERS):
        dst, src = f"layer_{i}/attn", f"transformer.h.{i}.attn"
        rows += [
            Row(f"{dst}/q", f"{src}.q", "b t n h -> b t n h"),
            Row(f"{dst}/k", f"{src}.k", "b t k h -> b t k h"),
            Row(f"{dst}/v", f"{src}.wv", "b t (k h) -> b t (k h)", sizes),
            Row(f"{dst}/mixed", f"{src}.wo:in", "b t (n h) -> b t (n h)", sizes),
            Row(f"layer_{i}", f"transformer.h.{i}", "b t d -> b t d"),
        ]
    return rows


@dataclass(frozen=True)
class Port:
    """What `jaxtwin.compare` is given beside the torch module."""

    side: Any
    params: Any
    table: list[Row]
    probes: list[Row]


def torch_side() -> tuple[Model, list[np.ndarray]]:
    torch.manual_seed(0)
    module = Model()
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH))
    return module, [ids]


def port(kind: str, module: Model, wrong: str = "") -> Port:
    """The port of that kind, with the module's weights."""
    table, named = _table(), dict(module.named_parameters())

    def value(path: str, shape: Any) -> Any:
        if isinstance(shape, dict):
            return {k: value(f"{path}/{k}" if path else k, s) for k, s in shape.items()}
        row = next(row for row in table if row.dst == path)
        x = named[row.src].detach().numpy()
        return x if row.pattern in ("d -> d", "v d -> v d") else np.ascontiguousarray(x.T)

    params = value("", SHAPES)
    if kind == "functions":
        return Port(functools.partial(model, wrong=wrong), params, table, _probes())
    if kind == "linen":
        flat = {}

        def flatten(path: str, x: Any) -> None:
            for key, inner in x.items():
                at = f"{path}_{key}" if path else key
                if isinstance(inner, dict):
                    flatten(at, inner)
                else:
                    flat[at] = inner

        flatten("", params)
        rows = [Row(row.dst.replace("/", "_"), row.src, row.pattern) for row in table]
        return Port(Linen(wrong), {"params": flat}, rows, _probes())
    rows = [
        Row("tokens/embedding" if row.dst == "tokens" else f"rest/{row.dst}", row.src, row.pattern)
        for row in table
    ]
    return Port(Nnx(params, wrong), None, rows, _probes())


KINDS: tuple[str, ...] = ("functions", "linen", "nnx")
Compare = Callable[..., Any]
