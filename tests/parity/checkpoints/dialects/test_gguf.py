"""GGUF files of qwen2, qwen3 and gemma3, made as llama.cpp makes them, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from jaxtwin.configs import RMS, BadInput, Linear, Rope
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.dialects import ARCHITECTURES
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.sides import runs, witness
from jaxtwin.parity.sides.inputs import Inputs
from jaxtwin.parity.sides.outcome import Outcome
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, forward, moves

# Every size is of its own, so that no swapped axis goes unseen; 4 heads of 8 or 10 are not 24.
SIZES = {
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}


@dataclass(frozen=True)
class Kind:
    """An architecture: how transformers makes a tiny one, and what llama.cpp writes of it."""

    make: Callable[[], Any]
    settings: Mapping[str, Any]
    shift: float = 0.0  # what is added to the scales of norms


def qwen2() -> Any:
    config = transformers.Qwen2Config(
        **SIZES, num_hidden_layers=2, rope_parameters=PLAIN, tie_word_embeddings=False
    )
    return transformers.Qwen2ForCausalLM(config)


def qwen3() -> Any:
    config = transformers.Qwen3Config(
        **SIZES, num_hidden_layers=2, head_dim=8, rope_parameters=PLAIN, tie_word_embeddings=True
    )
    return transformers.Qwen3ForCausalLM(config)


def gemma3() -> Any:
    """Seven layers: the sixth sees all, from positions divided by 8; the others a window of 5."""
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 700.0}
    config = transformers.Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=7,
        head_dim=10,
        query_pre_attn_scalar=10,
        sliding_window=5,
        pad_token_id=None,  # torch gives the row of a padding token no gradient
        rope_parameters={"sliding_attention": PLAIN, "full_attention": linear},
    )
    return transformers.Gemma3ForCausalLM(config)


WIDE = {"attention.key_length": 8, "attention.value_length": 8}
GEMMA = {
    "attention.key_length": 10,
    "attention.value_length": 10,
    "attention.sliding_window": 5,
    "rope.freq_base": 700.0,
    "rope.freq_base_swa": 500.0,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
}
KINDS = {
    "qwen2": Kind(qwen2, {}),
    "qwen3": Kind(qwen3, WIDE),
    "gemma3": Kind(gemma3, GEMMA, shift=1.0),
}


def settings(kind: str, **changes: Any) -> dict[str, Any]:
    """The settings of a file, with `changes` (... removes one), without the architecture."""
    layers = KINDS[kind].make().config.num_hidden_layers
    out: dict[str, Any] = {
        "block_count": layers,
        "context_length": 64,
        "embedding_length": 24,
        "feed_forward_length": 28,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500.0,
        "vocab_size": 29,
        **KINDS[kind].settings,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return {key: value for key, value in out.items() if value is not ...}


def lively(kind: str) -> Any:
    """transformers' model with random values; scales around one, in steps that 1 + w keeps."""
    torch.manual_seed(0)
    model = KINDS[kind].make()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                around = 0.0 if KINDS[kind].shift else 1.0
                param.copy_(torch.round(param.normal_(around, 0.3) * 1024) / 1024)
            else:
                param.normal_(0, 1.5 * param.shape[1] ** -0.5)
    model.set_attn_implementation("eager")
    return model.eval()


def name_of(kind: str, published: str) -> str:
    """The gguf package's own name for one of transformers'."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    stem, _, what = published.rpartition(".")
    return f"{gguf.get_tensor_name_map(arch, 9).get_name(stem)}.{what}"


def put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        kinds.get(type(value), writer.add_string)(key, value)


def write(path: Path, kind: str, model: Any, **changes: Any) -> Path:
    """The model as llama.cpp's converter stores it: names, settings, and 1 + w in a Gemma."""
    writer = gguf.GGUFWriter(path, kind)
    for key, value in settings(kind, **changes).items():
        put(writer, f"{kind}.{key}", value)
    for name, param in model.named_parameters():  # a tied head is named once
        shift = KINDS[kind].shift if name.endswith("norm.weight") else 0.0
        writer.add_tensor(name_of(kind, name), param.detach().numpy() + np.float32(shift))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def theirs(kind: str, model: Any, rows: list[Row]) -> list[Row]:
    """The dialect's rows to transformers' names: pairs are half-split there too."""
    names = {name_of(kind, name): name for name, _ in model.named_parameters()}
    return [
        replace(row, dst=move.dst, src=names[move.src[0]], holes={})
        for row in rows
        for move in row.moves()
    ]


def run(model: Any, rows: list[Row], batch: Inputs) -> Outcome:
    """transformers' own forward and backward, its masks written out: causal, and with a window."""
    t = batch.ids.shape[1]
    query_key_distance = np.arange(t)[:, None] - np.arange(t)
    seen = (query_key_distance >= 0) & (batch.segments[:, :, None] == batch.segments[:, None, :])
    near = seen & (query_key_distance < (getattr(model.config, "sliding_window", None) or t))
    lowest = np.finfo(np.float32).min
    global_, local = (
        torch.from_numpy(np.where(x[:, None], np.float32(0), lowest)) for x in (seen, near)
    )
    both = {"full_attention": global_, "sliding_attention": local}
    logits = model(
        torch.from_numpy(batch.ids),
        attention_mask=both,
        position_ids=torch.from_numpy(batch.positions),
        use_cache=False,
    ).logits
    nll = runs.torch_nll(logits, batch)
    nll.mean().backward()
    grads = {n: Tensor.of(p.grad.double().numpy()) for n, p in model.named_parameters()}
    found = {n: grad.read() for n, grad in forward(rows, grads, "the test").items()}
    wide = [x.detach().double().numpy() for x in (logits, nll)]
    return Outcome(wide[0], wide[1], found)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "qwen2" else pytest.mark.slow) for k in KINDS]
)
def test_a_file_computes_what_transformers_does(tmp_path: Path, kind: str) -> None:
    """Logits, losses and every gradient of the model that it was made of, within the budget."""
    model = lively(kind)
    source = open_source(write(tmp_path / "x.gguf", kind, model))
    rows = theirs(kind, model, ARCHITECTURES[kind][0].rows(source.spec))
    report = decoder_check.check(
        source.spec,
        source.tensors,
        dtypes=("float32",),
        tokens=40,
        witness=lambda batch: run(model, rows, batch),
    )
    assert report.equal, [c for c in report.checks if not c.ok]
    assert sum(c.name.startswith("transformers: ") for c in report.checks) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_moves_and_no_row(tmp_path: Path, kind: str) -> None:
    """Q and K rows, biases too, are in Hugging Face's order; only scales are 1 + w in a Gemma."""
    model = lively(kind)
    source = open_source(write(tmp_path / "x.gguf", kind, model))
    batch = {name: param.detach().numpy() for name, param in model.named_parameters()}
    for move in moves(theirs(kind, model, ARCHITECTURES[kind][0].rows(source.spec))):
        shift = KINDS[kind].shift if move.src[0].endswith("norm.weight") else 0
        np.testing.assert_array_equal(
            source.tensors[move.dst].read(), batch[move.src[0]] + np.float32(shift)
        )


def read(kind: str, names: tuple[str, ...] = (), **changes: Any) -> Any:
    """The spec of a file with such settings, and the notes."""
    notes: list[str] = []
    data = {f"{kind}.{key}": value for key, value in settings(kind, **changes).items()}
    return ARCHITECTURES[kind][1](data, names, "the test", notes), notes


def test_qwen_settings() -> None:
    two, three = read("qwen2", ("output.weight",))[0], read("qwen3")[0]
    assert (two.tied, three.tied) == (False, True)
    assert (two.layers[0].attn.width, three.layers[0].attn.width) == (6, 8)  # 24 / 4, and as said
    assert (two.layers[0].attn.bias, three.layers[0].attn.bias) == (True, False)
    assert two.layers[0].attn.qk_norm is None
    assert three.layers[0].attn.qk_norm.norm == three.norm == RMS(eps=1e-5)
    assert three.layers[0].attn.rope == Rope(base=500.0, pairs="half")


def test_gemma3_settings() -> None:
    """Case 57: local layers have a base of their own and no scaling, the sixth positions / 8."""
    spec, notes = read("gemma3")
    local, global_ = Rope(base=500.0, pairs="half"), Rope(base=700.0, pairs="half")
    global_ = replace(global_, scaling=Linear(factor=8.0))
    assert [b.attn.rope for b in spec.layers] == [local] * 5 + [global_] + [local]
    assert [b.attn.window for b in spec.layers] == [5] * 5 + [None] + [5]
    assert {b.attn.scale for b in spec.layers} == {None}
    assert spec.embed_scale == 24**0.5
    assert [n.split(":")[0] for n in notes if n.startswith("no ")] == [
        "no attention.sliding_window_pattern"
    ]


def test_gemma3_what_a_file_leaves_out() -> None:
    """Deliberately as llama.cpp, and said: base 10,000, every sixth layer, and the 27B's scale."""
    unscaled = {"rope__scaling__type": ..., "rope__scaling__factor": ...}
    spec, notes = read("gemma3", rope__freq_base_swa=..., **unscaled)
    assert spec.layers[0].attn.rope.base == 10_000.0
    assert spec.layers[5].attn.rope == Rope(base=700.0, pairs="half")
    assert any("local layers have base 10000.0, as in llama.cpp" in note for note in notes)
    spec, notes = read("gemma3", block_count=62)
    assert {b.attn.scale for b in spec.layers} == {6**-0.5}
    assert any("62 layers: scores are scaled by (d / heads)^-0.5" in note for note in notes)


@pytest.mark.parametrize("pattern", [3, [True, True, False, True, True, False, True]])
def test_gemma3_layers_by_a_stated_pattern(pattern: object) -> None:
    spec, notes = read("gemma3", attention__sliding_window_pattern=pattern)
    assert [b.attn.window for b in spec.layers] == [5, 5, None, 5, 5, None, 5]
    assert not any("sliding_window_pattern" in note for note in notes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen2", {"rope__scaling__type": "yarn"}, 'rope.scaling.type: "yarn" is not supported'),
        ("qwen3", {"rope__dimension_count": 4}, "head width 8 expected throughout"),
        ("qwen3", {"expert_count": 128}, "expert_count: 128 is not supported"),
        ("qwen3", {"pooling_type": 3}, "pooling_type: 3 is not supported, only 0"),
        ("gemma3", {"attention__sliding_window": ...}, "attention.sliding_window: missing"),
        ("gemma3", {"rope__scaling__type": "yarn"}, "type 'yarn' with factor 8.0 is not supported"),
        ("gemma3", {"rope__scaling__type": "none"}, "type 'none' with factor 8.0"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: unknown setting"),
        (
            "gemma3",
            {"attention__sliding_window_pattern": [True] * 5 + [False, False]},
            "is no pattern that repeats",
        ),
        ("gemma3", {"attention__sliding_window_pattern": 0}, "must be a positive integer"),
        (
            "gemma3",
            {"attention__sliding_window_pattern": 2**31, "block_count": 2**31},
            "is more than 10000 layers",
        ),
        ("gemma3", {"block_count": 2**31}, "more than 10000 repetitions"),
        ("qwen3", {"block_count": 2**31}, "more than 10000 repetitions"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        read(kind, **changes)


def test_the_scale_of_a_norm_is_what_is_stored(tmp_path: Path) -> None:
    """Case 62: 1 + w is there already; one more would make the output nearly independent of x.

    The value is kept bit by bit through a conversion of ours, and a Hugging Face file, which would
    need w again, is refused.
    """
    model = lively("gemma3")
    with torch.no_grad():
        model.model.norm.weight[0] = 8.6856
    path = write(tmp_path / "x.gguf", "gemma3", model)
    stored = np.float32(8.6856) + np.float32(1)
    source = open_source(path)
    norms = {b.pre_attn for b in source.spec.layers} | {source.spec.norm}
    assert norms == {RMS(eps=1e-5, offset=False, cast="after")}
    assert source.tensors["norm.weight"].read()[0] == stored
    assert any("stored as 1 + w and kept so" in note for note in source.notes)
    convert(path, tmp_path / "x.pt", "torch")
    again = open_source(tmp_path / "x.pt")
    assert again.tensors["norm.weight"].read()[0] == stored
    assert again.spec == source.spec
    for src in (path, tmp_path / "x.pt"):
        with pytest.raises(BadInput):
            convert(src, tmp_path / "hf", "hf")
        assert not (tmp_path / "hf").exists()


def test_a_qwen_without_biases_is_refused(tmp_path: Path) -> None:
    """Case 79: biases that are not there are not taken to be zero."""
    model = lively("qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias = None
    path = write(tmp_path / "x.gguf", "qwen2", model)
    with pytest.raises(BadInput, match=r"blk\.0\.attn_k\.bias"):
        open_source(path)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_the_gguf_packages(kind: str) -> None:
    """Every tensor that the package knows of the architecture, but the buffer of frequencies."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    known = {gguf.TENSOR_NAMES[t].format(bid=0) for t in gguf.MODEL_TENSORS[arch]} - {"rope_freqs"}
    spec, _ = read(kind, ("output.weight",))
    rows = ARCHITECTURES[kind][0].rows(spec)
    ours = {m.src[0].rpartition(".")[0] for m in moves(rows)}
    assert {name for name in ours if not name.startswith("blk.") or ".0." in name} == known


def test_a_witness_that_reads_another_model_does_not_take_part(tmp_path: Path) -> None:
    """transformers leaves settings of a GGUF unread: a head's width, a second base, a scaling."""
    notes = {}
    for kind in KINDS:
        source = open_source(write(tmp_path / f"{kind}.gguf", kind, lively(kind)))
        run, notes[kind] = witness.find(source)
        assert (run is not None) == (kind == "qwen2")
    assert "read the same file itself" in notes["qwen2"]
    assert "expected layers.0.attn.width = 8, got 128" in notes["qwen3"]
    assert "expected layers.0.attn.rope.base = 500.0, got 10000.0" in notes["gemma3"]
