"""Meta's own Llama files, made of transformers' models by Meta's rules, and what they leave out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxtwin import jaxmodel, torchref
from jaxtwin.configs import BadInput, Llama3, Rope, preset
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.dialects import from_meta
from jaxtwin.parity.checkpoints.dialects.meta_llama import ffn_width
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.compare.tolerances import FORWARD
from jaxtwin.parity.sides import runs
from jaxtwin.tests.helpers import kit
from jaxtwin.tests.helpers.folders import stored
from jaxtwin.tests.helpers.meta_files import PARAMS, PUBLISHED, model, state_of

CUT = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}


def folder(
    at: Path,
    state: dict[str, torch.Tensor],
    parts: int = 1,
    embedding: int = 1,
    **changes: Any,
) -> Path:
    """The tensors in so many files, cut as Meta's parallel layers are; ... removes a setting."""
    at.mkdir()
    params = {k: v for k, v in {**PARAMS, **changes}.items() if v is not ...}
    (at / "params.json").write_text(json.dumps(params))
    cut = {**CUT, "tok_embeddings": embedding}
    for i in range(parts):
        held = {}
        for name, value in state.items():
            axis = cut.get(name.split(".")[-2]) if value.ndim == 2 else None
            part = value if axis is None else value.chunk(parts, axis)[i]
            held[name] = part.clone()
        torch.save(held, at / f"consolidated.{i:02}.pth")
    return at


def meta_logits(state: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """What Meta's code computes: complex numbers turned, pairs of neighbours being one each."""
    w = {name: value.double() for name, value in state.items()}
    (b, t), n, k, h = ids.shape, 4, 2, 6
    frequency = 10_000.0 ** (-torch.arange(0, h, 2, dtype=torch.float64) / h)
    angle = torch.outer(torch.arange(t, dtype=torch.float64), frequency)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w[f"{name}.weight"]

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2)

    x = w["tok_embeddings.weight"][ids]
    for i in range(3):
        part = lambda x, name, i=i: x @ w[f"layers.{i}.{name}.weight"].T  # noqa: E731
        y = normed(x, f"layers.{i}.attention_norm")
        q = turned(part(y, "attention.wq").view(b, t, n, h))
        keys = turned(part(y, "attention.wk").view(b, t, k, h))
        values = part(y, "attention.wv").view(b, t, k, h)
        keys, values = (z.repeat_interleave(n // k, dim=2) for z in (keys, values))
        scores = torch.einsum("btnh,bsnh->bnts", q, keys) / h**0.5
        scores = scores + torch.full((t, t), -torch.inf, dtype=torch.float64).triu(1)
        mixed = torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), values).reshape(b, t, -1)
        x = x + part(mixed, "attention.wo")
        y = normed(x, f"layers.{i}.ffn_norm")
        gate = torch.nn.functional.silu(part(y, "feed_forward.w1"))
        x = x + part(gate * part(y, "feed_forward.w3"), "feed_forward.w2")
    return normed(x, "norm") @ w["output.weight"].T


def test_it_computes_what_metas_code_does(tmp_path: Path) -> None:
    """Cases 19 and 28: adjacent pairs; and the stored frequencies go, being those of the base."""
    state = state_of(model())
    frequency = 10_000.0 ** (-torch.arange(0, 6, 2).float() / 6)
    source = open_source(folder(tmp_path / "m", {**state, "rope.freqs": frequency}))
    ids = torch.randint(0, 32, (2, 17), generator=torch.Generator().manual_seed(1))
    ours = runs.torch_model(source.spec, source.tensors, "float64")(ids)
    want = meta_logits(state, ids)
    assert kit.apart(ours.detach().numpy(), want.numpy()) <= FORWARD
    assert any("1 stored rotary tables agree" in note for note in source.notes)
    assert (source.kind, source.dialect) == ("meta", "meta-llama")


def test_frequencies_of_another_base_are_refused(tmp_path: Path) -> None:
    frequency = 500_000.0 ** (-torch.arange(0, 6, 2).float() / 6)
    at = folder(tmp_path / "m", {**state_of(model()), "rope.freqs": frequency})
    with pytest.raises(BadInput, match=r"rotary frequencies stored in rope\.freqs"):
        open_source(at)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("parts", "embedding"), [(1, 1), (2, 1), (2, 0)])
def test_every_tensor_is_transformers_bit_for_bit(
    tmp_path: Path, parts: int, embedding: int, tied: bool
) -> None:
    """From one file and from two, the embedding cut along either axis; and out as HF's folder."""
    hf_model = model(tied=tied)
    at = folder(tmp_path / "m", state_of(hf_model), parts, embedding)
    source = open_source(at)
    assert source.spec.tied == tied
    assert any("2 tensor-parallel files" in note for note in source.notes) == (parts == 2)
    convert(source, tmp_path / "hf", "hf")
    want = {name: param.detach().numpy() for name, param in hf_model.named_parameters()}
    found = stored(tmp_path / "hf")
    assert found.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_head_that_is_left_out_is_the_embedding(tmp_path: Path) -> None:
    state = state_of(model())
    del state["output.weight"]
    assert open_source(folder(tmp_path / "m", state)).spec.tied


# --- params.json


def read(params: dict[str, Any], name: str = "llama3.1-8b", **changes: Any) -> Any:
    """The spec and notes of such settings, beside the tensors of that preset."""
    like, notes = preset(name), list[str]()
    shapes = {
        "tok_embeddings.weight": (like.vocab, like.d),
        "layers.0.feed_forward.w1.weight": (like.layers[0].ffn.hidden, like.d),
    }
    params = {k: v for k, v in {**params, **changes}.items() if v is not ...}
    return from_meta(params, shapes, like.tied, "params.json", notes), notes


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_params_are_the_preset(name: str) -> None:
    """Each release's own file; cases 11 and 12: widths by the rule, 8 in 3.1 and 32 in 3.2."""
    spec, notes = read(PUBLISHED[name], name)
    assert spec == preset(name)
    assert any(note.startswith("no max_seq_len: ") for note in notes)
    assert any("has no rope_theta" in note for note in notes) == name.startswith(
        ("llama-", "llama2")
    )
    assert any("vocab_size is -1: 32000" in note for note in notes) == (spec.vocab == 32_000)
    assert any("says no factor" in note for note in notes) == (spec.max_len == 131_072)


@pytest.mark.parametrize(
    ("dim", "multiplier", "multiple", "hidden"),
    [
        (4_096, 1, 256, 11_008),
        (4_096, 1.3, 1_024, 14_336),
        (8_192, 1.3, 4_096, 28_672),
        (2_048, 1.5, 256, 8_192),
        (4_096, None, 256, 11_008),
    ],
)
def test_the_feed_forwards_width(
    dim: int, multiplier: float | None, multiple: int, hidden: int
) -> None:
    """Case 11."""
    assert ffn_width(dim, multiplier, multiple) == hidden


def test_a_factor_that_the_file_gives_counts() -> None:
    """Case 12: the same file with 8 and with 32 turns otherwise."""
    found = {}
    for factor in (8.0, 32.0):
        spec, notes = read(PUBLISHED["llama3.1-8b"], rope_scaling_factor=factor)
        found[factor] = spec.layers[0].attn.rope
        assert not any("says no factor" in note for note in notes)
    scaled = Llama3(factor=8.0, low=1.0, high=4.0, original=8_192)
    assert found[8.0] == Rope(base=500_000.0, pairs="half", scaling=scaled)
    assert found[32.0].scaling == replace(scaled, factor=32.0)


def test_llama3_frequencies() -> None:
    """Case 50, on both sides, of the preset that Meta's file of the 1B is read as."""

    rope = read(PUBLISHED["llama3.2-1b"], "llama3.2-1b")[0].layers[0].attn.rope
    plain = 500_000.0 ** (-np.arange(0, 64, 2) / 64)
    args = (rope.scaling, rope.base)
    runs = {
        "JAX": jaxmodel.position.SCALINGS[Llama3](*args, plain),
        "torch": torchref.position.SCALINGS[Llama3](*args, plain.tolist(), 131_072),
    }
    for frequencies in runs.values():
        ratios = np.array(frequencies) / plain
        assert (
            np.round(ratios, 5).tolist()
            == [1.0] * 15 + [0.60557, 0.30374, 0.10345] + [0.03125] * 14
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": ...}, "dim: missing, and never guessed"),
        ({"multiple_of": ...}, "multiple_of: missing"),
        ({"norm_eps": ...}, "norm_eps: missing"),
        ({"vocab_size": 0}, "vocab_size: must be a positive integer"),
        ({"multiple_of": 100}, "they make a feed-forward of 14200, and layers.0.* has 14336"),
        ({"ffn_dim_multiplier": 1.0}, "feed-forward of 11264, and layers.0.feed_forward.w1"),
        ({"n_layers": 31}, "no published Llama has these sizes; add rope_scaling_factor"),
        ({"use_scaled_rope": "yes"}, "use_scaled_rope: must be true or false"),
        ({"use_scaled_rope": ..., "rope_scaling_factor": 8.0}, "use_scaled_rope is not true"),
        ({"rope_high_freq_factor": 1.0}, "rope_scaling_factor and rope_high_freq_factor: 8.0, 1.0"),
        ({"rope_theta": 1e6}, "max_seq_len: missing, and base, eps and scaling are those of no"),
        ({"norm_eps": 1e-6}, "max_seq_len: missing"),
        ({"quantization_args": {}}, "quantization_args: unknown setting"),
        ({"vision_chunk_size": 448}, "vision_chunk_size: unknown setting"),
        ({"n_kv_heads": 5}, "heads=32 is not a multiple of kv=5"),
    ],
)
def test_what_is_not_settled_is_refused(changes: dict[str, Any], message: str) -> None:
    if "n_kv_heads" in changes:
        changes = {**changes, "rope_scaling_factor": 8.0}
    with pytest.raises(BadInput, match=message):
        read(PUBLISHED["llama3.1-8b"], **changes)


def test_what_settles_it_is_taken() -> None:
    spec, notes = read(PUBLISHED["llama3-8b"], rope_theta=1e6, max_seq_len=16_384)
    assert (spec.max_len, notes) == (16_384, [])
    unsaid = read(PUBLISHED["llama2-7b"], "llama2-7b")[0].layers[0].attn
    assert (unsaid.kv, unsaid.heads) == (32, 32)  # no n_kv_heads: one for each head


# --- folders that are not whole


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    state = state_of(model())

    def opened(name: str, edit: Any) -> None:
        at = folder(tmp_path / name, state, parts=3 if name == "gap" else 2)
        edit(at)
        open_source(at)

    def change(at: Path, name: str, value: Any) -> None:
        path = at / "consolidated.01.pth"
        held = torch.load(path)
        held[name] = value(held[name])
        torch.save({k: v for k, v in held.items() if v is not None}, path)

    bad = "files that do not belong together"
    for name, edit, message in [
        ("gap", lambda at: (at / "consolidated.01.pth").unlink(), r"no consolidated\.01\.pth"),
        ("none", lambda at: [p.unlink() for p in at.glob("*.pth")], r"no consolidated\.00\.pth"),
        (
            "last",
            lambda at: (at / "consolidated.01.pth").unlink(),
            "has 35; is a cons",
        ),
        ("norm", lambda at: change(at, "norm.weight", lambda w: w + 1), f"{bad}:\n  norm.weight"),
        ("short", lambda at: change(at, "norm.weight", lambda w: None), "not in every file"),
        (
            "wide",
            lambda at: change(at, "layers.0.attention.wq.weight", lambda w: w[:-1]),
            "wq.weight: of another shape",
        ),
    ]:
        with pytest.raises(BadInput, match=message):
            opened(name, edit)
