"""The table: one row per kind of tensor, and what can be done with rows.

A `Row` pairs a source's name with a destination's and says how the axes move. `rows` is the table
from torchref (source) to jaxmodel (destination), grouped by part and never by family. The dialects
are further lists of the same Row, from a published naming (source) to torchref (destination).

Holes: "{l}" in a name ranges over the row's values. A hole in both names renames; a hole in the
source's name only stacks its tensors in front ("l ..."). So scanned and unrolled layers, and
experts, are rows and no code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxtwin.configs import dataflow
from jaxtwin.configs.spec import (
    GQA,
    LN,
    RMS,
    SCALINGS,
    Alibi,
    Block,
    Glu,
    Learned,
    Mlp,
    Model,
    OwnNorm,
    PostBlock,
    QKNorm,
    Rope,
    Sinusoidal,
    T5Bias,
)
from jaxtwin.parity.table.row import Row


def merged(letters: str) -> str:
    """The pattern from one axis of the source to these letters."""
    return f"({letters}) -> {letters}" if " " in letters else f"{letters} -> {letters}"


def scale(letters: str) -> Row:
    return Row("weight", "weight", merged(letters))


def biases(src: bool, letters: Mapping[str, str], sizes: Mapping[str, int]) -> list[Row]:
    """The bias of each named matrix, over these letters; no rows where `src` is false."""
    return [
        Row(f"{name}_bias/weight", f"{name}.bias", merged(axes), sizes)
        for name, axes in letters.items()
        if src
    ]


def rms(spec: RMS, letters: str = "d") -> list[Row]:
    return [scale(letters)]


def layer_norm(spec: LN | OwnNorm, letters: str = "d") -> list[Row]:
    bias = Row("bias/weight", "bias.weight", merged(letters))
    return [scale(letters), *([bias] if spec.bias else [])]


def part(name: str, spec: Any, *args: Any) -> list[Row]:
    """The rows of a part under its name, which is the same on both sides."""
    return [row.prefixed(f"{name}/", f"{name}.", {}) for row in ROWS[type(spec)](spec, *args)]


def attention(spec: GQA) -> list[Row]:
    sizes = {"n": spec.heads, "k": spec.kv, "h": spec.width}
    rows = [
        Row("q", "q.weight", "(n h) d -> d n h", sizes),
        Row("k", "k.weight", "(k h) d -> d k h", sizes),
        Row("v", "v.weight", "(k h) d -> d k h", sizes),
        Row("o", "o.weight", "d (n h) -> n h d", sizes),
        *biases(spec.bias, {"q": "n h", "k": "k h", "v": "k h"}, sizes),
        *biases(spec.out_bias, {"o": "d"}, sizes),
        *part("q_norm", spec.qk_norm, "n"),
        *part("k_norm", spec.qk_norm, "k"),
        *part("rotate", spec.rope),
        *part("relative", spec.relative),
        *([Row("softmax/sinks", "softmax.sinks", "n -> n")] if spec.sinks else []),
    ]
    return [row.sized(sizes) for row in rows]


def normed_heads(spec: QKNorm, heads: str) -> list[Row]:
    letters = {"head": "h", "projection": f"{heads} h"}[spec.over]
    return part("norm", spec.norm, letters)


def bucket_bias(spec: T5Bias) -> list[Row]:
    return [Row("weight", "weight", "r n -> r n", {"r": spec.buckets})]


def learned(spec: Learned) -> list[Row]:
    return [Row("weight", "weight", "m d -> m d")]


def glu(spec: Glu) -> list[Row]:
    sizes = {"f": spec.hidden}
    return [
        Row("gate", "gate.weight", "f d -> d f", sizes),
        Row("up", "up.weight", "f d -> d f", sizes),
        Row("down", "down.weight", "d f -> f d", sizes),
        *biases(spec.bias, {"gate": "f", "up": "f", "down": "d"}, sizes),
    ]


def mlp(spec: Mlp) -> list[Row]:
    sizes = {"f": spec.hidden}
    return [
        Row("up", "up.weight", "f d -> d f", sizes),
        Row("down", "down.weight", "d f -> f d", sizes),
        *biases(spec.bias, {"up": "f", "down": "d"}, sizes),
    ]


def nothing(spec: object, *args: object) -> list[Row]:
    return []


def block(spec: Block | PostBlock) -> list[Row]:
    """The rows of one layer."""
    return [row for name in dataflow.parts(type(spec)) for row in part(name, getattr(spec, name))]


ROWS: dict[type, Callable[..., list[Row]]] = {
    RMS: rms,
    LN: layer_norm,
    OwnNorm: layer_norm,
    Learned: learned,
    Sinusoidal: nothing,
    Rope: nothing,
    **dict.fromkeys(SCALINGS, nothing),
    Alibi: nothing,
    T5Bias: bucket_bias,
    QKNorm: normed_heads,
    GQA: attention,
    Glu: glu,
    Mlp: mlp,
    Block: block,
    PostBlock: block,
    type(None): nothing,
}
Rows = Callable[[Block | PostBlock], list[Row]]


def scanned(spec: Model, block: Rows = block) -> list[Row]:
    """jaxmodel's stacked layers: block `i` of run `r` holds `spec.layer_numbers()[r][i]`.

    `block` gives one layer's rows: its parameters', or its probes'.
    """
    return [
        row.prefixed(f"stack/runs/{r}/{i}/", "layers.{l}.", {"l": layers})
        for r, (run, numbers) in enumerate(zip(spec.runs, spec.layer_numbers(), strict=True))
        for i, (pattern, layers) in enumerate(zip(run.blocks, numbers, strict=True))
        for row in block(pattern)
    ]


def unrolled(spec: Model, block: Rows = block) -> list[Row]:
    """jaxmodel's layers one by one."""
    return [
        row.prefixed("stack/layers/{l}/", "layers.{l}.", {"l": [i]})
        for i, pattern in enumerate(spec.layers)
        for row in block(pattern)
    ]


LAYOUTS = {"scan": scanned, "unroll": unrolled}


def rows(spec: Model, layout: str = "scan") -> list[Row]:
    """The table between jaxmodel's parameters (destination) and torchref's (source)."""
    table = [
        Row("embed/weight", "embed.weight", "v d -> v d"),
        *part("position", spec.position),
        *part("embed_norm", spec.embed_norm),
        *LAYOUTS[layout](spec),
        *part("norm", spec.norm),
        *([] if spec.tied else [Row("head/weight", "head.weight", "v d -> d v")]),
    ]
    return [row.sized({"d": spec.d, "v": spec.vocab, "m": spec.max_len}) for row in table]
