"""A user's spec, activation and norm, from a folder of theirs: every verb, without an edit here."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner, Result

import jaxtwin
from jaxtwin.cli.main import app
from jaxtwin.configs import BadInput, Mlp, OwnNorm, user_code
from jaxtwin.tests.helpers import ROOT

FILE = ROOT / "tests" / "helpers" / "own_parts" / "my_specs.py"
VARIANT = f"{FILE}:variant"
RUN = ROOT / "configs" / "runs" / "train-reference-tiny.toml"


def run(*words: str, status: int = 0) -> Result:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_it_is_checked(dtype: str) -> None:
    report = jaxtwin.check(VARIANT, tokens=48, dtypes=[dtype])
    assert report.equal
    assert any("no third witness" in note for note in report.notes)


@pytest.mark.slow
def test_it_is_converted_trained_and_generated_from(tmp_path: Path) -> None:
    run("convert", VARIANT, str(tmp_path / "jax"))
    run("convert", str(tmp_path / "jax"), str(tmp_path / "back.pt"), "--to", "torch")
    text = RUN.read_text().replace('"reference-tiny"', f'"{VARIANT}"')
    for old, new in {"warmup = 20": "warmup = 0", "length = 64": "length = 8"}.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "run.toml").write_text(text)
    how = ("--steps", "2", "--out", str(tmp_path / "run"), "--json")
    done = json.loads(run("train", str(tmp_path / "run.toml"), *how).stdout)
    assert len(done["steps"]) == 2
    out = run("generate", str(tmp_path / "run"), "--ids", "1,2,3", "--tokens", "4").stdout
    assert len(out.split(",")) == 4


@pytest.mark.slow
def test_mistakes_in_it_are_caught() -> None:
    names = ("tile-not-repeat", "rope-backwards", "causal-corner", "qk-norm-missing")
    table = json.loads(run("faults", *names, "--in", VARIANT, "--json", "--workers", "1").stdout)
    assert (table["controls"], table["false_alarms"]) == (1, 0)
    assert [fault["name"] for fault in table["faults"]] == list(names)
    assert all(fault["caught"] for fault in table["faults"])
    assert sum(fault["named"] for fault in table["faults"]) >= 3


def test_the_functions_are_the_users(tmp_path: Path) -> None:
    """By hand: relu squared, and x over the mean of its absolute values, times the weight."""
    from flax import nnx

    from jaxtwin import jaxmodel, torchref
    from jaxtwin.jaxmodel import ffn
    from jaxtwin.torchref import ffn as torch_ffn

    spec = user_code.spec(VARIANT)
    assert float(ffn.activation("squared_relu")(np.float32(3.0))) == 9.0
    assert torch_ffn.activation("squared_relu") is not ffn.activation("squared_relu")
    x = jax.numpy.array([1.0, -3.0, 2.0, 2.0])
    model = jaxmodel.Decoder(spec, rngs=nnx.Rngs(0))
    wide = jax.numpy.tile(x, 8)
    np.testing.assert_allclose(model.norm(wide[None]), wide[None] / 2.001, rtol=1e-6)
    assert isinstance(torchref.Decoder(spec).norm, torchref.norm.OwnNorm)


def test_what_is_not_registered_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no activation is called 'sqared_relu'"):
        Mlp(hidden=4, act="sqared_relu", bias=False)
    with pytest.raises(ValueError, match=r"no norm is called 'nothing'.*jaxtwin.register_norm"):
        OwnNorm(name="nothing")
    with pytest.raises(BadInput, match="'relu' is built in"):
        jaxtwin.register_activation("relu", torch=abs, jax=abs)
    with pytest.raises(BadInput, match="must be functions"):
        jaxtwin.register_norm("n", torch=3, jax=abs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{FILE}:varaint", "has no 'varaint'; did you mean 'variant'"),
        (f"{FILE}:no_spec", r"must be a jaxtwin spec \(Model\), and is a int"),
        (f"{FILE}:fails", r"fails\(\) fails: KeyError: 'width' \(line \d+ of my_specs.py\)"),
        ("nothing/my_specs.py:variant", "there is no file nothing/my_specs.py"),
    ],
)
def test_what_is_no_spec_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        jaxtwin.load(text)


def test_the_command_has_a_version_and_presets() -> None:
    assert run("--version").stdout == f"jaxtwin {jaxtwin.__version__}\n"
    found = json.loads(run("presets", "--json").stdout)
    gpt2 = next(preset for preset in found if preset["name"] == "gpt2")
    assert gpt2["parameters"] == 124_439_808
    assert "gemma3-1b" in run("presets").stdout


def test_inspect_fits_one_screen() -> None:
    out = run("inspect", "gemma3-1b").stdout
    assert len(out.splitlines()) <= 24
    assert "22 layers" in out
    assert "4 layers" in out
