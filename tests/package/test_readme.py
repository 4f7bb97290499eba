"""The README's tables are true: every state is shown, on a small model of the same decisions."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxtwin.configs import (
    GQA,
    LN,
    PRESETS,
    RMS,
    BadInput,
    DynamicNTK,
    Glu,
    Linear,
    Llama3,
    LongRope,
    Mlp,
    Model,
    PostBlock,
    Rope,
    Run,
    T5Bias,
    Yarn,
)
from jaxtwin.configs.llama import llama
from jaxtwin.configs.presets import NOT_YET
from jaxtwin.configs.shrink import shrunk
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.table import bridge
from jaxtwin.tests.helpers import ROOT
from jaxtwin.tests.helpers.kit import torch_model

README = (ROOT / "README.md").read_text("utf-8")
STATES = ("not yet", "builds", "trains", "proven")


def table(title: str) -> list[list[str]]:
    """The cells of the rows of the table under that heading."""
    section = README.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


MODELS = [(name, row[-1]) for row in table("Models") for name in re.findall(r"`([^`]+)`", row[0])]
AXES = [
    (row[0], value.strip(), state)
    for row in table("Design axes")
    for state, cell in (("proven", row[1]), ("not yet", row[2]))
    for value in cell.split(",")
    if value.strip() not in ("", "-")
]


@functools.cache
def proven(model: Model) -> bool:
    weights = bridge.from_state(torch_model(model).state_dict())
    return decoder_check.check(model, weights, dtypes=("float64",), tokens=40).equal


def test_states_are_known() -> None:
    assert {state for _, state in MODELS} <= set(STATES)


def test_every_preset_has_a_row_and_every_row_but_those_to_come_a_preset() -> None:
    built = {name for name, state in MODELS if state != "not yet"}
    tests_own = {name for name in PRESETS if name.endswith("-tiny")}
    assert built == set(PRESETS) - tests_own
    assert {name for name, state in MODELS if state == "not yet"} == set(NOT_YET)


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_what_is_to_come_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadInput, match=f"^{name} is not supported yet: "):
        open_source(name)


# Of each row the last preset: the newest of its kind.
SAMPLE = {re.findall(r"`([^`]+)`", row[0])[-1] for row in table("Models") if "`" in row[0]}


def presets(sample: set[str], *states: str) -> list:  # type: ignore[type-arg]
    levels = {name: pytest.mark.slow if name in sample else pytest.mark.full for name, _ in MODELS}
    return [pytest.param(name, marks=levels[name]) for name, state in MODELS if state in states]


@pytest.mark.parametrize("name", presets(SAMPLE, "proven"))
def test_proven_model_is_proven(name: str) -> None:
    assert proven(shrunk(PRESETS[name]))


@pytest.mark.parametrize("name", presets({"gpt2", "gemma3-1b", "bloom-style"}, "trains", "proven"))
def test_training_model_trains(name: str) -> None:
    """Twenty plain steps on one batch bring its loss down."""
    from flax import nnx

    from jaxtwin import jaxmodel
    from jaxtwin.train import loss as losses

    model = jaxmodel.Decoder(shrunk(PRESETS[name]), rngs=nnx.Rngs(0))
    ids = np.random.default_rng(0).integers(0, 37, (2, 20))

    @jax.jit
    def step(model):  # type: ignore[no-untyped-def]
        loss, grads = jax.value_and_grad(lambda m: losses.mean(m(ids[:, :-1]), ids[:, 1:]))(model)
        return jax.tree.map(lambda w, g: w - 0.5 * g, model, grads), loss

    seen = []
    for _ in range(20):
        model, loss = step(model)
        seen.append(float(loss))
    assert seen[-1] < seen[0] - 0.05


def base(**changes: object) -> Model:
    sizes: dict = {"vocab": 37, "d": 12, "layers": 2, "heads": 4, "kv": 2, "hidden": 20}
    more: dict = {
        "width": 6,
        "max_len": 40,
        "base": 100.0,
        "pairs": "half",
        "eps": 1e-5,
        "tied": True,
    }
    return llama(**{**sizes, **more, **changes})


def block(**changes: object) -> Model:
    model = base()
    run = model.runs[0]
    return replace(model, runs=(replace(run, blocks=(replace(run.blocks[0], **changes),)),))


RMS1 = RMS(eps=1e-5)
# Each of these shows several values at once: a check compiles for seconds.
LLAMA = base()
MULTI = base(kv=4, tied=False, pairs="adjacent")
SANDWICH = block(
    attn=GQA(heads=4, kv=1, width=6, rope=None, sinks=True),
    post_attn=RMS1,
    ffn=Glu(hidden=20, act="gelu_tanh"),
    post_ffn=RMS1,
)
NORMS = block(pre_attn=LN(eps=1e-5), pre_ffn=RMS(eps=1e-5, offset=True, cast="after"))
OUTPUT_ONLY = block(pre_attn=None, pre_ffn=None, post_attn=RMS1, post_ffn=RMS1)
GPT2, GEMMA2, GEMMA3, ORIGINAL, BLOOM = (
    shrunk(PRESETS[name])
    for name in ("gpt2", "gemma2-2b", "gemma3-1b", "transformer-2017", "bloom-style")
)
SCALINGS = (
    Linear(factor=3.0),
    DynamicNTK(factor=2.0, original=16),
    Yarn(factor=4.0, original=16, magnitude=1.1),
    Llama3(factor=8.0, low=1.0, high=4.0, original=16),
    LongRope(short=(1.0, 1.1), long=(2.0, 3.0), original=16, magnitude=1.1),
)
SCALED = replace(
    LLAMA,
    runs=tuple(
        Run(
            blocks=(
                replace(
                    LLAMA.layers[0],
                    attn=replace(
                        LLAMA.layers[0].attn,
                        rope=Rope(base=100.0, pairs="half", width=4, scaling=scaling),
                    ),
                ),
            ),
            repeats=1,
        )
        for scaling in SCALINGS
    ),
)
DEEPNORM = replace(
    LLAMA,
    runs=(
        Run(
            blocks=(
                PostBlock(
                    attn=GQA(heads=4, kv=2, width=6, rope=None, relative=T5Bias()),
                    post_attn=LN(eps=1e-5),
                    ffn=Mlp(hidden=20, act="gelu", bias=True),
                    post_ffn=LN(eps=1e-5),
                    alpha=1.5,
                ),
            ),
            repeats=2,
        ),
    ),
)
EXAMPLES: dict[tuple[str, str], Model] = {
    ("norm kind", "LayerNorm"): NORMS,
    ("norm kind", "RMSNorm"): LLAMA,
    ("norm kind", "RMSNorm with unit offset"): NORMS,
    ("norm placement", "pre"): LLAMA,
    ("norm placement", "post"): ORIGINAL,
    ("norm placement", "sandwich"): SANDWICH,
    ("norm placement", "output-only"): OUTPUT_ONLY,
    ("norm placement", "DeepNorm"): DEEPNORM,
    ("position", "none"): SANDWICH,
    ("position", "learned"): GPT2,
    ("position", "sinusoidal"): ORIGINAL,
    ("position", "RoPE adjacent"): MULTI,
    ("position", "RoPE half-split"): LLAMA,
    ("position", "partial RoPE"): SCALED,
    ("position", "ALiBi"): BLOOM,
    ("position", "T5 relative"): DEEPNORM,
    ("RoPE scaling", "none"): LLAMA,
    ("RoPE scaling", "linear"): SCALED,
    ("RoPE scaling", "dynamic NTK"): SCALED,
    ("RoPE scaling", "YaRN"): SCALED,
    ("RoPE scaling", "Llama 3"): SCALED,
    ("RoPE scaling", "LongRoPE"): SCALED,
    ("RoPE scaling", "local and global bases"): GEMMA3,
    ("attention heads", "MHA"): MULTI,
    ("attention heads", "GQA"): LLAMA,
    ("attention heads", "MQA"): SANDWICH,
    ("attention extras", "QK-norm"): GEMMA3,
    ("attention extras", "logit soft-cap"): GEMMA2,
    ("attention extras", "explicit scale"): GEMMA2,
    ("attention extras", "sliding window"): GEMMA3,
    ("attention extras", "biases"): GPT2,
    ("attention extras", "sinks"): SANDWICH,
    ("layer pattern", "uniform"): LLAMA,
    ("layer pattern", "local/global interleave"): GEMMA3,
    ("FFN", "ReLU"): ORIGINAL,
    ("FFN", "GELU"): GPT2,
    ("FFN", "SwiGLU"): LLAMA,
    ("FFN", "GeGLU"): SANDWICH,
    ("FFN", "biases"): GPT2,
    ("embeddings", "tied"): LLAMA,
    ("embeddings", "untied"): MULTI,
    ("embeddings", "scaled by sqrt(d)"): ORIGINAL,
    ("embeddings", "final logit soft-cap"): GEMMA2,
}


def test_every_proven_value_has_an_example_and_no_other() -> None:
    assert {(axis, value) for axis, value, state in AXES if state == "proven"} == set(EXAMPLES)


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(at, marks=() if model is GPT2 else pytest.mark.slow)
        for at, model in EXAMPLES.items()
    ],
    ids="-".join,
)
def test_proven_value_is_proven(at: tuple[str, str]) -> None:
    assert proven(EXAMPLES[at])
