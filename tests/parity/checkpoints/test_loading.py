"""Loading over a mesh: every device's slice from the file alone, and the same bits as whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxtwin
from jaxtwin.configs import BadInput, runs
from jaxtwin.configs.llama import llama
from jaxtwin.jaxmodel import axes
from jaxtwin.jaxmodel.sharding import from_slices
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.tests.helpers.folders import bits, pt_file, torch_state
from jaxtwin.tests.helpers.gguf_files import write_gguf
from jaxtwin.tests.helpers.levels import slow
from jaxtwin.train import mesh

SPEC = llama(
    vocab=48, d=32, layers=3, heads=4, kv=2, hidden=64, max_len=32, base=500.0, pairs="adjacent",
    eps=1e-5, tied=False, width=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model as shards of safetensors and in our folder, and a quantized GGUF."""
    at = tmp_path_factory.mktemp("sources")
    pt = pt_file(at / "a.pt", SPEC, torch_state(SPEC, "bfloat16"))
    convert(pt, at / "hf", "hf", shard=20_000)
    convert(pt, at / "jax")
    return {"hf": at / "hf", "jax": at / "jax", "gguf": write_gguf(at / "a.gguf", "Q8_0"), "pt": pt}


ALONE = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import numpy as np
from jaxtwin.configs import runs
from jaxtwin.train import mesh
mesh.simulate(8)
import jaxtwin
from jaxtwin.jaxmodel import axes
from jaxtwin.parity.checkpoints import files

asked = []
opened = files.safetensors_file

def counted(path):
    from dataclasses import replace
    def count(tensor):
        def slices(index):
            part = tensor.slices(index)
            asked.append(part.nbytes)
            return part
        def read():
            raise AssertionError("read as a whole")
        return replace(tensor, read=read, slices=slices)
    return {name: count(tensor) for name, tensor in opened(path).items()}

src, layout, count = sys.argv[1:]
whole = axes.arrays(jaxtwin.load(src, layout=layout))
if count == "count":
    files.OPENERS[".safetensors"] = counted
devices = mesh.build(runs.Mesh(data=2, fsdp=2, tensor=2))
cut = axes.arrays(jaxtwin.load(src, layout=layout, mesh=devices))
assert cut.keys() == whole.keys()
shapes = {}
for path, x in cut.items():
    y = np.asarray(whole[path])
    assert (x.dtype, x.shape) == (y.dtype, y.shape), path
    assert len(x.sharding.device_set) == 8, path
    assert np.asarray(x).tobytes() == y.tobytes(), path
    for shard in x.addressable_shards:
        assert np.asarray(shard.data).tobytes() == y[shard.index].tobytes(), path
    shapes[path] = x.addressable_shards[0].data.shape
    assert {s.data.shape for s in x.addressable_shards} == {shapes[path]}
bytes = sum(x.nbytes for x in whole.values())
print(json.dumps({"shapes": shapes, "asked": asked, "bytes": bytes}))
"""


def in_a_process(src: Path, layout: str, count: str = "") -> dict[str, Any]:
    """Both ways of loading, in a process of 8 devices without torch and transformers."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(src), layout, count],
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("layout", ["scan", slow("unroll")])
def test_each_device_gets_its_slice_of_the_file(sources: dict[str, Path], layout: str) -> None:
    """Heads, ffn width and vocabulary cut in 2, and the model's width; every byte read once."""
    seen = in_a_process(sources["hf"], layout, "count")
    stack, layers = ("stack/runs/0/0/", [3]) if layout == "scan" else ("stack/layers/1/", [])
    for name, due in {
        "embed/weight": [24, 16],
        "head/weight": [16, 24],
        "norm/weight": [16],
        f"{stack}attn/q": [*layers, 16, 2, 8],
        f"{stack}attn/k": [*layers, 16, 1, 8],
        f"{stack}attn/o": [*layers, 2, 8, 16],
        f"{stack}ffn/gate": [*layers, 16, 32],
        f"{stack}ffn/down": [*layers, 32, 16],
        f"{stack}pre_attn/weight": [*layers, 16],
    }.items():
        assert seen["shapes"][name] == due, name
    assert sum(seen["asked"]) == seen["bytes"]
    assert max(seen["asked"]) == 64 * 32 * 2 // 4  # a quarter of one layer's gate


@pytest.mark.parametrize("kind", ["jax", slow("gguf")])
def test_other_sources_are_cut_alike(sources: dict[str, Path], kind: str) -> None:
    seen = in_a_process(sources[kind], "scan")
    stack = "stack/runs/0/0/"
    due = {"jax": [3, 16, 2, 8], "gguf": [2, 32, 2, 16]}[kind]
    assert seen["shapes"][f"{stack}attn/q"] == due


def test_a_torch_file_and_another_dtype(sources: dict[str, Path]) -> None:
    """Rounded slice by slice as it is rounded whole."""
    devices = mesh.build(runs.Mesh(data=1, fsdp=2, tensor=2))
    for dtype in (None, "float32", "float16"):
        unsharded = axes.arrays(jaxtwin.load(sources["pt"], dtype=dtype))
        cut = axes.arrays(jaxtwin.load(sources["pt"], dtype=dtype, mesh=devices))
        assert bits({k: np.asarray(v) for k, v in cut.items()}) == bits(
            {k: np.asarray(v) for k, v in unsharded.items()}
        )
        assert {str(x.dtype) for x in cut.values()} == {dtype or "bfloat16"}


def test_a_loaded_model_computes_over_the_mesh(sources: dict[str, Path]) -> None:
    model = jaxtwin.load(
        sources["hf"], dtype="float32", mesh=mesh.build(runs.Mesh(data=1, fsdp=2, tensor=4))
    )
    unsharded = jaxtwin.load(sources["hf"], dtype="float32")
    got, due = (np.asarray(m(np.arange(12).reshape(2, 6))) for m in (model, unsharded))
    assert np.linalg.norm(got - due) < 1e-5 * np.linalg.norm(due)


def test_each_distinct_slice_is_read_once() -> None:
    """4 slices for 8 devices; and of a source without slices, one whole read."""
    x = np.arange(64).reshape(8, 8)
    parts: list[tuple[int, ...]] = []
    reads: list[int] = []

    def slices(index: Any) -> np.ndarray:
        parts.append(x[index].shape)
        return x[index]

    def read() -> np.ndarray:
        reads.append(1)
        return x

    devices = mesh.build(runs.Mesh(data=2, fsdp=2, tensor=2))
    spec = jax.sharding.PartitionSpec("fsdp", "tensor")
    sharding = jax.sharding.NamedSharding(devices, spec)
    got = from_slices(Tensor(x.shape, x.dtype, read, slices), sharding)
    assert parts == [(4, 4)] * 4
    assert reads == []
    np.testing.assert_array_equal(got, x)
    np.testing.assert_array_equal(from_slices(Tensor(x.shape, x.dtype, read), sharding), x)
    assert reads == [1]


def test_a_mesh_that_does_not_fit_is_refused(sources: dict[str, Path]) -> None:
    with pytest.raises(BadInput, match=r"axes data, fsdp, tensor.*; this one has x, y"):
        jaxtwin.load(sources["hf"], mesh=jax.make_mesh((4, 2), ("x", "y")))
    odd = llama(
        vocab=49, d=32, layers=1, heads=4, kv=2, hidden=64, max_len=32, base=500.0, pairs="half",
        eps=1e-5, tied=True, width=8,
    )  # fmt: skip
    path = pt_file(sources["pt"].with_name("odd.pt"), odd, torch_state(odd, "float32"))
    devices = mesh.build(runs.Mesh(data=1, fsdp=1, tensor=8))
    with pytest.raises(BadInput, match="is not divisible by tensor=8"):
        jaxtwin.load(path, mesh=devices)


def test_a_dtype_that_does_not_exist() -> None:
    with pytest.raises(BadInput, match="there is no dtype 'float3'; did you mean 'float32'"):
        jaxtwin.load("smollm2-tiny", dtype="float3")
