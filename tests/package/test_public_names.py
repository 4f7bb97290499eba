"""`import jaxtwin`: every public name works, once every submodule has been imported too."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxtwin
from jaxtwin import torchref
from jaxtwin.tests.helpers import ROOT

MODEL = "gpt2-tiny"
RUN = ROOT / "configs" / "runs" / "train-reference-tiny.toml"


@pytest.fixture(scope="module", autouse=True)
def submodules() -> list[str]:
    """Importing `jaxtwin.x` sets jaxtwin's attribute `x`, whatever public name was there."""
    found = [m.name for m in pkgutil.walk_packages(jaxtwin.__path__, "jaxtwin.")]
    for name in found:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    return found


def test_no_public_name_is_a_submodules(submodules: list[str]) -> None:
    inner = {name.split(".")[1] for name in submodules}
    assert {"api", "configs", "jaxmodel", "parity", "torchref", "train"} <= inner
    assert not inner & set(jaxtwin.__all__)


def load(folder: Path) -> None:
    assert jaxtwin.load(MODEL)(jnp.array([[1, 2, 3]])).shape[:2] == (1, 3)


def save(folder: Path) -> None:
    jaxtwin.save(jaxtwin.load(MODEL), folder / "saved", like=MODEL)
    assert jaxtwin.load(folder / "saved").spec == jaxtwin.load(MODEL).spec


def convert(folder: Path) -> None:
    report = jaxtwin.convert(MODEL, folder / "hf", "hf")
    assert report["tensors"] > 0
    assert (folder / "hf" / "config.json").exists()


def generate(folder: Path) -> None:
    assert jaxtwin.generate(jaxtwin.load(MODEL), [[1, 2, 3]], 2).shape == (1, 5)


def fit(folder: Path) -> None:
    text = RUN.read_text()
    small = {"warmup = 20": "warmup = 0", "length = 64": "length = 8", "accumulate = 2": ""}
    for old, new in {**small, "devices = 4": "", "data = 2": "", "fsdp = 2": ""}.items():
        text = text.replace(old, new)
    (folder / "run.toml").write_text(text)
    result = jaxtwin.fit(folder / "run.toml", steps=1, folder=folder / "run")
    assert len(result.steps) == 1


def check(folder: Path) -> None:
    report = jaxtwin.check(MODEL, dtypes=("float64",), tokens=8)
    assert report.equal


def linear() -> tuple[Any, ...]:
    """A torch layer, the same in JAX, the table between them, an input."""
    module = torch.nn.Linear(3, 2).double()
    table = [jaxtwin.Row("w", "weight", "o i -> i o"), jaxtwin.Row("b", "bias", "o -> o")]
    values = {name: value.detach().numpy() for name, value in module.named_parameters()}
    params = {"w": values["weight"].T, "b": values["bias"]}

    def function(p: dict[str, Any], x: Any) -> Any:
        return jaxtwin.probe(x @ p["w"] + p["b"], "out")

    return module, function, table, [np.ones((4, 3))], params


def compare(folder: Path) -> None:
    *sides, params = linear()
    report = jaxtwin.compare(*sides, params=params, jit=False)
    assert report.equal
    report = jaxtwin.compare(*sides, params={**params, "b": params["b"] + 1}, jit=False)
    assert not report.equal


def assert_parity(folder: Path) -> None:
    *sides, params = linear()
    same = jaxtwin.compare(*sides, params=params, jit=False)
    assert jaxtwin.assert_parity(same) is same
    other = jaxtwin.compare(*sides, params={**params, "b": params["b"] + 1}, jit=False)
    with pytest.raises(AssertionError, match="bias"):
        jaxtwin.assert_parity(other)


def probe(folder: Path) -> None:
    x = jnp.ones(3)
    assert jaxtwin.probe(x, "x") is x


def row(folder: Path) -> None:
    assert jaxtwin.Row("w", "weight", "o i -> i o").dst == "w"


def specs(folder: Path) -> None:
    assert isinstance(jaxtwin.load(MODEL).spec, jaxtwin.specs.Model)


def state() -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """A state dict whose names are ours with "mine." before them, its spec and names."""
    spec = jaxtwin.load(MODEL).spec
    values = torchref.Decoder(spec).state_dict()
    return {f"mine.{n}": x for n, x in values.items()}, spec, {f"mine.{n}": n for n in values}


def adopt(folder: Path) -> None:
    values, spec, names = state()
    assert jaxtwin.adopt(values, spec, names)(jnp.array([[1, 2]])).shape == (1, 2, spec.vocab)


def release(folder: Path) -> None:
    values, spec, names = state()
    back = jaxtwin.release(jaxtwin.adopt(values, spec, names), names)
    assert back.keys() == values.keys()
    assert all(torch.equal(back[name], x) for name, x in values.items())


def register_activation(folder: Path) -> None:
    jaxtwin.register_activation("twice", torch=lambda x: 2 * x, jax=lambda x: 2 * x)
    assert jaxtwin.specs.Mlp(hidden=1, act="twice", bias=False).act == "twice"


def register_norm(folder: Path) -> None:
    jaxtwin.register_norm("same", torch=lambda x, w, eps: x * w, jax=lambda x, w, eps: x * w)
    assert jaxtwin.specs.OwnNorm(name="same").name == "same"


USES: dict[str, Callable[[Path], None]] = {
    "Row": row, "adopt": adopt, "assert_parity": assert_parity, "check": check,
    "compare": compare, "convert": convert, "fit": fit, "generate": generate, "load": load,
    "probe": probe, "register_activation": register_activation, "register_norm": register_norm,
    "release": release, "save": save, "specs": specs,
}  # fmt: skip


def test_every_public_name_is_used() -> None:
    assert USES.keys() == set(jaxtwin.__all__)


SLOW = {"check", "fit"}  # others call these all the time


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in jaxtwin.__all__],
)
def test_a_public_name_works(name: str, tmp_path: Path) -> None:
    USES[name](tmp_path)


@pytest.mark.parametrize("name", jaxtwin.__all__)
def test_a_public_name_says_what_it_is(name: str) -> None:
    assert getattr(jaxtwin, name).__doc__
