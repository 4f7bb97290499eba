"""The same decisions at a size that anybody can afford: what tests, and a first look, run on."""

from __future__ import annotations

import math
from dataclasses import replace

from jaxtwin.configs.spec import (
    GQA,
    Block,
    DynamicNTK,
    Llama3,
    LongRope,
    Model,
    PostBlock,
    Rope,
    Run,
    T5Bias,
    Yarn,
)

SCALED = (DynamicNTK, Llama3, LongRope, Yarn)


def shrunk(
    model: Model, *, d: int = 24, hidden: int = 20, vocab: int = 37, long: int = 40
) -> Model:
    """A tiny model with every decision of that one, and lengths that `long` tokens can see.

    Its heads are four of width 6 and share keys and values in the same proportion, as far as that
    goes; what turns of them is the same part. A feed-forward of 4 d stays one, and an embedding
    times sqrt(d). A window is a fifth of the length, and frequencies change at two fifths. Each
    pattern of layers is kept, and repeated twice at most.
    """
    runs = tuple(
        Run(
            blocks=tuple(
                _block(block, 4 * d if block.ffn.hidden == 4 * model.d else hidden, long)
                for block in run.blocks
            ),
            repeats=min(run.repeats, 2),
        )
        for run in model.runs
    )
    scale = model.embed_scale
    scale = None if scale is None else scale * (d / model.d) ** 0.5  # sqrt(d) stays sqrt(d)
    if scale is not None and math.isclose(scale, d**0.5, rel_tol=1e-12):
        scale = d**0.5
    return replace(model, d=d, vocab=vocab, max_len=long, runs=runs, embed_scale=scale)


def _block(block: Block | PostBlock, hidden: int, long: int) -> Block | PostBlock:
    return replace(block, attn=_attention(block.attn, long), ffn=replace(block.ffn, hidden=hidden))


def _attention(attn: GQA, long: int) -> GQA:
    shared = max(1, attn.kv * 4 // attn.heads)
    relative = attn.relative
    if isinstance(relative, T5Bias):
        relative = T5Bias(buckets=4, longest=long // 5)
    return replace(
        attn,
        heads=4,
        kv=shared if 4 % shared == 0 else 2,
        width=6,
        rope=None if attn.rope is None else _rope(attn.rope, attn.width, long),
        relative=relative,
        window=None if attn.window is None else long // 5,
    )


def _rope(rope: Rope, width: int, long: int) -> Rope:
    turned = None if rope.width is None else max(2, 2 * round(3 * rope.width / width))
    scaling = rope.scaling
    if isinstance(scaling, SCALED):
        scaling = replace(scaling, original=2 * long // 5)
    if isinstance(scaling, LongRope):
        pairs = (turned or 6) // 2
        short, far = (
            tuple(x[i * (len(x) - 1) // max(1, pairs - 1)] for i in range(pairs))
            for x in (scaling.short, scaling.long)
        )
        scaling = replace(scaling, short=short, long=far)
    if isinstance(scaling, DynamicNTK) and turned == 2:
        turned = 4
    return replace(rope, width=turned, scaling=scaling)
