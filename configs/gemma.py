"""Gemma: norms that scale by 1 + w, a scaled and tied embedding, GeGLU; from 2 on, local layers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

from jaxtwin.configs.spec import GQA, RMS, Block, Glu, Model, QKNorm, Rope, Run

NORM = RMS(eps=1e-6, offset=True, cast="after")


class Sizes(TypedDict):
    """What every Gemma has outside its attention."""

    vocab: int
    d: int
    hidden: int
    max_len: int


def gemma(
    *,
    vocab: int,
    d: int,
    hidden: int,
    max_len: int,
    attention: Sequence[tuple[tuple[GQA, ...], int]],
    sandwich: bool,
    norm: RMS = NORM,
    tied: bool = True,
    cap: float | None = None,
) -> Model:
    """A Gemma of any size. `attention`: patterns of layers, each with how often it comes.

    `sandwich` (2 and 3): the norms after each part too. `cap` (2): that of the logits.
    """
    after = norm if sandwich else None

    def layer(attn: GQA) -> Block:
        return Block(
            pre_attn=norm,
            attn=attn,
            post_attn=after,
            pre_ffn=norm,
            ffn=Glu(hidden=hidden, act="gelu_tanh"),
            post_ffn=after,
        )

    return Model(
        d=d,
        vocab=vocab,
        max_len=max_len,
        embed_scale=d**0.5,
        runs=tuple(
            Run(blocks=tuple(map(layer, pattern)), repeats=repeats)
            for pattern, repeats in attention
        ),
        norm=norm,
        tied=tied,
        cap=cap,
    )


def interleaved(
    local: GQA, full: GQA, layers: int, every: int
) -> list[tuple[tuple[GQA, ...], int]]:
    """Every `every`-th layer sees all of the text, the others a window; the rest is local."""
    repeats, rest = divmod(layers, every)
    pattern = ((local,) * (every - 1) + (full,)) if repeats else ()
    return [(run, n) for run, n in ((pattern, repeats), ((local,), rest)) if n]


def gemma1(*, layers: int, heads: int, kv: int, width: int, **sizes: Unpack[Sizes]) -> Model:
    """Gemma 1: every layer sees all (Gemma Team 2024, arXiv 2403.08295)."""
    attn = GQA(heads=heads, kv=kv, width=width, rope=Rope(base=10_000.0, pairs="half"))
    return gemma(attention=[((attn,), layers)], sandwich=False, **sizes)


def gemma2(
    *, layers: int, heads: int, kv: int, width: int, window: int, **sizes: Unpack[Sizes]
) -> Model:
    """Gemma 2: local and global in turn, caps (Gemma Team 2024, arXiv 2408.00118, section 2).

    The scale is query_pre_attn_scalar^-0.5; here the scalar is the head's width, as in the 2B.
    """
    rope = Rope(base=10_000.0, pairs="half")
    full = GQA(heads=heads, kv=kv, width=width, rope=rope, cap=50.0)
    pattern = interleaved(replace(full, window=window), full, layers, 2)
    return gemma(attention=pattern, sandwich=True, cap=30.0, **sizes)


def gemma3(
    *, layers: int, heads: int, kv: int, width: int, window: int, **sizes: Unpack[Sizes]
) -> Model:
    """Gemma 3: five local layers to a global one, two bases (arXiv 2503.19786, section 2).

    The 1B has no scaling of positions; those above divide the global layers' by 8.
    """
    full = GQA(
        heads=heads,
        kv=kv,
        width=width,
        rope=Rope(base=1_000_000.0, pairs="half"),
        qk_norm=QKNorm(norm=NORM, over="head"),
    )
    local = replace(full, rope=Rope(base=10_000.0, pairs="half"), window=window)
    return gemma(attention=interleaved(local, full, layers, 6), sandwich=True, **sizes)


PRESETS = {
    # arXiv 2403.08295, table 1; google/gemma-2b, config.json
    "gemma-2b": gemma1(
        vocab=256_000,
        d=2_048,
        layers=18,
        heads=8,
        kv=1,
        width=256,
        hidden=16_384,
        max_len=8_192,
    ),
    # arXiv 2408.00118, table 1; google/gemma-2-2b, config.json (scalar 256, window 4,096)
    "gemma2-2b": gemma2(
        vocab=256_000,
        d=2_304,
        layers=26,
        heads=8,
        kv=4,
        width=256,
        window=4_096,
        hidden=9_216,
        max_len=8_192,
    ),
    # google/gemma-3-1b-pt, config.json: 4 x (5 local, 1 global) and 2 local
    "gemma3-1b": gemma3(
        vocab=262_144,
        d=1_152,
        layers=26,
        heads=4,
        kv=1,
        width=256,
        window=512,
        hidden=6_912,
        max_len=32_768,
    ),
    "gemma-tiny": gemma1(
        vocab=263, d=32, layers=3, heads=4, kv=1, width=10, hidden=44, max_len=128
    ),
    "gemma2-tiny": gemma2(
        vocab=263, d=32, layers=4, heads=4, kv=2, width=10, window=7, hidden=44, max_len=128
    ),
    "gemma3-tiny": gemma3(
        vocab=263, d=32, layers=7, heads=4, kv=1, width=10, window=7, hidden=44, max_len=128
    ),
}
