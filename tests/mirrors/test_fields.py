"""No knob is idle: every field of every spec class, changed on one side only, shows.

It shows in the outputs, or already in the shapes, so that no weights would fit. The two fields that
change neither have a test of their own for what they do.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtwin import jaxmodel, torchref
from jaxtwin.configs import (
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
    Model,
    OwnNorm,
    PostBlock,
    QKNorm,
    Rope,
    Run,
    Sinusoidal,
    T5Bias,
    Yarn,
    own_parts,
)
from jaxtwin.configs import spec as spec_module
from jaxtwin.jaxmodel import axes
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.diagnose.search import diagnose
from jaxtwin.parity.selftest.tiny_models import weights
from jaxtwin.parity.sides.inputs import check_inputs
from jaxtwin.parity.sides.runs import Reference, faulty_decoder
from jaxtwin.tests.helpers import kit

NORM = RMS(eps=1e-6)
# One layer for each scaling; LongRoPE twice, for its short factors and its long ones.
SCALINGS = (
    Yarn(factor=4.0, original=64, fast=4.0, slow=1.0, magnitude=1.2),
    Linear(factor=3.0),
    DynamicNTK(factor=2.0, original=4),
    Llama3(factor=8.0, low=1.0, high=4.0, original=16),
    LongRope(short=(1.0,) * 4, long=(1.0, 1.5, 2.0, 3.0), original=4, magnitude=1.1),
    LongRope(short=(1.0, 1.1, 1.2, 1.3), long=(3.0,) * 4, original=20, magnitude=1.1),
)


def layer(scaling: Any) -> Block:
    attn = GQA(
        heads=4,
        kv=2,
        width=8,
        rope=Rope(base=100.0, pairs="half", scaling=scaling),
        relative=T5Bias(buckets=4, longest=6),
        bias=True,
        out_bias=True,
        qk_norm=QKNorm(norm=NORM, over="head"),
        cap=3.0,
        window=5,
        sinks=True,
    )
    ffn = Glu(hidden=10, bias=True)
    return Block(
        pre_attn=NORM, attn=attn, post_attn=NORM, pre_ffn=NORM, ffn=ffn, post_ffn=LN(eps=1e-6)
    )


BLOCK = layer(SCALINGS[0])
ATTN = BLOCK.attn
POST = PostBlock(
    attn=GQA(heads=4, kv=2, width=8, rope=None, relative=Alibi()),
    post_attn=NORM,
    ffn=Mlp(hidden=10, act="relu", bias=True),
    post_ffn=NORM,
    alpha=1.5,
)
BASE = Model(
    d=12,
    vocab=11,
    max_len=9,
    embed_scale=2.0,
    position=Learned(),
    embed_norm=NORM,
    runs=(Run(blocks=(*map(layer, SCALINGS), POST), repeats=1), Run(blocks=(BLOCK,), repeats=1)),
    norm=NORM,
    tied=False,
    cap=4.0,
)
IDS = np.random.default_rng(0).integers(0, 11, (2, 9))

LOUD = RMS(eps=0.5)  # the same shapes, other values
OTHER = dataclasses.replace(BLOCK, pre_ffn=LOUD)
NOPE = dataclasses.replace(ATTN, rope=None)

# Class and field -> other values, each with where it must show.
CHANGES: dict[tuple[type, str], list[tuple[Any, str]]] = {
    (RMS, "eps"): [(1e-5, "outputs")],
    (RMS, "offset"): [(True, "outputs")],
    (LN, "eps"): [(1e-5, "outputs")],
    (LN, "bias"): [(False, "shapes")],
    (Rope, "base"): [(101.0, "outputs")],
    (Rope, "pairs"): [("adjacent", "outputs")],
    (Rope, "scaling"): [(None, "outputs")],
    (Linear, "factor"): [(3.1, "outputs")],
    (DynamicNTK, "factor"): [(2.1, "outputs")],
    (DynamicNTK, "original"): [(5, "outputs")],
    (Yarn, "factor"): [(4.1, "outputs")],
    (Yarn, "original"): [(200, "outputs")],
    (Yarn, "fast"): [(3.0, "outputs")],
    (Yarn, "slow"): [(2.0, "outputs")],
    (Yarn, "truncate"): [(False, "outputs")],
    (Yarn, "magnitude"): [(1.21, "outputs")],
    (Llama3, "factor"): [(8.1, "outputs")],
    (Llama3, "low"): [(0.5, "outputs")],
    (Llama3, "high"): [(3.0, "outputs")],
    (Llama3, "original"): [(17, "outputs")],
    (LongRope, "short"): [((1.0, 1.1, 1.2, 1.4), "outputs")],
    (LongRope, "long"): [((1.0, 1.5, 2.0, 3.1), "outputs")],
    (LongRope, "original"): [(8, "outputs")],
    (LongRope, "magnitude"): [(1.11, "outputs")],
    (T5Bias, "buckets"): [(5, "shapes")],
    (T5Bias, "longest"): [(12, "outputs")],
    (QKNorm, "norm"): [(LOUD, "outputs"), (LN(eps=1e-6), "shapes")],
    (QKNorm, "over"): [("projection", "shapes")],
    (GQA, "heads"): [(2, "shapes"), (8, "shapes")],
    (GQA, "kv"): [(1, "shapes"), (4, "shapes")],
    (GQA, "rope"): [(None, "outputs")],
    (GQA, "relative"): [(None, "shapes")],
    (GQA, "bias"): [(False, "shapes")],
    (GQA, "out_bias"): [(False, "shapes")],
    (GQA, "qk_norm"): [(None, "shapes")],
    (GQA, "scale"): [(0.3, "outputs")],
    (GQA, "cap"): [(3.1, "outputs"), (None, "outputs")],
    (GQA, "sinks"): [(False, "shapes")],
    (GQA, "window"): [(4, "outputs"), (None, "outputs")],
    (Glu, "hidden"): [(11, "shapes")],
    (Glu, "act"): [("gelu", "outputs"), ("gelu_tanh", "outputs"), ("relu", "outputs")],
    (Glu, "bias"): [(False, "shapes")],
    (Mlp, "hidden"): [(11, "shapes")],
    (Mlp, "act"): [("gelu", "outputs"), ("gelu_tanh", "outputs"), ("silu", "outputs")],
    (Mlp, "bias"): [(False, "shapes")],
    (Block, "pre_attn"): [(LOUD, "outputs"), (None, "shapes")],
    (Block, "attn"): [(NOPE, "outputs")],
    (Block, "post_attn"): [(LOUD, "outputs"), (None, "shapes")],
    (Block, "pre_ffn"): [(LOUD, "outputs"), (None, "shapes")],
    (Block, "ffn"): [(Glu(hidden=10, act="gelu", bias=True), "outputs")],
    (Block, "post_ffn"): [(LN(eps=0.5), "outputs"), (LOUD, "shapes"), (None, "shapes")],
    (PostBlock, "attn"): [(dataclasses.replace(POST.attn, relative=None), "outputs")],
    (PostBlock, "post_attn"): [(LOUD, "outputs"), (None, "shapes")],
    (PostBlock, "ffn"): [(Mlp(hidden=10, act="gelu", bias=True), "outputs")],
    (PostBlock, "post_ffn"): [(LOUD, "outputs"), (None, "shapes")],
    (PostBlock, "alpha"): [(1.6, "outputs")],
    (Run, "blocks"): [((BLOCK, BLOCK), "shapes")],
    (Run, "repeats"): [(2, "shapes"), (3, "shapes")],
    (Model, "d"): [(10, "shapes")],
    (Model, "vocab"): [(12, "shapes")],
    (Model, "embed_scale"): [(2.1, "outputs"), (None, "outputs")],
    (Model, "position"): [(Sinusoidal(), "shapes"), (None, "shapes")],
    (Model, "embed_norm"): [(LOUD, "outputs"), (None, "shapes")],
    (Model, "runs"): [
        (BASE.runs * 2, "shapes"),
        ((BASE.runs[0], Run(blocks=(OTHER,), repeats=1)), "outputs"),
    ],
    (Model, "norm"): [(LOUD, "outputs"), (None, "shapes")],
    (Model, "tied"): [(True, "shapes")],
    (Model, "cap"): [(4.1, "outputs"), (None, "outputs")],
}
ELSEWHERE = {
    (RMS, "cast"): "rounds in half widths only: test_norm.py",
    (Model, "max_len"): "bounds the input: test_max_len",
    (GQA, "width"): "what turns and the scalings' factors go with it: test_width",
    (Rope, "width"): "the same",
    (Model, "init_std"): "spreads fresh values: test_init_std",
    **dict.fromkeys(
        ((OwnNorm, "name"), (OwnNorm, "eps"), (OwnNorm, "bias")),
        "a person's own functions: test_own_parts.py",
    ),
}
CASES = [
    pytest.param(
        cls, field, value, where, id=f"{cls.__name__}.{field}-{i}", marks=[pytest.mark.slow][:i]
    )
    for (cls, field), values in CHANGES.items()
    for i, (value, where) in enumerate(values)
]
# Of every second field its first other value.
SAMPLE_AND_FULL = [
    pytest.param(
        cls, field, *new, id=f"{cls.__name__}.{field}-{i}", marks=[pytest.mark.full][: i + n % 2]
    )
    for n, ((cls, field), values) in enumerate(CHANGES.items())
    for i, new in enumerate(values)
]


def with_change(spec: Any, cls: type, field: str, value: Any) -> Any:
    """The spec with that field changed in every instance of the class."""
    if isinstance(spec, tuple):
        return tuple(with_change(x, cls, field, value) for x in spec)
    if not dataclasses.is_dataclass(spec):
        return spec
    parts = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    inner = {name: with_change(part, cls, field, value) for name, part in parts.items()}
    if isinstance(spec, cls):
        inner[field] = value
    return dataclasses.replace(spec, **inner)


def ours(x: object) -> bool:
    """A spec class, and not one that pydantic lends."""
    return dataclasses.is_dataclass(x) and getattr(x, "__module__", "").startswith(
        "jaxtwin.configs."
    )


def test_every_field_is_listed() -> None:
    """A new field stands here, or this test says so. A `kind` can have one value only."""
    classes = [x for x in vars(spec_module).values() if ours(x)]
    fields = {(cls, f.name) for cls in classes for f in dataclasses.fields(cls)}
    kinds = {(cls, name) for cls, name in fields if name == "kind"}
    for cls, name in kinds:
        assert len(get_args(get_type_hints(cls)[name])) == 1
    assert fields - kinds == CHANGES.keys() | ELSEWHERE.keys()
    assert not CHANGES.keys() & ELSEWHERE.keys()


def test_every_activation_and_pairing_is_among_the_changes() -> None:
    """A Literal's every other value is tried, and every activation that is built in."""
    for mirror in (torchref.ffn, jaxmodel.ffn):
        assert set(mirror.ACTIVATIONS) == set(own_parts.BUILT_IN)
    for (cls, field), values in CHANGES.items():
        choices = get_args(get_type_hints(cls, include_extras=True)[field])
        choices = own_parts.BUILT_IN if field == "act" else choices
        if choices and all(isinstance(choice, str) for choice in choices):
            assert len(values) == len(choices) - 1, (cls, field)


@pytest.fixture(scope="module")
def src() -> torchref.Decoder:
    return kit.torch_model(BASE)


@pytest.fixture(scope="module")
def expected(src: torchref.Decoder) -> np.ndarray:
    """What both sides compute from the same spec."""
    with torch.no_grad():
        out = src(torch.from_numpy(IDS)).numpy()
    assert kit.apart(run_jax(src, BASE), out) <= 1e-13
    return out


def run_jax(src: torchref.Decoder, spec: Model, base: Model = BASE) -> np.ndarray:
    """jaxmodel of that spec with the base model's values, operation by operation: it runs once."""
    with jax.enable_x64(True), jax.disable_jit():
        values = kit.to_jax(base, src.state_dict(), "unroll")
        empty = jaxmodel.abstract(spec, dtype="float64", layout="unroll")
        model = axes.with_arrays(empty, {k: jnp.asarray(v) for k, v in values.items()})
        return np.asarray(model(jnp.asarray(IDS)))


def jax_shapes(spec: Model) -> dict[str, tuple[int, ...]]:
    model = jaxmodel.abstract(spec, layout="unroll")
    return {name: x.shape for name, x in axes.arrays(model).items()}


def torch_shapes(spec: Model) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = torchref.Decoder(spec)
    return {name: tuple(x.shape) for name, x in model.state_dict().items()}


@pytest.mark.parametrize(("cls", "field", "value", "where"), CASES)
def test_changed_in_jaxmodel_alone(
    src: torchref.Decoder, expected: np.ndarray, cls: type, field: str, value: Any, where: str
) -> None:
    spec = with_change(BASE, cls, field, value)
    assert spec != BASE
    if where == "shapes":
        assert jax_shapes(spec) != jax_shapes(BASE)
    else:
        assert jax_shapes(spec) == jax_shapes(BASE)
        assert kit.apart(run_jax(src, spec), expected) > 1e-7


@pytest.mark.parametrize(("cls", "field", "value", "where"), CASES)
def test_changed_in_torchref_alone(
    src: torchref.Decoder, expected: np.ndarray, cls: type, field: str, value: Any, where: str
) -> None:
    spec = with_change(BASE, cls, field, value)
    if where == "shapes":
        assert torch_shapes(spec) != torch_shapes(BASE)
        return
    model = torchref.Decoder(spec).double()
    model.load_state_dict(src.state_dict())
    with torch.no_grad():
        assert kit.apart(model(torch.from_numpy(IDS)).numpy(), expected) > 1e-7


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "field", "value", "where"), SAMPLE_AND_FULL)
def test_the_diagnosis_fails_and_names_the_field(
    cls: type, field: str, value: Any, where: str
) -> None:
    """Changed on the JAX side alone: not equal, and the field stands in what was given."""
    spec = with_change(BASE, cls, field, value)
    tensors, given = weights(BASE, 3), check_inputs(BASE, 9, 3)
    if where == "shapes":
        with jax.enable_x64(True):
            report = decoder_check.check(BASE, tensors, tokens=9, against=(spec, weights(spec, 3)))
        assert not report.equal
        preflight = report.preflight
    else:
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            subject = faulty_decoder(spec, tensors, given, None)
            found = diagnose(Reference(BASE, tensors, given), subject)
        assert not found.equal
        assert found.error > 1
        assert found.divergences
        preflight = found.preflight
    named = {difference.what for difference in preflight}
    assert any(f".{field}" in f".{what.removeprefix('spec: ')}" for what in named), named


def test_max_len() -> None:
    longer = np.zeros((1, 10), np.int64)
    wide = dataclasses.replace(BASE, max_len=10)
    with pytest.raises(ValueError, match="1 to 9 tokens"):
        jaxmodel.abstract(BASE)(longer)
    with pytest.raises(ValueError, match="1 to 9 tokens"):
        torchref.Decoder(BASE)(torch.from_numpy(longer))
    assert jax.eval_shape(lambda m: m(longer), jaxmodel.abstract(wide)).shape == (1, 10, 11)
    assert torchref.Decoder(wide)(torch.from_numpy(longer)).shape == (1, 10, 11)


def test_width() -> None:
    """Of a head, which shapes show; and of what turns in it, which the outputs show."""
    attn = GQA(heads=4, kv=2, width=8, rope=Rope(base=100.0, pairs="half"))
    block = dataclasses.replace(BLOCK, attn=attn)
    spec = dataclasses.replace(BASE, runs=(Run(blocks=(block,), repeats=1),))
    assert torch_shapes(with_change(spec, GQA, "width", 6)) != torch_shapes(spec)
    assert jax_shapes(with_change(spec, GQA, "width", 6)) != jax_shapes(spec)
    src = kit.torch_model(spec)
    part = with_change(spec, Rope, "width", 4)
    want, got = run_jax(src, spec, spec), run_jax(src, part, spec)
    assert kit.apart(got, want) > 1e-7
    model = torchref.Decoder(part).double()
    model.load_state_dict(src.state_dict())
    with torch.no_grad():
        assert kit.apart(model(torch.from_numpy(IDS)).numpy(), got) <= 1e-13


def test_init_std() -> None:
    wide = dataclasses.replace(BASE, init_std=0.04)
    dst = [
        np.asarray(jax.jit(lambda s=s: jaxmodel.Decoder(s, rngs=nnx.Rngs(0)).embed.weight[...])())
        for s in (BASE, wide)
    ]
    np.testing.assert_allclose(dst[1], 2 * dst[0], rtol=1e-6)
    src = [torchref.Decoder(s).embed.weight.detach().numpy() for s in (BASE, wide)]
    np.testing.assert_allclose(src[1], 2 * src[0], rtol=1e-6)
