"""The dataflow of a layer, declared once: each value, what it is computed from, and by which parts.

The two mirrors write it out as code, each for itself, so that neither can borrow the other's
mistake. Whatever else has to know how a block is wired derives it from here: the table's parts, the
probes, replays, hypotheses and faults, random models and settings. A test holds both mirrors to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtwin.configs.spec import GQA, LN, RMS, Block, Model, OwnNorm, PostBlock

IN = "in"  # the layer's own input


@dataclass(frozen=True)
class Place:
    """Where torchref shows a value: a submodule's output, or its (first) input.

    `call` says which call in one pass, where the module is called more than once.
    """

    module: str
    is_input: bool = False
    call: int = 0


@dataclass(frozen=True)
class Step:
    """One value of a forward pass, seen by the probe of that name.

    `inputs` are the values it is computed from, `parts` the submodules that compute it, whose
    weights it uses. Without parts it is the sum of its two inputs, the first times the block's
    alpha where it has one. `axes` are those of torchref's value and of jaxmodel's.
    """

    name: str
    inputs: tuple[str, ...]
    parts: tuple[str, ...] = ()
    axes: str = "b t d -> b t d"
    place: Place | None = None


# How the parts of a block are wired, in the order of computation.
WIRING: dict[type, tuple[Step, ...]] = {
    Block: (
        Step("pre_attn", (IN,), ("pre_attn",)),
        Step("attn", ("pre_attn",), ("attn",)),
        Step("post_attn", ("attn",), ("post_attn",)),
        Step("mid", (IN, "post_attn")),
        Step("pre_ffn", ("mid",), ("pre_ffn",)),
        Step("ffn", ("pre_ffn",), ("ffn",)),
        Step("post_ffn", ("ffn",), ("post_ffn",)),
        Step("out", ("mid", "post_ffn")),
    ),
    PostBlock: (
        Step("attn", (IN,), ("attn",)),
        Step("summed", (IN, "attn")),
        Step("mid", ("summed",), ("post_attn",)),
        Step("ffn", ("mid",), ("ffn",)),
        Step("total", ("mid", "ffn")),
        Step("out", ("total",), ("post_ffn",)),
    ),
}
# What an attention computes inside; its input is that of its step in the block.
INSIDE: dict[type, tuple[Step, ...]] = {
    GQA: (
        Step(
            "attn.q",
            (IN,),
            ("attn.q", "attn.q_norm", "attn.rotate"),
            "b t n h -> b t n h",
            Place("attn.rotate", call=0),
        ),
        Step(
            "attn.k",
            (IN,),
            ("attn.k", "attn.k_norm", "attn.rotate"),
            "b t k h -> b t k h",
            Place("attn.rotate", call=1),
        ),
        Step("attn.v", (IN,), ("attn.v",), "b t (k h) -> b t k h", Place("attn.v")),
        Step(
            "attn.mixed",
            ("attn.q", "attn.k", "attn.v"),
            ("attn.relative", "attn.softmax"),
            "b t (n h) -> b t n h",
            Place("attn.o", is_input=True),
        ),
        Step("attn", ("attn.mixed",), ("attn.o",), place=Place("attn")),
    ),
}
# What is not in a layer: the first value of a model, and the last two.
EMBED = Step("embed", (), ("embed", "scale", "position", "embed_norm"), place=Place("embed_norm"))
NORM = Step("norm", ("out",), ("norm",), place=Place("norm"))
HEAD = Step("head", ("norm",), ("head", "cap"), "b t v -> b t v", Place("cap"))


def parts(block: type) -> tuple[str, ...]:
    """The parts of a block of that class, in the order of computation."""
    return tuple(part for step in WIRING[block] for part in step.parts)


def norm_parts(block: type) -> tuple[str, ...]:
    """Those of a block's parts that are norms, or absent."""
    return tuple(part for part in parts(block) if part not in ("attn", "ffn"))


def norms(block: Block | PostBlock) -> dict[str, RMS | LN | OwnNorm]:
    """The norms that a block has, by the part's name."""
    found = {part: getattr(block, part) for part in norm_parts(type(block))}
    return {part: norm for part, norm in found.items() if isinstance(norm, RMS | LN | OwnNorm)}


def steps(block: Block | PostBlock) -> tuple[Step, ...]:
    """Every value of a layer, attention's inside included, each with its place in torchref."""
    out: list[Step] = []
    wiring = WIRING[type(block)]
    for step in wiring:
        if step.parts == ("attn",):
            (entry,) = step.inputs
            for inner in INSIDE[type(block.attn)]:
                inputs = tuple(entry if name == IN else name for name in inner.inputs)
                out.append(Step(inner.name, inputs, inner.parts, inner.axes, inner.place))
        else:
            out.append(Step(step.name, step.inputs, step.parts, step.axes, _place(step, wiring)))
    return tuple(out)


def _place(step: Step, wiring: tuple[Step, ...]) -> Place:
    """A part's own output; a sum is the input of the part that it alone feeds, or the end."""
    if step.parts:
        return Place(step.parts[-1])
    fed = [after.parts[0] for after in wiring if after.inputs == (step.name,)]
    return Place(fed[0], is_input=True) if fed else Place("")


def model_steps(model: Model) -> dict[str, Step]:
    """Every value of a forward pass by its full name ("layers.3.attn.q"), in order."""
    found = {EMBED.name: EMBED}
    before = EMBED.name
    for i, block in enumerate(model.layers):
        for step in steps(block):
            found[f"layers.{i}.{step.name}"] = _in_layer(step, i, before)
        before = f"layers.{i}.out"
    found[NORM.name] = Step(NORM.name, (before,), NORM.parts, NORM.axes, NORM.place)
    return found | {HEAD.name: HEAD}


def _in_layer(step: Step, i: int, before: str) -> Step:
    """The step with every name as it is in the whole model."""
    at: Any = step.place
    module = f"layers.{i}.{at.module}".rstrip(".")
    return Step(
        f"layers.{i}.{step.name}",
        tuple(before if name == IN else f"layers.{i}.{name}" for name in step.inputs),
        tuple(f"layers.{i}.{part}" for part in step.parts),
        step.axes,
        Place(module, at.is_input, at.call),
    )


NAMES = tuple(  # of every kind of value that a model has, in the order of computation
    dict.fromkeys(
        [
            EMBED.name,
            *(
                name
                for wiring in WIRING.values()
                for step in wiring
                for name in (
                    [inner.name for inner in INSIDE[GQA]] if step.name == "attn" else [step.name]
                )
            ),
            NORM.name,
            HEAD.name,
        ]
    )
)
NORM_PARTS = tuple(dict.fromkeys(part for block in WIRING for part in norm_parts(block)))
