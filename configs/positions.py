"""The specs of positions: rotary ones and their scalings, biases of the scores, added vectors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxtwin.configs.fields import Above0, AtLeast1, Size, spec


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
class Learned:
    """A learned vector for each of the max_len positions, added to the embedding (GPT-2)."""

    kind: Literal["learned"] = "learned"


@spec
class Sinusoidal:
    """sin and cos of the position, in turn, added to the embedding (arXiv 1706.03762, 3.5)."""

    kind: Literal["sinusoidal"] = "sinusoidal"


Position = Annotated[Learned | Sinusoidal, Field(discriminator="kind")]
