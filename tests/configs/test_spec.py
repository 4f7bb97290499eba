"""The spec refuses what it cannot mean, and names the field."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pydantic
import pytest

from jaxtwin import configs
from jaxtwin.configs import (
    GQA,
    LEGEND,
    PRESETS,
    RMS,
    BadInput,
    Block,
    Glu,
    Model,
    Rope,
    Run,
    preset,
)
from jaxtwin.configs.errors import nearest
from jaxtwin.configs.llama import llama
from jaxtwin.configs.spec import from_json, to_json

ROPE = {"base": 100.0, "pairs": "half"}
HEADS = {"heads": 4, "kv": 2, "width": 4}
WRONG = [
    (RMS, {"eps": -1e-6}, "eps"),
    (RMS, {"eps": float("nan")}, "eps"),
    (RMS, {"eps": float("inf")}, "eps"),
    (RMS, {"eps": "1e-6"}, "eps"),
    (RMS, {"eps": None}, "eps"),
    (RMS, {}, "eps"),
    (RMS, {"eps": 1e-6, "bias": True}, "bias"),
    (RMS, {"eps": 1e-6, "kind": "layer"}, "kind"),
    (Rope, {**ROPE, "base": 0.0}, "base"),
    (Rope, {**ROPE, "base": -1.0}, "base"),
    (Rope, {**ROPE, "pairs": "interleaved"}, "pairs"),
    (Rope, {"base": 100.0}, "pairs"),
    (GQA, {**HEADS, "rope": None, "heads": 0}, "heads"),
    (GQA, {**HEADS, "rope": None, "heads": 4.0}, "heads"),
    (GQA, {**HEADS, "rope": None, "heads": True}, "heads"),
    (GQA, {**HEADS, "rope": None, "kv": 3}, "heads=4 is not a multiple of kv=3"),
    (GQA, {**HEADS, "rope": None, "kv": 8}, "heads=4 is not a multiple of kv=8"),
    (GQA, {**HEADS, "rope": None, "width": -4}, "width"),
    (GQA, {**HEADS, "rope": Rope(**ROPE), "width": 5}, "width=5 is odd"),
    (GQA, {**HEADS}, "rope"),
    (Glu, {"hidden": 0}, "hidden"),
    (Glu, {"hidden": 8, "act": "rele"}, "act"),
    (Run, {"blocks": (), "repeats": 1}, "blocks"),
]


@pytest.mark.parametrize(("cls", "fields", "message"), WRONG)
def test_refused(cls: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        cls(**fields)


TINY = preset("reference-tiny")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("d", 0),
        ("vocab", -1),
        ("max_len", 0),
        ("max_len", 2.5),
        ("runs", ()),
        ("tied", 1),
        ("init_std", 0.0),
        ("init_std", float("inf")),
        ("norm", "rms"),
    ],
)
def test_a_model_refuses(field: str, value: Any) -> None:
    with pytest.raises(pydantic.ValidationError, match=field):
        dataclasses.replace(TINY, **{field: value})


def test_times_is_positive() -> None:
    with pytest.raises(pydantic.ValidationError, match="repeats"):
        Run(blocks=TINY.runs[0].blocks, repeats=0)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.d = 7  # type: ignore[misc]
    assert hash(TINY) == hash(preset("reference-tiny"))


def test_an_odd_width_is_fine_without_rope() -> None:
    assert GQA(heads=2, kv=1, width=5, rope=None).width == 5


def test_llama_width() -> None:
    sizes = {"vocab": 9, "d": 10, "layers": 1, "heads": 4, "kv": 2, "hidden": 4, "max_len": 8}
    rest = {"base": 10.0, "pairs": "half", "eps": 0.0, "tied": True}
    with pytest.raises(ValueError, match="d=10 is not a multiple of heads=4; give the head width"):
        llama(**sizes, **rest)
    assert llama(**sizes, **rest, width=8).layers[0].attn.width == 8


def test_layers_are_in_the_order_of_computation() -> None:
    (a,) = TINY.runs[0].blocks
    b = dataclasses.replace(a, ffn=Glu(hidden=5))
    model = dataclasses.replace(
        TINY, runs=(Run(blocks=(a, b), repeats=2), Run(blocks=(b,), repeats=1))
    )
    assert model.layers == (a, b, a, b, b)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_come_back_from_json(name: str) -> None:
    text = json.dumps(to_json(preset(name)))
    assert from_json(json.loads(text), "the file") == preset(name)


def test_json_writes_every_field_out() -> None:
    data = to_json(TINY)
    assert data.keys() == {f.name for f in dataclasses.fields(Model)}
    assert data["runs"][0]["blocks"][0].keys() == {f.name for f in dataclasses.fields(Block)}
    assert data["init_std"] == 0.02


def test_bad_json_names_the_place_and_every_field() -> None:
    data = to_json(TINY)
    data["vocab"] = "many"
    data["runs"][0]["blocks"][0]["attn"]["kv"] = 3
    data["colour"] = "red"
    del data["tied"]
    with pytest.raises(BadInput) as error:
        from_json(data, "model.json")
    told = str(error.value)
    assert told.startswith("model.json is not valid:\n")
    for part in ("vocab: ", "got 'many'", "heads=4 is not a multiple of kv=3", "colour", "tied"):
        assert part in told, part


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_json_of_another_shape(data: Any) -> None:
    with pytest.raises(BadInput, match=r"model.json is not valid"):
        from_json(data, "model.json")


def test_unknown_preset() -> None:
    with pytest.raises(BadInput, match="'smolm2-135m'; did you mean 'smollm2-135m'"):
        preset("smolm2-135m")
    with pytest.raises(BadInput, match=r"no preset is called 'zzz'; known: .*reference-100m"):
        preset("zzz")


def test_nearest() -> None:
    assert nearest("atn", ["attn", "ffn"]) == "did you mean 'attn'?"
    assert nearest("xyz", ["b", "a"]) == "known: a, b"
    assert nearest("xyz", [str(i) * 9 for i in range(30)]) == "30 names are known"


def test_smollm2_is_the_published_one() -> None:
    spec = preset("smollm2-135m")
    attn, ffn = spec.layers[0].attn, spec.layers[0].ffn
    assert (spec.d, len(spec.layers), spec.vocab, spec.tied) == (576, 30, 49_152, True)
    assert (attn.heads, attn.kv, attn.width, ffn.hidden) == (9, 3, 64, 1_536)
    assert attn.rope == Rope(base=100_000.0, pairs="half")


def test_reference_100m_is_the_stated_one() -> None:
    spec = preset("reference-100m")
    attn, ffn = spec.layers[0].attn, spec.layers[0].ffn
    assert (spec.d, len(spec.layers), spec.vocab, spec.max_len) == (768, 12, 32_000, 2_048)
    assert (attn.heads, attn.kv, attn.width, ffn.hidden) == (12, 4, 64, 2_048)
    assert attn.rope == Rope(base=10_000.0, pairs="adjacent")
    assert spec.tied
    assert {block.pre_attn for block in spec.layers} == {RMS(eps=1e-6)} == {spec.norm}
    assert spec.init_std == 0.02


def test_legend_has_one_letter_for_one_thing() -> None:
    assert all(len(letter) == 1 for letter in LEGEND)
    assert len(set(LEGEND.values())) == len(LEGEND)
    assert set("btsdnkhfevlmr") == set(LEGEND)


def test_every_parameter_is_declared_in_letters_of_the_legend() -> None:
    from jaxtwin import jaxmodel
    from jaxtwin.jaxmodel import axes

    for layout in ("scan", "unroll"):
        model = jaxmodel.abstract(dataclasses.replace(TINY, tied=False), layout=layout)
        shapes = axes.arrays(model)
        for path, letters in axes.letters(model).items():
            assert set(letters.split()) <= LEGEND.keys()
            assert len(letters.split()) == len(shapes[path].shape)


def test_configs_bring_no_framework() -> None:
    """In an interpreter of its own."""
    code = (
        "import sys, configs, configs.budget, configs.runs\n"
        "heavy = {'jax', 'flax', 'optax', 'orbax', 'grain', 'torch', 'transformers'}\n"
        "sys.exit(' '.join(heavy & sys.modules.keys()) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_yarn_needs_a_base_above_one() -> None:
    """Its ramp is counted in powers of the base."""
    with pytest.raises(ValueError, match=r"rope.base=1.0: YaRN needs a base above 1"):
        configs.GQA(
            heads=1,
            kv=1,
            width=4,
            rope=configs.Rope(
                base=1.0,
                pairs="half",
                scaling=configs.Yarn(factor=4.0, original=8, magnitude=1.0),
            ),
        )


def test_layer_numbers_name_each_layer_once_in_the_order_of_computation() -> None:
    a, b, c = (Block(pre_attn=None, attn=GQA(heads=1, kv=1, width=w, rope=None), pre_ffn=None,
                     ffn=Glu(hidden=1)) for w in (2, 4, 6))  # fmt: skip
    patterns = ((a, b), 2), ((c,), 3), ((b, c, a), 1)
    runs = tuple(Run(blocks=blocks, repeats=n) for blocks, n in patterns)
    model = Model(d=8, vocab=3, max_len=4, runs=runs, norm=None, tied=True)
    numbers = model.layer_numbers()
    assert numbers == (
        (range(0, 4, 2), range(1, 4, 2)),
        (range(4, 7),),
        (range(7, 8, 3), range(8, 9, 3), range(9, 10, 3)),
    )  # fmt: skip
    for run, layers in zip(model.runs, numbers, strict=True):
        for block, which in zip(run.blocks, layers, strict=True):
            assert [model.layers[i] for i in which] == [block] * run.repeats
