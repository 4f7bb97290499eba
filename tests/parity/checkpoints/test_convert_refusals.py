"""Loading, and everything that must be refused: one message each, and nothing half written."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import jaxtwin
from jaxtwin.configs import BadInput, preset
from jaxtwin.configs.spec import Rope, Run
from jaxtwin.jaxmodel import axes, checkpoint
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.table import bridge
from jaxtwin.tests.helpers.folders import (
    bits,
    edit_config,
    entries,
    hf_folder,
    pt_file,
    spec_of,
    torch_state,
)
from jaxtwin.tests.helpers.kit import torch_model
from jaxtwin.tests.helpers.levels import slow

DTYPES = ("float32", "bfloat16")


# --- loading


@pytest.mark.parametrize("layout", ["scan", slow("unroll")])
def test_load_gives_the_model_of_any_source(tmp_path: Path, layout: str) -> None:
    """From HF, ours and torch: the same logits as torchref's, and the same arrays."""
    spec = spec_of("half", True)
    state = torch_state(spec, "float32")
    source = pt_file(tmp_path / "a.pt", spec, state)
    convert(source, tmp_path / "hf", "hf")
    convert(source, tmp_path / "jax", "jax", layout="scan")
    ids = np.random.default_rng(0).integers(0, 23, (2, 9))
    mirror = torch_model(spec, {k: v.double().numpy() for k, v in state.items()})
    with torch.no_grad():
        expected = mirror(torch.from_numpy(ids)).numpy()
    all_arrays = []
    for name in ("a.pt", "hf", "jax"):
        model = jaxtwin.load(tmp_path / name, layout=layout)
        arrays = {k: np.asarray(v) for k, v in axes.arrays(model).items()}
        all_arrays.append(bits(arrays))
        got = np.asarray(model(ids), np.float64)
        assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-5
    assert all_arrays[0] == all_arrays[1] == all_arrays[2]


def test_load_takes_the_dtype_that_it_is_asked_for(golden: Any) -> None:
    with jax.enable_x64(False), pytest.raises(BadInput, match="JAX would narrow"):
        jaxtwin.load(golden.path)
    model = jaxtwin.load(golden.path, dtype="bfloat16")
    assert {str(x.dtype) for x in axes.arrays(model).values()} == {"bfloat16"}
    with jax.enable_x64(True):
        model = jaxtwin.load(golden.path)
        got = np.asarray(model(golden.data["ids"]))
    expected = golden.data["logits"]
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-13


@pytest.mark.slow
def test_load_of_a_preset_is_the_model_itself() -> None:
    from flax import nnx

    from jaxtwin.jaxmodel import Decoder

    model = Decoder(preset("smollm2-tiny"), rngs=nnx.Rngs(0))
    expected = {k: np.asarray(v) for k, v in axes.arrays(model).items()}
    got = {k: np.asarray(v) for k, v in axes.arrays(jaxtwin.load("smollm2-tiny")).items()}
    assert bits(got) == bits(expected)


# --- bad input: one message, nothing written


def test_a_bad_source_writes_nothing(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", max_shard_size="8KB")
    good = {p.name: p.read_bytes() for p in folder.iterdir()}
    shard = sorted(folder.glob("*.safetensors"))[0]

    def few() -> None:
        shard.unlink()

    def unknown() -> None:
        edit_config(folder, query_scale=2.0)

    def shape() -> None:
        edit_config(folder, intermediate_size=21)

    for spoil in (few, unknown, shape):
        spoil()
        for to, dst in (("jax", "out"), ("hf", "out"), ("torch", "out.pt")):
            with pytest.raises(BadInput):
                convert(folder, tmp_path / dst, to)
        assert entries(tmp_path) == {"hf"}
        for name, data in good.items():
            (folder / name).write_bytes(data)
    convert(folder, tmp_path / "out")


@pytest.mark.parametrize("to", ["jax", "hf", "torch"])
def test_a_destination_that_is_taken_is_left_alone(tmp_path: Path, to: str) -> None:
    folder = hf_folder(tmp_path / "hf")
    dst = tmp_path / "out.pt"
    dst.mkdir()
    (dst / "precious").write_text("mine")
    for dry in (True, False):
        with pytest.raises(BadInput, match=r"out\.pt exists and is not empty; name another"):
            convert(folder, dst, to, dry_run=dry)
    assert (dst / "precious").read_text() == "mine"
    (dst / "precious").unlink()
    convert(folder, dst, to)  # an empty folder is as good as none
    assert open_source(dst).spec == open_source(folder).spec
    with pytest.raises(BadInput, match="exists"):
        convert(folder, dst, to)


def test_a_target_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="unknown target 'gguf'; known: jax, hf, meta, torch"):
        convert("smollm2-tiny", tmp_path / "x", "gguf")
    with pytest.raises(BadInput, match="unknown layout 'stack'"):
        convert("smollm2-tiny", tmp_path / "x", layout="stack")
    with pytest.raises(BadInput, match=r"name it .*x\.pt"):
        convert("smollm2-tiny", tmp_path / "x", "torch")
    spec = spec_of()
    no_rope = replace(spec.layers[0], attn=replace(spec.layers[0].attn, rope=None))
    bad = replace(spec, runs=(Run(blocks=(no_rope,), repeats=1),))
    source = pt_file(tmp_path / "a.pt", bad, torch_state(bad, "float32"))
    with pytest.raises(BadInput, match="always has rotary positions"):
        convert(source, tmp_path / "x", "hf")
    assert entries(tmp_path) == {"a.pt"}


@pytest.mark.parametrize("to", ["jax", "hf", "torch"])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, to: str) -> None:
    """A source that turns out shorter than its header said, found halfway through."""
    source = open_source(hf_folder(tmp_path / "hf"))
    name = "layers.1.ffn.up.weight"
    short = replace(source.tensors[name], read=lambda: np.ones((3, 3), np.float32))
    bad = replace(source, tensors={**source.tensors, name: short})
    with pytest.raises(BadInput, match="not what its file's header says"):
        convert(bad, tmp_path / "out.pt", to)
    assert entries(tmp_path) == {"hf"}


KILLED = """
import os, signal, sys
from jaxtwin.parity.checkpoints.convert import convert

def progress(step):
    if step.startswith("20 of"):
        os.kill(os.getpid(), signal.SIGKILL)

convert(sys.argv[1], sys.argv[2], "hf", progress=progress)
"""


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_killed_write_leaves_nothing_that_loads(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    done = python(KILLED, str(folder), str(tmp_path / "out"))
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = entries(tmp_path) - {"hf"}
    assert "out" not in left
    for name in left:
        with pytest.raises(BadInput):
            open_source(tmp_path / name)
    convert(folder, tmp_path / "out", "hf")


WITHOUT_TORCH = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

if sys.argv.pop() == "finder":
    sys.meta_path.insert(0, Absent())
else:
    sys.modules["torch"] = sys.modules["transformers"] = None
import jaxtwin.jaxmodel, jaxtwin.train, jaxtwin
from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.source import open_source

hf, ours, pt, out = sys.argv[1:]
first = convert(hf, out + "/jax", sha256=True)
again = convert(out + "/jax", out + "/hf", "hf", sha256=True)
assert first["sha256"] == again["sha256"]
jaxtwin.load(hf)(([[1, 2, 3]]))
jaxtwin.load(ours, layout="unroll")
for act in (lambda: open_source(pt), lambda: convert(hf, out + "/x.pt", "torch")):
    try:
        act()
    except BadInput as error:
        assert "torch" in str(error), error
    else:
        raise AssertionError("torch came from somewhere")
print("well")
"""


@pytest.mark.parametrize("how", ["finder", slow("None")])
def test_all_but_torch_files_works_without_torch(tmp_path: Path, how: str) -> None:
    folder = hf_folder(tmp_path / "hf", "bfloat16")
    convert(folder, tmp_path / "jax")
    convert(folder, tmp_path / "x.pt", "torch")
    (tmp_path / "out").mkdir()
    names = [str(tmp_path / name) for name in ("hf", "jax", "x.pt", "out")]
    done = python(WITHOUT_TORCH, *names, how)
    assert done.stdout == "well\n", done.stderr
    theirs = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "hf" / "model.safetensors").read_bytes() == theirs


# --- files of ours


def test_the_newest_step_of_a_run_is_taken(tmp_path: Path) -> None:
    """A training run's folder: its last complete step."""
    from orbax.checkpoint import v1 as ocp

    from jaxtwin.jaxmodel.checkpoint import PARAMS, storage, write

    convert(hf_folder(tmp_path / "hf"), tmp_path / "jax")
    saved = checkpoint.read(tmp_path / "jax")
    run = tmp_path / "run"
    write(run, open_source(tmp_path / "hf").spec, "scan", saved, step=3)
    later = {path: x + 1 for path, x in saved.items()}
    with storage():
        ocp.save_checkpointables(run / "7", {PARAMS: later})
    source = open_source(run)
    assert source.notes == ("step 7, the newest complete one",)
    np.testing.assert_array_equal(source.tensors["embed.weight"].read(), later["embed/weight"])


def test_the_bridge_to_torch_keeps_every_bit() -> None:
    raw = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    src = bridge.to_torch(raw)
    assert src.dtype == torch.bfloat16
    np.testing.assert_array_equal(bridge.to_numpy(src).view(np.uint16), raw.view(np.uint16))


def test_a_rope_of_another_pairing_has_its_own_name_in_the_report(tmp_path: Path) -> None:
    spec = spec_of("adjacent")
    assert isinstance(spec.layers[0].attn.rope, Rope)
    source = pt_file(tmp_path / "a.pt", spec, torch_state(spec, "float32"))
    plan = convert(source, tmp_path / "hf", "hf", dry_run=True)["plan"]
    patterns = {s["target"].removeprefix("model.layers.0."): s["pattern"] for s in plan}
    assert patterns["self_attn.q_proj.weight"] == "(n c p) d -> (n p c) d"
    assert patterns["self_attn.k_proj.weight"] == "(k c p) d -> (k p c) d"
    assert patterns["self_attn.v_proj.weight"] == "(k h) d -> (k h) d"
