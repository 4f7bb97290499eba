"""The spec: what a decoder computes, as data that both mirrors are built from.

It holds the model's decisions and sizes and nothing of a run (dtype, mesh, kernel, path).
Each alternative on a design axis is a small class with only its own fields; None means absent.
Construction validates strictly, and every message names the field.

One alphabet serves specs, parameter shapes, einsums, table patterns and sharding rules: `LEGEND`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from jaxtwin.configs import own_parts
from jaxtwin.configs.fields import Above0, Size, Small, spec, validated
from jaxtwin.configs.positions import (
    Alibi,
    DynamicNTK,
    Learned,
    Linear,
    Llama3,
    LongRope,
    Position,
    Relative,
    Rope,
    Scaling,
    Sinusoidal,
    T5Bias,
    Yarn,
)

__all__ = [
    "FFN",
    "GQA",
    "LEGEND",
    "LN",
    "MOST",
    "PARTS",
    "RMS",
    "SCALINGS",
    "Alibi",
    "Block",
    "DynamicNTK",
    "Glu",
    "Layer",
    "Learned",
    "Linear",
    "Llama3",
    "LongRope",
    "Mlp",
    "Model",
    "Norm",
    "OwnNorm",
    "Position",
    "PostBlock",
    "QKNorm",
    "Relative",
    "Rope",
    "Run",
    "Scaling",
    "Sinusoidal",
    "T5Bias",
    "Yarn",
    "from_json",
    "to_json",
]

LEGEND = {
    "b": "batch",
    "t": "query time",
    "s": "key time",
    "d": "model width",
    "n": "query heads",
    "k": "key/value heads",
    "h": "head width",
    "f": "ffn hidden width",
    "e": "experts",
    "v": "vocabulary",
    "l": "stacked layers",
    "m": "learned positions",
    "r": "buckets of a relative bias",
}

MOST = 10_000  # repetitions of a pattern of layers


@spec
class RMS:
    """Root-mean-square norm with a learned scale (Zhang & Sennrich 2019, arXiv 1910.07467).

    `offset`: the scale is 1 + w and w starts at 0, as in Gemma. `cast` says where a half-width
    result is rounded: "before" it is scaled, as in Llama, or "after", as in Gemma.
    """

    kind: Literal["rms"] = "rms"
    eps: Small
    offset: bool = False
    cast: Literal["before", "after"] = "before"


@spec
class LN:
    """Layer norm with a learned scale and bias (Ba et al. 2016, arXiv 1607.06450)."""

    kind: Literal["layer"] = "layer"
    eps: Small
    bias: bool = True


@spec
class OwnNorm:
    """A norm that a person registered under this name (`own_parts.register_norm`)."""

    kind: Literal["own"] = "own"
    name: Annotated[str, AfterValidator(own_parts.known_norm)]
    eps: Small = 0.0
    bias: bool = False


AnyNorm = Annotated[RMS | LN | OwnNorm, Field(discriminator="kind")]
Norm = AnyNorm | None
Activation = Annotated[str, AfterValidator(own_parts.known_activation)]


@spec
class QKNorm:
    """A norm of queries and keys before they turn, with scales of its own for each of the two.

    `over` one head's width (Qwen 3, Gemma 3) or the whole projection, all heads (OLMo 2).
    """

    kind: Literal["qk"] = "qk"
    norm: AnyNorm
    over: Literal["head", "projection"]


@spec
class GQA:
    """Causal attention with grouped key/value heads (Ainslie et al. 2023, arXiv 2305.13245).

    kv == heads is multi-head attention and kv == 1 multi-query. `width` is one head's own width;
    it need not be d / heads. Without `rope` and `relative` the layer has no positions (NoPE).
    `bias` is that of Q, K and V, `out_bias` the output's. Scores are multiplied by `scale`, or by
    width^-0.5 where it is None, and then softly capped: cap * tanh(scores / cap). A token sees
    itself and the window - 1 tokens before it.
    """

    kind: Literal["gqa"] = "gqa"
    heads: Size
    kv: Size
    width: Size
    rope: Rope | None
    relative: Relative | None = None
    bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    scale: Above0 | None = None
    cap: Above0 | None = None
    window: Size | None = None
    sinks: bool = False

    @model_validator(mode="after")
    def _fits(self) -> GQA:
        if self.heads % self.kv:
            raise ValueError(f"heads={self.heads} is not a multiple of kv={self.kv}")
        if self.rope is None:
            return self
        turned = self.width if self.rope.width is None else self.rope.width
        if turned % 2:
            raise ValueError(f"width={turned} is odd; rotary positions turn pairs")
        if turned > self.width:
            raise ValueError(f"rope.width={turned} is more than the head's width={self.width}")
        scaling = self.rope.scaling
        if isinstance(scaling, Yarn) and self.rope.base <= 1:
            raise ValueError(f"rope.base={self.rope.base}: YaRN needs a base above 1")
        if isinstance(scaling, DynamicNTK) and turned == 2:
            raise ValueError("dynamic scaling needs a rotary width of 4 or more")
        if isinstance(scaling, LongRope):
            for name, factors in (("short", scaling.short), ("long", scaling.long)):
                if len(factors) != turned // 2:
                    raise ValueError(
                        f"rope.scaling.{name} has {len(factors)} factors for {turned // 2} pairs"
                    )
        return self


@spec
class Glu:
    """Gated feed-forward: down(act(gate x) * up x) (Shazeer 2020, arXiv 2002.05202)."""

    kind: Literal["glu"] = "glu"
    hidden: Size
    act: Activation = "silu"
    bias: bool = False


@spec
class Mlp:
    """Plain feed-forward: down(act(up x)) (Vaswani et al. 2017, arXiv 1706.03762, section 3.3)."""

    kind: Literal["mlp"] = "mlp"
    hidden: Size
    act: Activation
    bias: bool


FFN = Annotated[Glu | Mlp, Field(discriminator="kind")]


@spec
class Block:
    """One layer: x + post_attn(attn(pre_attn(x))), then the same with ffn. A norm may be absent.

    Norms before alone are "pre", before and after "sandwich", after alone "output-only".
    """

    kind: Literal["pre"] = "pre"
    pre_attn: Norm
    attn: GQA
    post_attn: Norm = None
    pre_ffn: Norm
    ffn: FFN
    post_ffn: Norm = None


@spec
class PostBlock:
    """One layer wired as in 2017: post_attn(alpha x + attn(x)), then the same with ffn.

    alpha is 1 there (arXiv 1706.03762) and more in DeepNorm (Wang et al. 2022, arXiv 2203.00555).
    """

    kind: Literal["post"] = "post"
    attn: GQA
    post_attn: Norm
    ffn: FFN
    post_ffn: Norm
    alpha: Above0 = 1.0


def _wiring(layer: Any) -> Any:
    """Which of the two; files from before there were two do not say."""
    return layer.get("kind", "pre") if isinstance(layer, dict) else getattr(layer, "kind", None)


Layer = Annotated[
    Annotated[Block, Tag("pre")] | Annotated[PostBlock, Tag("post")], Discriminator(_wiring)
]


@spec
class Run:
    """A pattern of blocks, repeated: what one scan goes over."""

    blocks: Annotated[tuple[Layer, ...], Field(min_length=1)]
    repeats: Size

    @model_validator(mode="after")
    def _bounded(self) -> Run:
        if self.repeats > MOST:  # a typing error would keep a machine busy for hours
            raise ValueError(f"repeats={self.repeats} is more than {MOST} repetitions of a pattern")
        return self


@spec
class Model:
    """A decoder: embedding, runs of blocks, final norm, head.

    The embedding is multiplied by `embed_scale` (rounded to the dtype of the computation), gets the
    position added and goes through `embed_norm`, each where there is one. The logits are softly
    capped: cap * tanh(logits / cap).
    """

    d: Size
    vocab: Size
    max_len: Size
    embed_scale: Above0 | None = None
    position: Position | None = None
    embed_norm: Norm = None
    runs: Annotated[tuple[Run, ...], Field(min_length=1)]
    norm: Norm
    tied: bool
    cap: Above0 | None = None
    init_std: Above0 = 0.02

    @model_validator(mode="after")
    def _even(self) -> Model:
        if isinstance(self.position, Sinusoidal) and self.d % 2:
            raise ValueError(f"d={self.d} is odd; sinusoidal positions are pairs of sin and cos")
        return self

    @property
    def layers(self) -> tuple[Block | PostBlock, ...]:
        """Every block in the order of computation."""
        return tuple(block for run in self.runs for block in run.blocks * run.repeats)

    def layer_numbers(self) -> tuple[tuple[range, ...], ...]:
        """The layers that each block of each run's pattern stands for: [run][block in the pattern].

        A run of (A, B) twice, then one of (C,) once: (0, 2), (1, 3); (4,) as ranges.
        """
        out, first = [], 0
        for run in self.runs:
            period = len(run.blocks)
            end = first + period * run.repeats
            out.append(tuple(range(first + i, end, period) for i in range(period)))
            first = end
        return tuple(out)


SCALINGS = (Linear, DynamicNTK, Yarn, Llama3, LongRope)
PARTS = (  # what the rooms' dicts of builders are keyed by
    RMS,
    LN,
    OwnNorm,
    Learned,
    Sinusoidal,
    Rope,
    *SCALINGS,
    Alibi,
    T5Bias,
    QKNorm,
    GQA,
    Glu,
    Mlp,
    Block,
    PostBlock,
)

_MODEL: pydantic.TypeAdapter[Model] = pydantic.TypeAdapter(Model)


def to_json(model: Model) -> dict[str, Any]:
    """The spec as plain JSON data, every field written out."""
    return _MODEL.dump_python(model, mode="json")


def from_json(data: Any, where: str) -> Model:
    """The inverse of `to_json`; `where` names the file in the error."""
    return validated(_MODEL, data, where)
