"""A model at rest: every bit comes back, and a folder is whole or refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtwin.configs import BadInput, Model, Run, preset
from jaxtwin.configs.llama import llama
from jaxtwin.jaxmodel import abstract, axes, checkpoint
from jaxtwin.parity.table import decoder_table, tensors

SPEC = llama(
    vocab=24,
    d=16,
    layers=2,
    heads=2,
    kv=1,
    hidden=24,
    max_len=8,
    base=100.0,
    pairs="half",
    eps=1e-6,
    tied=True,
)
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float64, np.float16)


def values(spec: Model = SPEC, layout: str = "scan", dtype: Any = np.float32) -> dict[str, Any]:
    """Random bits of every kind, NaN included, by path."""
    rng = np.random.default_rng(0)
    out = {}
    for path, x in axes.arrays(abstract(spec, layout=layout)).items():
        raw = rng.integers(0, 256, (*x.shape, np.dtype(dtype).itemsize), np.uint8)
        out[path] = raw.view(dtype)[..., 0]
        out[path].flat[:3] = np.array([-0.0, np.inf, 3.140625], dtype)
    return out


def same(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    checkpoint.write(folder, SPEC, "scan", values(), carry={"tokenizer.json": b"{}"})
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["scan", "unroll"])
def test_every_bit_comes_back(tmp_path: Path, dtype: Any, layout: str) -> None:
    given = values(layout=layout, dtype=dtype)
    checkpoint.write(tmp_path / "model", SPEC, layout, given, step=7)
    said = checkpoint.describe(tmp_path / "model")
    assert (said.spec, said.layout, said.step) == (SPEC, layout, 7)
    assert {p: (x.shape, x.dtype) for p, x in said.shapes.items()} == {
        p: (x.shape, x.dtype) for p, x in given.items()
    }
    found = checkpoint.read(tmp_path / "model")
    assert found.keys() == given.keys()
    assert all(type(x) is np.ndarray and same(x, given[p]) for p, x in found.items())


def test_a_parameter_may_have_a_dtype_of_its_own(tmp_path: Path) -> None:
    given = {p: values(dtype=DTYPES[i % 4])[p] for i, p in enumerate(values())}
    checkpoint.write(tmp_path / "model", SPEC, "scan", given)
    found = checkpoint.read(tmp_path / "model")
    assert all(same(found[path], x) for path, x in given.items())


def test_jax_arrays_are_written_as_they_are(tmp_path: Path) -> None:
    given = values(dtype=ml_dtypes.bfloat16)
    arrays = {path: jnp.asarray(x) for path, x in given.items()}
    checkpoint.write(tmp_path / "model", SPEC, "scan", arrays)
    assert all(same(x, given[p]) for p, x in checkpoint.read(tmp_path / "model").items())


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.write("out/model", SPEC, "scan", values())
    assert same(checkpoint.read("out/model")["norm/weight"], values()["norm/weight"])


def test_only_the_paths_asked_for_are_read(saved: Path) -> None:
    found = checkpoint.read(saved, ["norm/weight"])
    assert found.keys() == {"norm/weight"}
    assert same(found["norm/weight"], values()["norm/weight"])
    assert checkpoint.read(saved, []) == {}
    with pytest.raises(BadInput, match="holds no 'norm/wait'; did you mean 'norm/weight'"):
        checkpoint.read(saved, ["norm/wait"])


def test_each_device_gets_its_part(saved: Path) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    cut = NamedSharding(mesh, PartitionSpec("x"))
    found = checkpoint.read(saved, ["embed/weight", "norm/weight"], shardings=cut)
    for path, x in found.items():
        assert x.sharding == cut
        assert x.addressable_shards[1].data.shape[0] * 2 == x.shape[0]
        assert same(x, values()[path])


def test_float64_is_never_narrowed_unasked(tmp_path: Path) -> None:
    given = values(dtype=np.float64)
    checkpoint.write(tmp_path / "model", SPEC, "scan", given)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for read in (
        lambda: checkpoint.read(tmp_path / "model", shardings=one),
        lambda: checkpoint.load(tmp_path / "model"),
    ):
        with pytest.raises(BadInput, match="is float64, which JAX would narrow"):
            read()
    with jax.enable_x64(True):
        model = checkpoint.load(tmp_path / "model")
        assert all(same(x, given[path]) for path, x in axes.arrays(model).items())
    narrow = axes.arrays(checkpoint.load(tmp_path / "model", dtype=jnp.float32))["norm/weight"]
    with np.errstate(over="ignore"):
        assert same(narrow, given["norm/weight"].astype(np.float32))


PATTERN = SPEC.runs[0].blocks[0]
ODD = Model(  # a pattern of two and a remainder: 2 x (a, b) + c
    d=SPEC.d,
    vocab=SPEC.vocab,
    max_len=SPEC.max_len,
    runs=(Run(blocks=(PATTERN, PATTERN), repeats=2), Run(blocks=(PATTERN,), repeats=1)),
    norm=SPEC.norm,
    tied=False,
)


@pytest.mark.parametrize(("old", "new"), [("scan", "unroll"), ("unroll", "scan")])
def test_the_other_layout_is_the_one_the_table_gives(tmp_path: Path, old: str, new: str) -> None:
    given = values(ODD, old)
    checkpoint.write(tmp_path / "model", ODD, old, given)
    model = checkpoint.load(tmp_path / "model", layout=new)
    dst = {path: tensors.Tensor.of(x) for path, x in given.items()}
    src = tensors.backward(decoder_table.rows(ODD, old), dst, "old")
    due = tensors.forward(decoder_table.rows(ODD, new), src, "new")
    found = axes.arrays(model)
    assert found.keys() == due.keys()
    assert all(same(found[path], x.read()) for path, x in due.items())


def test_describing_reads_no_array(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*args: Any) -> None:
        raise AssertionError("arrays were read")

    monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", nothing)
    assert checkpoint.describe(saved).shapes["norm/weight"].shape == (16,)
    with pytest.raises(BadInput, match="arrays were read"):
        checkpoint.read(saved)


def test_the_newest_complete_step_is_read(saved: Path) -> None:
    shutil.copytree(saved / "0", saved / "9")
    shutil.copytree(saved / "0", saved / "10")
    assert checkpoint.steps(saved) == [0, 9, 10]
    (saved / "10" / "commit_success.txt").unlink()
    shutil.copytree(saved / "0", saved / "11.orbax-checkpoint-tmp")
    (saved / "12").mkdir()
    assert checkpoint.describe(saved).step == 9
    assert checkpoint.describe(saved, step=0).step == 0
    with pytest.raises(BadInput, match=r"no complete step 10; complete: \[0, 9\]"):
        checkpoint.read(saved, step=10)


def test_a_folder_without_a_complete_step_is_refused(tmp_path: Path) -> None:
    checkpoint.begin(tmp_path / "run", SPEC, "scan", carry={"tokenizer.json": b"{}"})
    assert checkpoint.header(tmp_path / "run") == (SPEC, "scan")
    assert checkpoint.carried(tmp_path / "run") == {"tokenizer.json": b"{}"}
    with pytest.raises(BadInput, match="no complete step"):
        checkpoint.describe(tmp_path / "run")


@pytest.mark.parametrize("lost", ["_METADATA", "manifest.ocdbt", "d"])
def test_a_damaged_step_is_refused(saved: Path, lost: str) -> None:
    for path in [*(saved / "0" / "params").rglob(lost)]:
        for file in [path] if path.is_file() else path.iterdir():
            file.write_bytes(b"{")
    with pytest.raises(BadInput, match="0 cannot be read"):
        checkpoint.read(saved)


def change(saved: Path, **new: Any) -> None:
    path = saved / "jaxtwin.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **new}))


def test_what_is_not_ours_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"not a checkpoint of ours: it has no jaxtwin\.json"):
        checkpoint.describe(tmp_path)
    with pytest.raises(BadInput, match=r"not a checkpoint of ours"):
        checkpoint.describe(tmp_path / "nowhere")
    change(saved, format=2)
    with pytest.raises(BadInput, match="format 2 is not known here; this version reads 1"):
        checkpoint.describe(saved)
    change(saved, format=1, layout="sideways")
    with pytest.raises(BadInput, match="a layout of"):
        checkpoint.describe(saved)
    change(saved, layout="scan", more=1)
    with pytest.raises(BadInput, match="must hold format, spec"):
        checkpoint.describe(saved)
    (saved / "jaxtwin.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be read"):
        checkpoint.describe(saved)


def test_a_spec_that_is_not_the_arrays_is_refused(saved: Path) -> None:
    spec = json.loads((saved / "jaxtwin.json").read_text())["spec"]
    change(saved, spec={**spec, "tied": False, "vocab": 25})
    with pytest.raises(BadInput) as error:
        checkpoint.describe(saved)
    assert "head/weight: missing, expected shape (16, 25)" in str(error.value)
    assert "embed/weight: shape (24, 16), expected (25, 16)" in str(error.value)
    change(saved, spec={**spec, "colour": "red"})
    with pytest.raises(BadInput, match="colour"):
        checkpoint.describe(saved)


def test_writing_refuses_what_is_there_already(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="exists and is not empty"):
        checkpoint.write(saved, SPEC, "scan", values())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadInput, match="exists; name another"):
        checkpoint.write(tmp_path / "file", SPEC, "scan", values())
    (tmp_path / "empty").mkdir()
    checkpoint.write(tmp_path / "empty", SPEC, "scan", values())
    assert checkpoint.describe(tmp_path / "empty").step == 0


@pytest.mark.parametrize(
    "name", ["../x", "a/b/c", "a/../x", "", "..", "jaxtwin.json", "12", "12/x", "/x"]
)
def test_carried_files_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="cannot be carried along"):
        checkpoint.write(tmp_path / "model", SPEC, "scan", values(), carry={name: b""})
    assert not any(tmp_path.iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = values()
    del given["norm/weight"]
    with pytest.raises(BadInput, match="norm/weight: missing"):
        checkpoint.write(tmp_path / "model", SPEC, "scan", given)

    def full(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint.ocp, "save_checkpointables", full)
    with pytest.raises(BadInput, match="model cannot be written: No space left"):
        checkpoint.write(tmp_path / "model", SPEC, "scan", values())
    assert not any(tmp_path.iterdir())


def test_inside_somebody_elses_mesh(saved: Path) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        model = checkpoint.load(saved)
    assert all(same(x, values()[path]) for path, x in axes.arrays(model).items())


KILLED = """
import sys, numpy as np
from jaxtwin.configs import preset
from jaxtwin.jaxmodel import abstract, axes, checkpoint
spec = preset("reference-100m")
shapes = axes.arrays(abstract(spec))
arrays = {path: np.ones(x.shape, x.dtype) for path, x in shapes.items()}
print("writing", flush=True)
checkpoint.write(sys.argv[1], spec, "scan", arrays)
print("written", flush=True)
"""


@pytest.mark.slow
def test_a_killed_write_leaves_no_folder(tmp_path: Path) -> None:
    """SIGKILL at ten moments of a 400 MB write: the folder is absent, or whole."""
    outcomes = []
    for i in range(10):
        folder = tmp_path / f"model{i}"
        writer = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ},
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        time.sleep(0.06 * i)
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read()
        writer.wait()
        if folder.exists():
            assert checkpoint.describe(folder).spec == preset("reference-100m")
            assert all((x == 1).all() for x in checkpoint.read(folder).values())
        outcomes.append((folder.exists(), "written" in rest))
        for left in tmp_path.iterdir():
            shutil.rmtree(left)
    assert (False, False) in outcomes  # at least one was killed while it wrote
    assert (False, True) not in outcomes


@pytest.mark.parametrize("files", [3, ["../x"], ["a/b/c"], [7]])
def test_odd_names_of_carried_files_are_refused(tmp_path: Path, files: object) -> None:
    checkpoint.write(tmp_path / "model", SPEC, "scan", values())
    path = tmp_path / "model" / "jaxtwin.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": files}))
    message = r"files must be a list|cannot be carried along"
    with pytest.raises(BadInput, match=message):
        read_header(tmp_path / "model")


def read_header(folder: Path) -> None:
    checkpoint.header(folder)
    checkpoint.carried(folder)
