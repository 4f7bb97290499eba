"""Round trips: through every format and layout and back, and not a bit changed on the way."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import parity
from configs import BadInput, Model, preset
from configs.llama import llama
from configs.spec import Rope, Run, to_json
from jaxmodel import axes, checkpoint
from parity import bridge, table
from parity.convert import convert, hashes
from parity.source import open_source
from parity.tensors import Tensor, backward, forward
from parity.writers import write_safetensors
from tests.folders import bits, edit_config, hf_folder, hf_model, store, stored
from tests.kit import torch_model

DTYPES = ("float32", "bfloat16")
LAYOUTS = ("scan", "unroll")


def spec_of(pairs: str = "half", tied: bool = False, layers: int = 3) -> Model:
    """Sizes of their own on every axis."""
    return llama(
        vocab=23, d=24, layers=layers, heads=6, kv=2, hidden=20, max_len=32, base=500.0,
        pairs=pairs, eps=1e-5, tied=tied, width=10,
    )  # fmt: skip


def torch_state(spec: Model, dtype: str, seed: int = 0) -> dict[str, torch.Tensor]:
    model = torch_model(spec, seed=seed)
    return {k: v.to(getattr(torch, dtype)) for k, v in model.state_dict().items()}


def pt_file(path: Path, spec: Model, state: dict[str, torch.Tensor]) -> Path:
    """A .pt of ours, as anybody could write it."""
    torch.save({"format": 1, "spec": to_json(spec), "state": state}, path)
    return path


def digests(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """sha256 of every tensor's bytes, without our code."""
    return {
        name: hashlib.sha256(bytes(value.contiguous().view(torch.uint8).numpy())).hexdigest()
        for name, value in state.items()
    }


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- round trips


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", ["adjacent", "half"])
@pytest.mark.parametrize("tied", [True, False])
def test_torch_to_jax_to_torch(
    tmp_path: Path, layout: str, dtype: str, pairs: str, tied: bool
) -> None:
    spec = spec_of(pairs, tied)
    state = torch_state(spec, dtype)
    there = convert(pt_file(tmp_path / "a.pt", spec, state), tmp_path / "jax", layout=layout)
    back = convert(tmp_path / "jax", tmp_path / "b.pt", "torch")
    assert there["sha256"] == back["sha256"] == digests(state)
    again = torch.load(tmp_path / "b.pt", weights_only=True)
    assert again["spec"] == to_json(spec)
    assert digests(again["state"]) == digests(state)
    assert {k: (v.dtype, v.shape) for k, v in again["state"].items()} == {
        k: (v.dtype, v.shape) for k, v in state.items()
    }
    saved = checkpoint.describe(tmp_path / "jax")
    assert (saved.spec, saved.layout, saved.step) == (spec, layout, 0)
    assert {str(x.dtype) for x in saved.shapes.values()} == {dtype}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_hf_to_jax_to_hf(tmp_path: Path, layout: str, dtype: str, tied: bool) -> None:
    """Byte for byte the file that transformers wrote, and transformers misses nothing in it."""
    source = hf_folder(tmp_path / "a", dtype, tied=tied)
    there = convert(source, tmp_path / "jax", "jax", layout=layout)
    back = convert(tmp_path / "jax", tmp_path / "b", "hf")
    assert there["sha256"] == back["sha256"]
    whole = [(tmp_path / f / "model.safetensors").read_bytes() for f in "ab"]
    assert whole[0] == whole[1]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", output_loading_info=True
    )
    assert not any(info.values()), info
    expected = hf_model(dtype, tied=tied).state_dict()
    assert model.dtype == getattr(torch, dtype)
    assert digests(model.state_dict()) == digests(expected)
    for key in ("bos_token_id", "eos_token_id", "rope_parameters", "head_dim"):
        assert getattr(model.config, key) == getattr(hf_model(tied=tied).config, key)
    theirs = (source / "generation_config.json").read_bytes()
    assert (tmp_path / "b" / "generation_config.json").read_bytes() == theirs


def half_split(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of adjacent pairs in half-split order, as Meta-to-HF scripts put them."""
    rows = [h * 10 + c for h in range(heads) for c in (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)]
    return w[rows]


def test_the_other_pairing_is_the_same_model_in_transformers_too(tmp_path: Path) -> None:
    """Case 19. In float64 both pairings agree to rounding once rows are reordered, and differ
    beyond position 0 if they are not; transformers errs as torchref does in float32."""
    spec, turned = spec_of("adjacent"), spec_of("half")
    model = torch_model(spec)
    state = model.state_dict()
    heads = {"q": 6, "k": 2}
    moved = {
        name: half_split(w, heads[name.split(".")[3]]) if ".q." in name or ".k." in name else w
        for name, w in state.items()
    }
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 23, (2, 32)))

    def run(spec: Model, state: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return torch_model(spec, {k: v.numpy() for k, v in state.items()})(ids)

    def apart(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(torch.linalg.norm(a.double() - b) / torch.linalg.norm(b))

    truth, same, other = run(spec, state), run(turned, moved), run(turned, state)
    assert apart(same, truth) < 1e-13
    assert apart(other[:, 0], truth[:, 0]) < 1e-13
    assert apart(other[:, 1:], truth[:, 1:]) > 0.1

    one = convert(pt_file(tmp_path / "a.pt", spec, state), tmp_path / "a", "hf")
    two = convert(pt_file(tmp_path / "b.pt", turned, moved), tmp_path / "b", "hf")
    assert bits(stored(tmp_path / "a")) == bits(stored(tmp_path / "b"))
    assert "reordered from adjacent to half rotary pairs" in "".join(one["notes"])
    assert not two["notes"]
    assert open_source(tmp_path / "a").spec == turned

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        assert apart(theirs(ids).logits, truth) <= 2 * apart(model.float()(ids), truth)


def test_every_way_round_gives_the_same_hashes(tmp_path: Path) -> None:
    """HF -> jax scan -> torch -> jax unroll -> HF shards -> HF, and the hashes from outside."""
    source = hf_folder(tmp_path / "hf", "bfloat16", max_shard_size="8KB")
    steps: list[tuple[str, str, dict[str, Any]]] = [
        ("one", "jax", {}),
        ("two.pt", "torch", {}),
        ("three", "jax", {"layout": "unroll"}),
        ("four", "hf", {"shard": 8_000}),
        ("five", "hf", {}),
    ]
    last, seen = source, []
    for name, to, more in steps:
        seen.append(convert(last, tmp_path / name, to, **more)["sha256"])
        last = tmp_path / name
    assert all(one == seen[0] for one in seen)
    assert bits(stored(tmp_path / "four")) == bits(stored(tmp_path / "five"))
    assert bits(stored(tmp_path / "five")) == bits(stored(source))
    shards = sorted(p.name for p in (tmp_path / "four").glob("*.safetensors"))
    index = json.loads((tmp_path / "four" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == shards
    assert all((tmp_path / "four" / s).stat().st_size < 11_000 for s in shards)
    total = sum(x.nbytes for x in stored(source).values())
    assert index["metadata"]["total_size"] == total
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "four")
    assert digests(theirs.state_dict()) == digests(hf_model("bfloat16").state_dict())


def test_each_layer_lands_in_its_own_slot(tmp_path: Path) -> None:
    """Case 29: layer i stamped with the value i, and i found in slot i of the stack."""
    folder = hf_folder(tmp_path / "hf")
    stamped = {
        name: np.full_like(x, int(name.split(".")[2]) if ".layers." in name else 9)
        for name, x in stored(folder).items()
    }
    store(folder, stamped)
    convert(folder, tmp_path / "jax")
    for path, x in checkpoint.read(tmp_path / "jax").items():
        for i in range(3 if path.startswith("stack/") else 0):
            assert (x[i] == i).all(), path
        assert path.startswith("stack/") or (x == 9).all()
    convert(tmp_path / "jax", tmp_path / "back", "hf")
    assert bits(stored(tmp_path / "back")) == bits(stamped)


def test_a_pattern_of_blocks_with_a_remainder(tmp_path: Path) -> None:
    """Case 29: seven layers as two threes and one, each stamped, both layouts."""
    one = spec_of(layers=1)
    block = one.layers[0]
    runs = (Run(blocks=(block,) * 3, times=2), Run(blocks=(block,), times=1))
    spec = replace(one, runs=runs)
    state = {
        name: torch.full_like(x, float(name.split(".")[1]) if "layers." in name else 9.0)
        for name, x in torch_state(spec, "float32").items()
    }
    source = pt_file(tmp_path / "a.pt", spec, state)
    convert(source, tmp_path / "jax")
    read = checkpoint.read(tmp_path / "jax")
    for run, at, layers in [(0, 0, [0, 3]), (0, 1, [1, 4]), (0, 2, [2, 5]), (1, 0, [6])]:
        stack = read[f"stack/runs/{run}/{at}/ffn/up"]
        assert [x.item() for x in stack[:, 0, 0]] == layers
    convert(tmp_path / "jax", tmp_path / "b.pt", "torch")
    assert digests(torch.load(tmp_path / "b.pt")["state"]) == digests(state)
    convert(source, tmp_path / "flat", layout="unroll")
    assert hashes(open_source(tmp_path / "flat").tensors) == digests(state)


@given(
    st.tuples(*[st.integers(1, 4)] * 6),
    st.sampled_from(["adjacent", "half"]),
    st.booleans(),
    st.sampled_from(LAYOUTS),
)
def test_the_table_comes_back_for_any_sizes(
    sizes: tuple[int, ...], pairs: str, tied: bool, layout: str
) -> None:
    kv, groups, half, d, hidden, layers = sizes
    spec = llama(
        vocab=5, d=d, layers=layers, heads=kv * groups, kv=kv, hidden=hidden, max_len=8,
        base=10.0, pairs=pairs, eps=0.0, tied=tied, width=2 * half,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    rows = table.rows(spec, layout)
    shapes = {n: m.shape_there for row in rows for m in row.moves() for n in m.there}
    there = {n: Tensor.of(rng.standard_normal(s)) for n, s in shapes.items()}
    here = forward(rows, there, "the test")
    back = backward(rows, here, "the test")
    assert bits({n: t.read() for n, t in back.items()}) == bits(
        {n: t.read() for n, t in there.items()}
    )
    for name, tensor in here.items():
        assert tensor.read().shape == tensor.shape, name


# --- the report, the plan and the files


def test_a_dry_run_proves_and_writes_nothing(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", tied=True)
    report = convert(folder, tmp_path / "jax", dry_run=True)
    assert entries(tmp_path) == {"hf"}
    json.dumps(report)
    plan = {step["target"]: step for step in report["plan"]}
    q = plan["stack/runs/0/0/attn/q"]
    assert q["source"] == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)]
    assert q["torchref"] == [f"layers.{i}.attn.q.weight" for i in range(3)]
    assert (q["pattern"], q["shape"], q["dtype"]) == ("(n h) d -> d n h", [3, 24, 6, 10], "float32")
    used = [name for step in report["plan"] for name in step["source"]]
    assert sorted(used) == sorted(stored(folder))
    convert(folder, tmp_path / "jax")
    back = convert(tmp_path / "jax", tmp_path / "out", "hf", dry_run=True)["plan"]
    assert sorted(step["target"] for step in back) == sorted(stored(folder))
    made = {step["target"]: step for step in back}
    gate = made["model.layers.1.mlp.gate_proj.weight"]
    assert (gate["source"], gate["shape"]) == (["stack/runs/0/0/ffn/gate"], [20, 24])
    torch_plan = convert(folder, tmp_path / "x.pt", "torch", dry_run=True)["plan"]
    assert {s["target"] for s in torch_plan} == set(open_source(folder).tensors)
    assert entries(tmp_path) == {"hf", "jax"}


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "bfloat16", tied=True)
    steps: list[str] = []
    report = convert(folder, tmp_path / "jax", progress=steps.append)
    json.dumps(report)
    files = stored(folder)
    assert report["tensors"] == len(files) == len(report["sha256"])
    assert report["bytes"] == sum(x.nbytes for x in files.values())
    assert (report["dtype"], report["notes"]) == ("bfloat16", [])
    assert report["spec"] == to_json(open_source(folder).spec)
    assert report["source"]["dialect"] == "hf-llama"
    assert report["target"] == {"path": str(tmp_path / "jax"), "to": "jax", "layout": "scan"}
    embed = files["model.embed_tokens.weight"].tobytes()
    assert report["sha256"]["embed.weight"] == hashlib.sha256(embed).hexdigest()
    assert hashes(open_source(folder).tensors) == report["sha256"]
    assert f"{len(files)} of {len(files)} tensors" in steps


def test_what_travels_along_arrives_at_the_end(tmp_path: Path) -> None:
    """Tokenizer, templates, several end tokens (13), id 0 (17): HF -> jax -> torch -> HF."""
    folder = hf_folder(tmp_path / "hf")
    edit_config(folder, bos_token_id=0, eos_token_id=7, pad_token_id=None)
    files = {
        "tokenizer.json": b'{"a": 1}\n',
        "tokenizer.model": bytes(range(256)),
        "chat_template.jinja": "{{ 'é' }}".encode(),
        "generation_config.json": b'{"eos_token_id": [7, 8, 9]}',
        "empty": b"",
        "merges.txt": b"",
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    convert(folder, tmp_path / "jax")
    convert(tmp_path / "jax", tmp_path / "x.pt", "torch")
    convert(tmp_path / "x.pt", tmp_path / "out", "hf")
    del files["empty"]
    for name, data in files.items():
        assert (tmp_path / "out" / name).read_bytes() == data, name
    assert entries(tmp_path / "out") == {*files, "config.json", "model.safetensors"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 7, None)
    for name in ("jax", "x.pt", "out"):
        assert open_source(tmp_path / name).eos == (7, 8, 9)


@pytest.mark.parametrize("dtypes", [["F32"], ["BF16", "F32", "F16", "F64"]])
def test_our_safetensors_are_the_librarys_byte_for_byte(tmp_path: Path, dtypes: list[str]) -> None:
    numpy = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F64": np.float64}
    rng = np.random.default_rng(0)
    arrays = {
        f"{name}.{i}": rng.standard_normal((i + 1, 3)).astype(numpy[dtype])
        for i, dtype in enumerate(dtypes * 3)
        for name in ("z", "a", "é")
    }
    path = tmp_path / "ours.safetensors"
    write_safetensors({path: list(arrays)}, {n: Tensor.of(x) for n, x in arrays.items()})
    safetensors.numpy.save_file(arrays, tmp_path / "lib.safetensors", metadata={"format": "pt"})
    assert path.read_bytes() == (tmp_path / "lib.safetensors").read_bytes()


def test_writing_a_folder_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Peak memory, measured: a few times the largest tensor, far below the model."""
    spec = llama(
        vocab=64, d=128, layers=24, heads=4, kv=4, hidden=256, max_len=8, base=500.0,
        pairs="adjacent", eps=1e-5, tied=True,
    )  # fmt: skip
    state = torch_state(spec, "float32")
    source = pt_file(tmp_path / "a.pt", spec, state)
    largest = max(x.numel() * 4 for x in state.values())
    total = sum(x.numel() * 4 for x in state.values())
    convert(source, tmp_path / "warm", "hf")
    tracemalloc.start()
    convert(source, tmp_path / "hf", "hf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 90 * largest > 0
    assert peak < 12 * largest


# --- loading


@pytest.mark.parametrize("layout", LAYOUTS)
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
        model = parity.load(tmp_path / name, layout=layout)
        arrays = {k: np.asarray(v) for k, v in axes.arrays(model).items()}
        all_arrays.append(bits(arrays))
        got = np.asarray(model(ids), np.float64)
        assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-5
    assert all_arrays[0] == all_arrays[1] == all_arrays[2]


def test_load_takes_the_dtype_that_it_is_asked_for(golden: Any) -> None:
    with jax.enable_x64(False), pytest.raises(BadInput, match="JAX would narrow"):
        parity.load(golden.path)
    model = parity.load(golden.path, dtype="bfloat16")
    assert {str(x.dtype) for x in axes.arrays(model).values()} == {"bfloat16"}
    with jax.enable_x64(True):
        model = parity.load(golden.path)
        got = np.asarray(model(golden.data["ids"]))
    expected = golden.data["logits"]
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-13


def test_load_of_a_preset_is_the_model_itself() -> None:
    from flax import nnx

    from jaxmodel import Decoder

    model = Decoder(preset("smollm2-tiny"), rngs=nnx.Rngs(0))
    expected = {k: np.asarray(v) for k, v in axes.arrays(model).items()}
    got = {k: np.asarray(v) for k, v in axes.arrays(parity.load("smollm2-tiny")).items()}
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
        with pytest.raises(BadInput, match="exists and is not an empty folder"):
            convert(folder, dst, to, dry_run=dry)
    assert (dst / "precious").read_text() == "mine"
    (dst / "precious").unlink()
    convert(folder, dst, to)  # an empty folder is as good as none
    assert open_source(dst).spec == open_source(folder).spec
    with pytest.raises(BadInput, match="exists"):
        convert(folder, dst, to)


def test_a_target_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no target 'gguf'; known: jax, hf, torch"):
        convert("smollm2-tiny", tmp_path / "x", "gguf")
    with pytest.raises(BadInput, match="no layout 'stack'"):
        convert("smollm2-tiny", tmp_path / "x", layout="stack")
    with pytest.raises(BadInput, match=r"name it .*x\.pt"):
        convert("smollm2-tiny", tmp_path / "x", "torch")
    spec = spec_of()
    no_rope = replace(spec.layers[0], attn=replace(spec.layers[0].attn, rope=None))
    bad = replace(spec, runs=(Run(blocks=(no_rope,), times=1),))
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
from parity.convert import convert

def progress(step):
    if step.startswith("20 of"):
        os.kill(os.getpid(), signal.SIGKILL)

convert(sys.argv[1], sys.argv[2], "hf", progress=progress)
"""


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": str(root)},
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
import jaxmodel, train, parity
from configs import BadInput
from parity.convert import convert
from parity.source import open_source

hf, ours, pt, out = sys.argv[1:]
first = convert(hf, out + "/jax")
again = convert(out + "/jax", out + "/hf", "hf")
assert first["sha256"] == again["sha256"]
parity.load(hf)(([[1, 2, 3]]))
parity.load(ours, layout="unroll")
for act in (lambda: open_source(pt), lambda: convert(hf, out + "/x.pt", "torch")):
    try:
        act()
    except BadInput as error:
        assert "torch" in str(error), error
    else:
        raise AssertionError("torch came from somewhere")
print("well")
"""


@pytest.mark.parametrize("how", ["finder", "None"])
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("spec"), "does not say what model its tensors are of"),
        (lambda d: d.update(format=2), "format 2 is not known"),
        (lambda d: d.update(optimizer={}), "holds what nothing would read: optimizer"),
        (lambda d: d.update(files=[1]), "files must hold byte tensors"),
        (lambda d: d.update(files={"x": 1}), "files must hold byte tensors"),
        (lambda d: d["spec"].update(d=25), "embed.weight: shape .* expected .23, 25."),
        (lambda d: d["spec"].update(width=3), "width: Unexpected keyword argument"),
        (lambda d: d["state"].pop("norm.weight"), "norm.weight: missing"),
        (lambda d: d["state"].update(more=torch.ones(1)), "more: unexpected"),
        (lambda d: d["state"].update({"norm.weight": 3}), "is not a plain state dict"),
    ],
)
def test_a_pt_file_that_is_not_ours_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    spec = spec_of()
    data = {"format": 1, "spec": to_json(spec), "state": torch_state(spec, "float32")}
    change(data)
    torch.save(data, tmp_path / "a.pt")
    with pytest.raises(BadInput, match=f"(?s){message}"):
        open_source(tmp_path / "a.pt")


def test_the_newest_step_of_a_run_is_taken(tmp_path: Path) -> None:
    """A training run's folder: its last complete step."""
    from orbax.checkpoint import v1 as ocp

    from jaxmodel.checkpoint import PARAMS, storage, write

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
    there = bridge.to_torch(raw)
    assert there.dtype == torch.bfloat16
    np.testing.assert_array_equal(bridge.to_numpy(there).view(np.uint16), raw.view(np.uint16))


def test_a_rope_of_another_pairing_has_its_own_name_in_the_report(tmp_path: Path) -> None:
    spec = spec_of("adjacent")
    assert isinstance(spec.layers[0].attn.rope, Rope)
    source = pt_file(tmp_path / "a.pt", spec, torch_state(spec, "float32"))
    plan = convert(source, tmp_path / "hf", "hf", dry_run=True)["plan"]
    patterns = {s["target"].removeprefix("model.layers.0."): s["pattern"] for s in plan}
    assert patterns["self_attn.q_proj.weight"] == "(n c p) d -> (n p c) d"
    assert patterns["self_attn.k_proj.weight"] == "(k c p) d -> (k p c) d"
    assert patterns["self_attn.v_proj.weight"] == "(k h) d -> (k h) d"
