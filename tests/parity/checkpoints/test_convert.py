"""Round trips: through every format and layout and back, and not a bit changed on the way."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from jaxtwin import jaxmodel
from jaxtwin.configs import Model
from jaxtwin.configs.llama import llama
from jaxtwin.configs.spec import Run, to_json
from jaxtwin.jaxmodel import axes, checkpoint
from jaxtwin.parity.checkpoints.convert import convert, hashes
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.checkpoints.writers import write_safetensors
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensor, backward, forward
from jaxtwin.tests.helpers.folders import (
    bits,
    digests,
    edit_config,
    entries,
    hf_folder,
    hf_model,
    pt_file,
    spec_of,
    store,
    stored,
    torch_state,
)
from jaxtwin.tests.helpers.kit import torch_model

DTYPES = ("float32", "bfloat16")
LAYOUTS = ("scan", "unroll")


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
    file = pt_file(tmp_path / "a.pt", spec, state)
    src = convert(file, tmp_path / "jax", layout=layout, sha256=True)
    back = convert(tmp_path / "jax", tmp_path / "b.pt", "torch", sha256=True)
    assert src["sha256"] == back["sha256"] == digests(state)
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
    src = convert(source, tmp_path / "jax", "jax", layout=layout, sha256=True)
    back = convert(tmp_path / "jax", tmp_path / "b", "hf", sha256=True)
    assert src["sha256"] == back["sha256"]
    files = [(tmp_path / f / "model.safetensors").read_bytes() for f in "ab"]
    assert files[0] == files[1]
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

    reference, same, other = run(spec, state), run(turned, moved), run(turned, state)
    assert apart(same, reference) < 1e-13
    assert apart(other[:, 0], reference[:, 0]) < 1e-13
    assert apart(other[:, 1:], reference[:, 1:]) > 0.1

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
        assert apart(theirs(ids).logits, reference) <= 2 * apart(model.float()(ids), reference)


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
        seen.append(convert(last, tmp_path / name, to, **more, sha256=True)["sha256"])
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
    runs = (Run(blocks=(block,) * 3, repeats=2), Run(blocks=(block,), repeats=1))
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


def test_a_square_stack_has_its_layers_in_front(tmp_path: Path) -> None:
    """Case 30: four layers of width four, where another axis would do as well by its size."""
    spec = llama(
        vocab=4, d=4, layers=4, heads=1, kv=1, hidden=4, max_len=8, base=500.0, pairs="half",
        eps=1e-5, tied=False, width=4,
    )  # fmt: skip
    state = torch_state(spec, "float32")
    convert(pt_file(tmp_path / "a.pt", spec, state), tmp_path / "jax")
    read = checkpoint.read(tmp_path / "jax")
    letters = axes.letters(jaxmodel.abstract(spec, layout="scan"))
    for part in ("ffn/up", "ffn/gate", "ffn/down"):
        path = f"stack/runs/0/0/{part}"
        assert letters[path].split()[0] == "l"
        due = [state[f"layers.{i}.{part.replace('/', '.')}.weight"].numpy().T for i in range(4)]
        np.testing.assert_array_equal(read[path], np.stack(due))
    norms = [state[f"layers.{i}.pre_ffn.weight"].numpy() for i in range(4)]
    np.testing.assert_array_equal(read["stack/runs/0/0/pre_ffn/weight"], np.stack(norms))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_export_has_every_tensor_and_says_its_dtype(tmp_path: Path, dtype: str) -> None:
    """Case 31: the embedding too, to the byte, and the dtype in the config that is in the file."""
    state = torch_state(spec_of(tied=False), dtype)
    convert(pt_file(tmp_path / "a.pt", spec_of(tied=False), state), tmp_path / "hf", "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    assert sorted(digests(model.state_dict()).values()) == sorted(digests(state).values())
    embed = model.get_input_embeddings().weight.detach()
    assert digests({"": embed}) == digests({"": state["embed.weight"]})


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
    rows = decoder_table.rows(spec, layout)
    shapes = {n: m.src_shape for row in rows for m in row.moves() for n in m.src}
    src = {n: Tensor.of(rng.standard_normal(s)) for n, s in shapes.items()}
    dst = forward(rows, src, "the test")
    back = backward(rows, dst, "the test")
    assert bits({n: t.read() for n, t in back.items()}) == bits(
        {n: t.read() for n, t in src.items()}
    )
    for name, tensor in dst.items():
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
    sources = [name for step in report["plan"] for name in step["source"]]
    assert sorted(sources) == sorted(stored(folder))
    convert(folder, tmp_path / "jax")
    back = convert(tmp_path / "jax", tmp_path / "out", "hf", dry_run=True)["plan"]
    assert sorted(step["target"] for step in back) == sorted(stored(folder))
    by_target = {step["target"]: step for step in back}
    gate = by_target["model.layers.1.mlp.gate_proj.weight"]
    assert (gate["source"], gate["shape"]) == (["stack/runs/0/0/ffn/gate"], [20, 24])
    torch_plan = convert(folder, tmp_path / "x.pt", "torch", dry_run=True)["plan"]
    assert {s["target"] for s in torch_plan} == set(open_source(folder).tensors)
    assert entries(tmp_path) == {"hf", "jax"}


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "bfloat16", tied=True)
    steps: list[str] = []
    report = convert(folder, tmp_path / "jax", sha256=True, progress=steps.append)
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
        vocab=64, d=256, layers=12, heads=4, kv=4, hidden=512, max_len=8, base=500.0,
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
    assert total > 50 * largest > 0
    assert peak < 2 * largest
