"""The spec: what a decoder computes, as data that both mirrors are built from.

It holds the model's decisions and sizes and nothing of a run (dtype, mesh, kernel, path).
Each alternative on a design axis is a small class with only its own fields; None means absent.
Construction validates strictly, and every message names the field.

One alphabet serves specs, parameter shapes, einsums, table patterns and sharding rules: `LEGEND`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform

import pydantic
from pydantic import ConfigDict, Field, model_validator

from configs.errors import BadInput

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
}

MOST = 10_000  # repetitions of a pattern of layers

Size = Annotated[int, Field(gt=0, description="a count of something: a positive integer")]
Small = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]

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
class Rope:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864, section 3.4).

    `pairs` says which two coordinates turn together: "adjacent" (0,1), (2,3), ... as in the paper
    and in Meta's and GGUF's files, or "half" (0, h/2), (1, h/2 + 1), ... as in Hugging Face's.
    """

    kind: Literal["rope"] = "rope"
    base: Above0
    pairs: Literal["adjacent", "half"]


@spec
class GQA:
    """Causal attention with grouped key/value heads (Ainslie et al. 2023, arXiv 2305.13245).

    kv == heads is multi-head attention and kv == 1 multi-query. `width` is one head's own width;
    it need not be d / heads. rope=None leaves the layer without positions (NoPE).
    """

    kind: Literal["gqa"] = "gqa"
    heads: Size
    kv: Size
    width: Size
    rope: Rope | None

    @model_validator(mode="after")
    def _fits(self) -> GQA:
        if self.heads % self.kv:
            raise ValueError(f"heads={self.heads} is not a multiple of kv={self.kv}")
        if self.rope is not None and self.width % 2:
            raise ValueError(f"width={self.width} is odd; rotary positions turn pairs")
        return self


@spec
class Glu:
    """Gated feed-forward: down(act(gate x) * up x) (Shazeer 2020, arXiv 2002.05202)."""

    kind: Literal["glu"] = "glu"
    hidden: Size
    act: Literal["silu", "gelu", "gelu_tanh"] = "silu"


@spec
class Block:
    """One layer: x + post_attn(attn(pre_attn(x))), then the same with ffn. A norm may be absent."""

    pre_attn: Norm
    attn: GQA
    post_attn: Norm = None
    pre_ffn: Norm
    ffn: Glu
    post_ffn: Norm = None


@spec
class Run:
    """A pattern of blocks, repeated: what one scan goes over."""

    blocks: Annotated[tuple[Block, ...], Field(min_length=1)]
    times: Size

    @model_validator(mode="after")
    def _bounded(self) -> Run:
        if self.times > MOST:  # a typing error would keep a machine busy for hours
            raise ValueError(f"times={self.times} is more than {MOST} repetitions of a pattern")
        return self


@spec
class Model:
    """A decoder: embedding, runs of blocks, final norm, head."""

    d: Size
    vocab: Size
    max_len: Size
    runs: Annotated[tuple[Run, ...], Field(min_length=1)]
    norm: Norm
    tied: bool
    init_std: Above0 = 0.02

    @property
    def layers(self) -> tuple[Block, ...]:
        """Every block in the order of computation."""
        return tuple(block for run in self.runs for block in run.blocks * run.times)


PARTS = (RMS, LN, Rope, GQA, Glu)  # what a room's dict of builders is keyed by

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
