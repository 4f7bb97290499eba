"""Tiny models to try things on: a few that have a place for every fault, and random ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_type_hints

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.dataflow import norms
from jaxtwin.configs.llama import llama
from jaxtwin.configs.spec import (
    GQA,
    LN,
    RMS,
    Alibi,
    Block,
    DynamicNTK,
    Glu,
    Learned,
    Linear,
    Llama3,
    LongRope,
    Mlp,
    Norm,
    PostBlock,
    QKNorm,
    Rope,
    Run,
    Sinusoidal,
    T5Bias,
    Yarn,
)
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensor, src_shapes


def shapes() -> dict[str, Model]:
    """Models that between them have a place for every fault."""
    base = llama(
        vocab=61,
        d=16,
        layers=3,
        heads=4,
        kv=2,
        hidden=24,
        max_len=64,
        base=10_000.0,
        pairs="adjacent",
        eps=1e-3,
        tied=True,
    )
    norm = RMS(eps=1e-3)
    attn = GQA(heads=4, kv=2, width=4, rope=Rope(base=500.0, pairs="half"))
    ffn = Glu(hidden=24, act="gelu_tanh")
    block = Block(pre_attn=norm, attn=attn, post_attn=norm, pre_ffn=norm, ffn=ffn, post_ffn=norm)
    sandwich = replace(base, runs=(Run(blocks=(block,), repeats=2),), tied=False)
    layer = LN(eps=1e-3)
    first: Any = base.layers[0]
    block = replace(first, pre_attn=layer, pre_ffn=RMS(eps=1e-3, offset=True))
    mixed = replace(base, runs=(Run(blocks=(block,), repeats=2),), norm=layer)
    return {
        "pre-norm": base,
        "sandwich": sandwich,
        "LayerNorm": mixed,
        "GPT": gpt(base),
        "2017": of_2017(base),
    }


def gpt(base: Model) -> Model:
    """Biases, plain feed-forward, learned positions, and what newer models cap and cut off."""
    rope = Rope(base=500.0, pairs="half", width=4, scaling=YARN)
    norm = LN(eps=1e-3)
    normed = QKNorm(norm=RMS(eps=1e-3), over="head")
    switched_on: dict[str, Any] = dict.fromkeys(switches(GQA), True)
    attn = GQA(
        heads=4,
        kv=2,
        width=8,
        rope=rope,
        qk_norm=normed,
        scale=0.7,
        cap=3.0,
        window=9,
        **switched_on,
    )
    ffn = Mlp(hidden=24, act="gelu_tanh", bias=True)
    block = Block(pre_attn=norm, attn=attn, pre_ffn=norm, ffn=ffn)
    runs = (Run(blocks=(block,), repeats=2),)
    more: dict[str, Any] = {
        "position": Learned(),
        "embed_scale": 3.0,
        "embed_norm": norm,
        "cap": 5.0,
    }
    return replace(base, runs=runs, norm=norm, **more)


def of_2017(base: Model) -> Model:
    """Norms over the sum, sinusoidal positions, and a bias of distance beside them."""
    attn = replace(base.layers[0].attn, rope=None, relative=Alibi())
    norm = LN(eps=1e-3)
    ffn = Glu(hidden=24, bias=True)
    block = PostBlock(attn=attn, post_attn=norm, ffn=ffn, post_ffn=norm, alpha=1.5)
    return replace(base, runs=(Run(blocks=(block,), repeats=2),), position=Sinusoidal(), norm=norm)


YARN = Yarn(factor=4.0, original=16, magnitude=1.2)


def weights(spec: Model, seed: int) -> dict[str, Tensor]:
    """Lively values: matrices of unit gain, scales around one. Small ones hide faults."""
    rng = np.random.default_rng(seed)
    around_zero = offsets(spec)

    def one(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return rng.uniform(0.5, 1.5, shape) - (name in around_zero)
        return rng.normal(0, shape[1] ** -0.5, shape)

    named = src_shapes(decoder_table.rows(spec, "unroll"))
    return {name: Tensor.of(one(name, shape)) for name, shape in named}


def offsets(spec: Model) -> set[str]:
    """The scales that are 1 + w: drawn around two, they would double rounding in every layer."""
    found: dict[str, Any] = {"norm.weight": spec.norm, "embed_norm.weight": spec.embed_norm}
    for i, b in enumerate(spec.layers):
        found |= {f"layers.{i}.{name}.weight": norm for name, norm in norms(b).items()}
        if b.attn.qk_norm is not None:
            inner = (f"layers.{i}.attn.{part}.norm.weight" for part in ("q_norm", "k_norm"))
            found |= dict.fromkeys(inner, b.attn.qk_norm.norm)
    return {name for name, norm in found.items() if isinstance(norm, RMS) and norm.offset}


def switches(part: type) -> list[str]:
    """The fields of a spec class that are on or off: random models draw each."""
    return [name for name, kind in get_type_hints(part).items() if kind is bool]


def arbitrary(seed: int) -> Model:
    """A random spec over every axis there is."""
    return Draw(np.random.default_rng((seed, 77))).model()


@dataclass(frozen=True)
class Draw:
    """Parts of a random spec.

    The sizes come from a small pool: what differs in size is compiled anew, operation by operation.
    """

    rng: np.random.Generator

    def one_of(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def switched(self, part: type) -> dict[str, Any]:
        return {name: self.one_of(False, True) for name in switches(part)}

    def norm(self) -> Norm:
        rms = RMS(eps=self.one_of(0.0, 1e-6, 1e-5), offset=self.one_of(False, True))
        # A layer's few values may be nearly alike: no eps near zero.
        return self.one_of(None, rms, rms, LN(eps=1e-3, bias=self.one_of(False, True)))

    def rope(self, width: int) -> Rope:
        one_of = self.one_of
        turned = one_of(None, None, 2)
        pairs = (turned or width) // 2
        scaling = one_of(
            None,
            None,
            None,
            Linear(factor=3.0),
            DynamicNTK(factor=2.0, original=8) if pairs > 1 else None,
            YARN,
            replace(YARN, truncate=False),
            Llama3(factor=8.0, low=1.0, high=4.0, original=one_of(16, 256)),
            LongRope(
                short=(1.1, 1.3)[:pairs],
                long=(1.5, 3.0)[:pairs],
                original=one_of(8, 64),
                magnitude=1.2,
            ),
        )
        return Rope(
            base=one_of(100.0, 1e4, 5e5),
            pairs=one_of("adjacent", "half"),
            width=turned,
            scaling=scaling,
        )

    def attention(self) -> GQA:
        one_of, width = self.one_of, 4
        rope, over = self.rope(width), one_of("head", "projection")
        normed = QKNorm(norm=self.norm() or RMS(eps=1e-3), over=over)
        return GQA(
            heads=4,
            kv=one_of(1, 2, 4),
            width=width,
            rope=one_of(None, rope, rope, rope),
            relative=one_of(None, None, Alibi(), T5Bias(buckets=8, longest=20)),
            qk_norm=one_of(None, None, normed),
            scale=one_of(None, None, 0.4),
            cap=one_of(None, None, 4.0),
            window=one_of(None, None, 5),
            **self.switched(GQA),
        )

    def ffn(self) -> Glu | Mlp:
        gated = Glu(hidden=24, act=self.one_of("silu", "gelu", "gelu_tanh"), **self.switched(Glu))
        plain = Mlp(hidden=24, act=self.one_of("relu", "gelu", "gelu_tanh"), **self.switched(Mlp))
        return self.one_of(gated, plain)

    def block(self) -> Block | PostBlock:
        pre = Block(
            pre_attn=self.norm() or RMS(eps=1e-6),
            attn=self.attention(),
            post_attn=self.norm(),
            pre_ffn=self.norm() or RMS(eps=1e-6),
            ffn=self.ffn(),
            post_ffn=self.norm(),
        )
        after = RMS(eps=1e-3)
        post = PostBlock(
            attn=pre.attn,
            post_attn=self.norm() or after,
            ffn=pre.ffn,
            post_ffn=self.norm() or after,
            alpha=self.one_of(1.0, 1.7),
        )
        output_only = replace(pre, pre_attn=None, pre_ffn=None, post_attn=after, post_ffn=after)
        return self.one_of(pre, pre, pre, post, output_only)

    def model(self) -> Model:
        one_of = self.one_of
        runs = tuple(
            Run(
                blocks=tuple(self.block() for _ in range(one_of(1, 1, 2))),
                repeats=one_of(1, 2),
            )
            for _ in range(one_of(1, 1, 2))
        )
        return Model(
            d=16,
            vocab=61,
            max_len=32,
            embed_scale=one_of(None, None, 3.0),
            position=one_of(None, None, Learned(), Sinusoidal()),
            embed_norm=one_of(None, None, self.norm()),
            runs=runs,
            norm=self.norm() or RMS(eps=1e-6),
            tied=one_of(True, False),
            cap=one_of(None, None, 5.0),
        )
