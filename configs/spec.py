"""The spec: what a decoder computes, as data that both mirrors are built from.

It holds the model's decisions and sizes and nothing of a run (dtype, mesh, kernel, path).
Each alternative on a design axis is a small class with only its own fields; None means absent.
Construction validates strictly, and every message names the field.

One alphabet serves specs, parameter shapes, einsums, table patterns and sharding rules: `LEGEND`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform

import pydantic
from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from jaxtwin.configs.errors import BadInput

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

Size = Annotated[int, Field(gt=0, description="a count of something: a positive integer")]
Small = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeast1 = Annotated[float, Field(ge=1, allow_inf_nan=False)]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def spec(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass that refuses wrong types and unknown fields."""
    config = ConfigDict(strict=True, extra="forbid")
    made = pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=True, config=config)
    return cast(type[T], made)


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


Norm = Annotated[RMS | LN, Field(discriminator="kind")] | None


@spec
class Linear:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): every frequency / factor."""

    kind: Literal["linear"] = "linear"
    factor: Above0


@spec
class DynamicNTK:
    """A base that grows with the longest position seen, once it is past `original`.

    base * (factor * length / original - (factor - 1))^(h / (h - 2)), as transformers' "dynamic".
    """

    kind: Literal["dynamic"] = "dynamic"
    factor: AtLeast1
    original: Size


@spec
class Yarn:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2).

    Fast pairs stay, slow ones are divided by the factor, and a ramp is between. A pair is fast that
    turns `fast` times or more in `original` positions, and slow from `slow` turns down. `truncate`:
    the ramp's two ends are whole pairs. `magnitude` multiplies cos and sin; 0.1 ln(factor) + 1 in
    the paper.
    """

    kind: Literal["yarn"] = "yarn"
    factor: AtLeast1
    original: Size
    fast: Above0 = 32.0
    slow: Above0 = 1.0
    truncate: bool = True
    magnitude: Above0


@spec
class Llama3:
    """Llama 3.1's frequencies, as transformers' "llama3".

    Waves longer than original / low are divided by the factor, those shorter than original / high
    stay, and between the two the one goes over into the other.
    """

    kind: Literal["llama3"] = "llama3"
    factor: Above0
    low: Above0
    high: Above0
    original: Size

    @model_validator(mode="after")
    def _ordered(self) -> Llama3:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be less than high={self.high}")
        return self


@spec
class LongRope:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a divisor for each pair.

    `long` are those of an input whose positions go past `original`, `short` those of any other.
    `magnitude` multiplies cos and sin.
    """

    kind: Literal["longrope"] = "longrope"
    short: tuple[Above0, ...]
    long: tuple[Above0, ...]
    original: Size
    magnitude: Above0


Scaling = Annotated[Linear | DynamicNTK | Yarn | Llama3 | LongRope, Field(discriminator="kind")]


@spec
class Rope:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864, section 3.4).

    `pairs` says which two coordinates turn together: "adjacent" (0,1), (2,3), ... as in the paper
    and in Meta's and GGUF's files, or "half" (0, h/2), (1, h/2 + 1), ... as in Hugging Face's.
    Only the first `width` coordinates of a head turn, all of them where it is None.
    """

    kind: Literal["rope"] = "rope"
    base: Above0
    pairs: Literal["adjacent", "half"]
    width: Size | None = None
    scaling: Scaling | None = None


@spec
class Alibi:
    """Scores minus slope * distance, a slope for each head (Press et al. 2021, arXiv 2108.12409)"""

    kind: Literal["alibi"] = "alibi"


@spec
class T5Bias:
    """A learned number for each head and bucket of distances, added to the scores.

    Half of the buckets are the distances 0, 1, 2, ...; the others grow by equal factors up to
    `longest`, and the last holds all beyond (Raffel et al. 2019, arXiv 1910.10683, section 2.1).
    """

    kind: Literal["t5"] = "t5"
    buckets: Annotated[int, Field(ge=2)] = 32
    longest: Size = 128

    @model_validator(mode="after")
    def _ordered(self) -> T5Bias:
        if self.longest <= self.buckets // 2:
            raise ValueError(f"longest={self.longest} must be more than half of the buckets")
        return self


Relative = Annotated[Alibi | T5Bias, Field(discriminator="kind")]


@spec
class QKNorm:
    """A norm of queries and keys before they turn, with scales of its own for each of the two.

    `over` one head's width (Qwen 3, Gemma 3) or the whole projection, all heads (OLMo 2).
    """

    kind: Literal["qk"] = "qk"
    norm: Annotated[RMS | LN, Field(discriminator="kind")]
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
    act: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    bias: bool = False


@spec
class Mlp:
    """Plain feed-forward: down(act(up x)) (Vaswani et al. 2017, arXiv 1706.03762, section 3.3)."""

    kind: Literal["mlp"] = "mlp"
    hidden: Size
    act: Literal["relu", "gelu", "gelu_tanh"]
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
class Learned:
    """A learned vector for each of the max_len positions, added to the embedding (GPT-2)."""

    kind: Literal["learned"] = "learned"


@spec
class Sinusoidal:
    """sin and cos of the position, in turn, added to the embedding (arXiv 1706.03762, 3.5)."""

    kind: Literal["sinusoidal"] = "sinusoidal"


Position = Annotated[Learned | Sinusoidal, Field(discriminator="kind")]


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


SCALINGS = (Linear, DynamicNTK, Yarn, Llama3, LongRope)
PARTS = (  # what the rooms' dicts of builders are keyed by
    RMS,
    LN,
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


def validated(adapter: pydantic.TypeAdapter[T], data: Any, where: str) -> T:
    """JSON-like data as the adapter's type, or a BadInput that lists every field at fault."""
    import json

    try:
        return adapter.validate_json(json.dumps(data))
    except pydantic.ValidationError as error:
        lines = []
        for e in error.errors(include_url=False):
            field = ".".join(map(str, e["loc"])) or "(whole)"
            got = "" if e["type"] in ("missing", "value_error") else f", got {e['input']!r:.60}"
            lines.append(f"  {field}: {e['msg']}{got}")
        raise BadInput(f"{where} is not valid:\n" + "\n".join(lines)) from None
