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

import configs.spec
import jaxmodel
import torchref
from configs import GQA, LN, RMS, Block, Glu, Model, Rope, Run
from jaxmodel import axes
from parity import judge
from parity.diagnose import diagnose
from parity.inputs import inputs
from parity.models import weights
from parity.subject import Reference, wrong_decoder
from tests import kit

NORM = RMS(eps=1e-6)
ATTN = GQA(heads=4, kv=2, width=4, rope=Rope(base=100.0, pairs="half"))
BLOCK = Block(
    pre_attn=NORM,
    attn=ATTN,
    post_attn=NORM,
    pre_ffn=NORM,
    ffn=Glu(hidden=10),
    post_ffn=LN(eps=1e-6),
)
BASE = Model(
    d=12,
    vocab=11,
    max_len=9,
    runs=(Run(blocks=(BLOCK,), times=2),),
    norm=NORM,
    tied=False,
)
IDS = np.random.default_rng(0).integers(0, 11, (2, 9))

LOUD = RMS(eps=0.5)  # the same shapes, other values

# Class and field -> other values, each with where it must show.
CHANGES: dict[tuple[type, str], list[tuple[Any, str]]] = {
    (RMS, "eps"): [(1e-5, "outputs")],
    (RMS, "offset"): [(True, "outputs")],
    (LN, "eps"): [(1e-5, "outputs")],
    (LN, "bias"): [(False, "shapes")],
    (Rope, "base"): [(101.0, "outputs")],
    (Rope, "pairs"): [("adjacent", "outputs")],
    (GQA, "heads"): [(2, "shapes"), (8, "shapes")],
    (GQA, "kv"): [(1, "shapes"), (4, "shapes")],
    (GQA, "width"): [(6, "shapes")],
    (GQA, "rope"): [(None, "outputs")],
    (Glu, "hidden"): [(11, "shapes")],
    (Glu, "act"): [("gelu", "outputs"), ("gelu_tanh", "outputs")],
    (Block, "pre_attn"): [(LOUD, "outputs"), (None, "shapes")],
    (Block, "attn"): [(dataclasses.replace(ATTN, rope=None), "outputs")],
    (Block, "post_attn"): [(LOUD, "outputs"), (None, "shapes")],
    (Block, "pre_ffn"): [(LOUD, "outputs"), (None, "shapes")],
    (Block, "ffn"): [(Glu(hidden=10, act="gelu"), "outputs")],
    (Block, "post_ffn"): [(LN(eps=0.5), "outputs"), (LOUD, "shapes"), (None, "shapes")],
    (Run, "blocks"): [
        ((dataclasses.replace(BLOCK, pre_ffn=LOUD),), "outputs"),
        ((BLOCK, BLOCK), "shapes"),
    ],
    (Run, "times"): [(1, "shapes"), (3, "shapes")],
    (Model, "d"): [(10, "shapes")],
    (Model, "vocab"): [(12, "shapes")],
    (Model, "runs"): [(BASE.runs * 2, "shapes")],
    (Model, "norm"): [(LOUD, "outputs"), (None, "shapes")],
    (Model, "tied"): [(True, "shapes")],
}
ELSEWHERE = {
    (RMS, "cast"): "rounds in half widths only: test_mirror_norm.py",
    (Model, "max_len"): "bounds the input: test_max_len",
    (Model, "init_std"): "spreads fresh values: test_init_std",
}
CASES = [
    pytest.param(cls, field, value, where, id=f"{cls.__name__}.{field}-{i}")
    for (cls, field), values in CHANGES.items()
    for i, (value, where) in enumerate(values)
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


def test_every_field_is_listed() -> None:
    """A new field stands here, or this test says so. A `kind` can have one value only."""
    classes = [x for x in vars(configs.spec).values() if dataclasses.is_dataclass(x)]
    fields = {(cls, f.name) for cls in classes for f in dataclasses.fields(cls)}
    kinds = {(cls, name) for cls, name in fields if name == "kind"}
    for cls, name in kinds:
        assert len(get_args(get_type_hints(cls)[name])) == 1
    assert fields - kinds == CHANGES.keys() | ELSEWHERE.keys()
    assert not CHANGES.keys() & ELSEWHERE.keys()


def test_every_activation_and_pairing_is_among_the_changes() -> None:
    """A Literal's every other value is tried."""
    for (cls, field), values in CHANGES.items():
        choices = get_args(get_type_hints(cls, include_extras=True)[field])
        if choices and all(isinstance(choice, str) for choice in choices):
            assert len(values) == len(choices) - 1, (cls, field)


@pytest.fixture(scope="module")
def there() -> torchref.Decoder:
    return kit.torch_model(BASE)


@pytest.fixture(scope="module")
def expected(there: torchref.Decoder) -> np.ndarray:
    """What both sides compute from the same spec."""
    with torch.no_grad():
        out = there(torch.from_numpy(IDS)).numpy()
    assert kit.apart(run_jax(there, BASE), out) <= 1e-13
    return out


def run_jax(there: torchref.Decoder, spec: Model) -> np.ndarray:
    """jaxmodel of that spec with the base model's values."""
    with jax.enable_x64(True):
        values = kit.to_jax(BASE, there.state_dict(), "unroll")
        empty = jaxmodel.abstract(spec, dtype="float64", layout="unroll")
        model = axes.with_arrays(empty, {k: jnp.asarray(v) for k, v in values.items()})
        return np.asarray(jax.jit(lambda m, ids: m(ids))(model, jnp.asarray(IDS)))


def jax_shapes(spec: Model) -> dict[str, tuple[int, ...]]:
    model = jaxmodel.abstract(spec, layout="unroll")
    return {name: x.shape for name, x in axes.arrays(model).items()}


def torch_shapes(spec: Model) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = torchref.Decoder(spec)
    return {name: tuple(x.shape) for name, x in model.state_dict().items()}


@pytest.mark.parametrize(("cls", "field", "value", "where"), CASES)
def test_changed_in_jaxmodel_alone(
    there: torchref.Decoder, expected: np.ndarray, cls: type, field: str, value: Any, where: str
) -> None:
    spec = with_change(BASE, cls, field, value)
    assert spec != BASE
    if where == "shapes":
        assert jax_shapes(spec) != jax_shapes(BASE)
    else:
        assert jax_shapes(spec) == jax_shapes(BASE)
        assert kit.apart(run_jax(there, spec), expected) > 1e-7


@pytest.mark.parametrize(("cls", "field", "value", "where"), CASES)
def test_changed_in_torchref_alone(
    there: torchref.Decoder, expected: np.ndarray, cls: type, field: str, value: Any, where: str
) -> None:
    spec = with_change(BASE, cls, field, value)
    if where == "shapes":
        assert torch_shapes(spec) != torch_shapes(BASE)
        return
    model = torchref.Decoder(spec).double()
    model.load_state_dict(there.state_dict())
    with torch.no_grad():
        assert kit.apart(model(torch.from_numpy(IDS)).numpy(), expected) > 1e-7


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "field", "value", "where"), CASES)
def test_the_diagnosis_fails_and_names_the_field(
    cls: type, field: str, value: Any, where: str
) -> None:
    """Changed on the JAX side alone: not equal, and the field stands in what was given."""
    spec = with_change(BASE, cls, field, value)
    tensors, given = weights(BASE, 3), inputs(BASE, 9, 3)
    if where == "shapes":
        with jax.enable_x64(True):
            report = judge.check(BASE, tensors, tokens=9, against=(spec, weights(spec, 3)))
        assert not report.equal
        preflight = report.preflight
    else:
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            subject = wrong_decoder(spec, tensors, given, None)
            found = diagnose(Reference(BASE, tensors, given), subject)
        assert not found.equal
        assert found.error > 1
        assert found.suspects
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


def test_init_std() -> None:
    wide = dataclasses.replace(BASE, init_std=0.04)
    here = [
        np.asarray(jax.jit(lambda s=s: jaxmodel.Decoder(s, rngs=nnx.Rngs(0)).embed.weight[...])())
        for s in (BASE, wide)
    ]
    np.testing.assert_allclose(here[1], 2 * here[0], rtol=1e-6)
    there = [torchref.Decoder(s).embed.weight.detach().numpy() for s in (BASE, wide)]
    np.testing.assert_allclose(there[1], 2 * there[0], rtol=1e-6)
