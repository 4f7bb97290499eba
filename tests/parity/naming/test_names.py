"""A person's own names: read, turned into rows, proven, and undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import jaxtwin
from jaxtwin.configs import BadInput
from jaxtwin.configs.llama import llama
from jaxtwin.parity.checkpoints import state_dict
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.naming.names import Naming, read
from jaxtwin.tests.helpers.own_modules import OWN, Own

SPEC = llama(
    vocab=9,
    d=8,
    layers=2,
    heads=4,
    kv=2,
    hidden=6,
    max_len=16,
    base=100.0,
    eps=1e-6,
    tied=False,
    pairs="half",
)
PLAIN = {
    "e": "embed.weight",
    "n": "norm.weight",
    "u": "head.weight",
    "b.{l}.a": "layers.{l}.pre_attn.weight",
    "b.{l}.f": "layers.{l}.pre_ffn.weight",
    "b.{l}.o": "layers.{l}.attn.o.weight",
    "b.{l}.g": "layers.{l}.ffn.gate.weight",
    "b.{l}.w": "layers.{l}.ffn.up.weight",
    "b.{l}.d": "layers.{l}.ffn.down.weight",
}
QKV = [f"layers.{{l}}.attn.{part}.weight" for part in "qkv"]
SEPARATE = dict(zip(("b.{l}.q", "b.{l}.k", "b.{l}.v"), QKV, strict=True))


def state(naming: Naming) -> dict[str, np.ndarray]:
    """Arrays of the shapes that a naming asks for, every entry another number."""
    shapes = {move.src[0]: move.src_shape for row in naming.rows(SPEC) for move in row.moves()}
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def ours(names: dict[str, Any], values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found, _ = state_dict.mapped(values, SPEC, read(names), "the test", [])
    return {name: tensor.read() for name, tensor in found.items()}


def test_one_behind_the_other() -> None:
    """By hand: 8 rows of queries, 4 of keys, 4 of values."""
    names = {**PLAIN, "b.{l}.qkv": QKV}
    values = state(read(names))
    got = ours(names, values)
    fused = values["b.1.qkv"]
    assert fused.shape == (16, 8)
    np.testing.assert_array_equal(got["layers.1.attn.q.weight"], fused[:8])
    np.testing.assert_array_equal(got["layers.1.attn.k.weight"], fused[8:12])
    np.testing.assert_array_equal(got["layers.1.attn.v.weight"], fused[12:])


def test_one_behind_the_other_transposed() -> None:
    names = {
        **PLAIN,
        "b.{l}.qkv": [f"{name}.T" for name in QKV],
        "b.{l}.o": PLAIN["b.{l}.o"] + ".T",
    }
    values = state(read(names))
    got = ours(names, values)
    assert values["b.0.qkv"].shape == (8, 16)
    np.testing.assert_array_equal(got["layers.0.attn.k.weight"], values["b.0.qkv"][:, 8:12].T)
    np.testing.assert_array_equal(got["layers.0.attn.o.weight"], values["b.0.o"].T)


def test_group_by_group_of_heads() -> None:
    """Case 21: of 4 query heads and 2 of keys, q = 0, 1, 4, 5; k = 2, 6; v = 3, 7."""
    names = {**PLAIN, "b.{l}.qkv": {"of": QKV, "axes": "(k j h) d"}}
    values = state(read(names))
    heads = values["b.0.qkv"].reshape(8, 2, 8)  # the head's number, its width, the model's width
    got = ours(names, values)
    np.testing.assert_array_equal(got["layers.0.attn.q.weight"], heads[[0, 1, 4, 5]].reshape(8, 8))
    np.testing.assert_array_equal(got["layers.0.attn.k.weight"], heads[[2, 6]].reshape(4, 8))
    np.testing.assert_array_equal(got["layers.0.attn.v.weight"], heads[[3, 7]].reshape(4, 8))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_there_and_back_bit_for_bit(dtype: str, own: Own) -> None:
    module = own.module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    cast = {n: x.to(getattr(torch, dtype)) for n, x in module.state_dict().items()}
    with jax.enable_x64(dtype == "float64"):
        back = jaxtwin.release(jaxtwin.adopt(cast, own.spec, own.names), own.names)
    assert cast.keys() - back.keys() <= {name for name, _ in module.named_buffers()}
    for name, x in back.items():
        assert x.dtype == cast[name].dtype
        assert torch.equal(x, cast[name]), name
    module.load_state_dict(back, strict=False)


@pytest.fixture(params=OWN, ids=lambda own: own.name)
def own(request: pytest.FixtureRequest) -> Own:
    found: Own = request.param
    return found


BAD: list[tuple[dict[str, Any], str]] = [
    ({**PLAIN}, r"layers.0.attn.q.weight: no tensor of yours is named for it"),
    (PLAIN | SEPARATE | {"x": "embed.wieght"}, r"x: this model has no embed.wieght; did you mean"),
    (PLAIN | SEPARATE | {"b.q": QKV[0]}, r"b.q: \{l\} must be in both names, or in neither"),
    (PLAIN | SEPARATE | {"n": "norm.weight.T"}, "n: a vector cannot be transposed"),
    (PLAIN | {"b.{l}.qkv": [QKV[0], QKV[1] + ".T", QKV[2]]}, "do not stand one behind the other"),
    (PLAIN | {"b.{l}.qkv": {"of": QKV, "axes": "(k x h) d"}}, "must have the letter j once"),
    (PLAIN | SEPARATE | {"e2": "b", "{x}": "c"}, "a name may have the hole {l}, and no other"),
    (PLAIN | {"b.{l}.qkv": {"of": QKV}}, "must be a name, a list of names"),
    (PLAIN | SEPARATE | {"e": "?"}, "e: still has a question mark"),
]


@pytest.mark.parametrize(("names", "message"), BAD)
def test_names_that_cannot_be(names: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read(names).rows(SPEC)


def test_a_tensor_that_nobody_named_and_one_that_is_not_there() -> None:
    names = PLAIN | SEPARATE
    values = state(read(names))
    values["more"] = values.pop("e")
    with pytest.raises(BadInput, match=r"e: missing(.|\n)*more: unexpected"):
        ours(names, values)


def test_copies_must_be_equal() -> None:
    names = PLAIN | SEPARATE | {"e2": "embed.weight"}
    values = state(read(names))
    values["e2"] = values["e"].copy()
    assert ours(names, values)["embed.weight"] is not None
    values["e2"][0, 0] += 1
    with pytest.raises(BadInput, match="e2 and e are named as one tensor, and they differ"):
        ours(names, values)
    del values["e"]
    np.testing.assert_array_equal(ours(names, values)["embed.weight"], values["e2"])


def test_what_a_wrapper_put_before_the_names_is_left_off(tmp_path: Path) -> None:
    names = PLAIN | SEPARATE
    values = {f"_orig_mod.{n}": torch.from_numpy(x) for n, x in state(read(names)).items()}
    path = tmp_path / "ckpt.pt"
    torch.save({"model": values, "optimizer": {}, "iter_num": 3}, path)
    source = open_source(path, names=names, spec=SPEC)
    assert sorted(source.published) == sorted(state(read(names)))
    assert any("the state dict is" in note and "iter_num" in note for note in source.notes)
    assert any("begins with _orig_mod." in note for note in source.notes)


def test_a_file_of_names_is_toml_or_python(tmp_path: Path) -> None:
    toml = tmp_path / "names.toml"
    toml.write_text('spec = "gpt2-tiny"\n[names]\n"a" = "embed.weight"\n"m" = ""\n')
    found = read(toml)
    assert found.spec is not None
    assert found.left_out == ("m",)
    toml.write_text('[nmes]\n"a" = "b"\n')
    with pytest.raises(BadInput, match="'nmes' is not known"):
        read(toml)
    with pytest.raises(BadInput, match=r"names are in a .toml or a .py file"):
        read(tmp_path / "names.json")
    with pytest.raises(BadInput, match="cannot be read"):
        read(tmp_path / "nothing.toml")
    code = tmp_path / "mine.py"
    code.write_text("NAMES = {}\n1 / 0\n")
    with pytest.raises(BadInput, match=r"does not run: ZeroDivisionError.*line 2 of mine.py"):
        read(code)


def test_a_pt_of_ours_is_written_under_the_names_too(tmp_path: Path, own: Own) -> None:
    module = own.module()
    torch.save(module.state_dict(), tmp_path / "theirs.pt")
    reading = {"names": own.names}
    jaxtwin.convert(tmp_path / "theirs.pt", tmp_path / "ours.pt", "torch", **reading)
    jaxtwin.convert(tmp_path / "ours.pt", tmp_path / "back.pt", "torch", **reading)
    back = torch.load(tmp_path / "back.pt")
    assert all(torch.equal(x, module.state_dict()[name]) for name, x in back.items())


def test_prefixes_upon_prefixes_and_braces() -> None:
    notes: list[str] = []
    state = {"module._orig_mod.a": 1, "module._orig_mod.b": 2}
    assert state_dict.unwrapped(state, ("a",), notes) == {"a": 1, "b": 2}
    assert len(notes) == 2
    assert state_dict.unwrapped(state, ("module.x",), []) == state
    with pytest.raises(BadInput, match=r"a layer's number is written {l}, got 'layers.{i}.x'"):
        read({"a.{l}": "layers.{i}.x"})
