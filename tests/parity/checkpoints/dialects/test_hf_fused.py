"""Files of GPT-2 and BLOOM: fused and turned matrices, bare names, masks, tied and untied heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxtwin.configs import BadInput, preset
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.dialects import FAMILIES, HF_CONFIG, from_hf
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.sides import witness
from jaxtwin.parity.sides.inputs import check_inputs
from jaxtwin.parity.table.tensors import Tensor, backward, forward, moves
from jaxtwin.tests.helpers import hf_models
from jaxtwin.tests.helpers.folders import bits, edit_config, hf_folder, store, stored

LAYER = "transformer.h.1."


def folder(path: Path, kind: str, **tensors: Any) -> Path:
    """A folder that transformers wrote, and tensors set in it; ... removes one."""
    hf_models.folder(path, kind)
    if tensors:
        full = {**stored(path), **tensors}
        store(path, {k: v for k, v in full.items() if v is not ...})
    return path


def ours(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in open_source(path).tensors.items()}


def test_gpt2s_matrices_are_turned_and_bloom_s_are_not(tmp_path: Path) -> None:
    """Case 26: the square ones too, where no shape would tell."""
    gpt2, bloom = (folder(tmp_path / kind, kind) for kind in ("gpt2", "bloom"))
    theirs, got = stored(gpt2), ours(gpt2)
    assert theirs[LAYER + "attn.c_proj.weight"].shape == (64, 64)
    np.testing.assert_array_equal(
        got["layers.1.attn.o.weight"], theirs[LAYER + "attn.c_proj.weight"].T
    )
    assert theirs[LAYER + "attn.c_attn.weight"].shape == (64, 3 * 64)
    for at, name in enumerate("qkv"):
        part = slice(64 * at, 64 * (at + 1))
        w, b = (theirs[LAYER + f"attn.c_attn.{kind}"][..., part] for kind in ("weight", "bias"))
        np.testing.assert_array_equal(got[f"layers.1.attn.{name}.weight"], w.T)
        np.testing.assert_array_equal(got[f"layers.1.attn.{name}.bias"], b)
    name = "transformer.h.1.self_attention.dense.weight"
    np.testing.assert_array_equal(ours(bloom)["layers.1.attn.o.weight"], stored(bloom)[name])


def test_q_k_and_v_of_a_bloom_stand_side_by_side_in_every_head(tmp_path: Path) -> None:
    """Case 21 where every head is a group: 6 heads of 5 are rows 0-4 q, 5-9 k, 10-14 v, 15- q."""
    path = folder(tmp_path / "a", "bloom")
    got, fused = ours(path), "transformer.h.1.self_attention.query_key_value."
    rows = stored(path)[fused + "weight"].reshape(6, 3, 5, 30)
    bias = stored(path)[fused + "bias"].reshape(6, 3, 5)
    for at, name in enumerate("qkv"):
        np.testing.assert_array_equal(
            got[f"layers.1.attn.{name}.weight"], rows[:, at].reshape(30, 30)
        )
        np.testing.assert_array_equal(got[f"layers.1.attn.{name}.bias"], bias[:, at].reshape(30))


@pytest.mark.parametrize("kind", ["gpt2", "bloom"])
def test_the_names_of_the_body_alone_are_read(tmp_path: Path, kind: str) -> None:
    """As the first files of both were saved; some names bare and some not are refused."""
    path = folder(tmp_path / "a", kind)
    full, wanted = stored(path), bits(ours(path))
    store(path, {name.removeprefix("transformer."): x for name, x in full.items()})
    assert bits(ours(path)) == wanted
    convert(path, tmp_path / "b", "hf")
    assert bits(stored(tmp_path / "b")) == bits(full)
    name = min(full)
    mixed = {k.removeprefix("transformer.") if k == name else k: x for k, x in full.items()}
    store(path, mixed)
    with pytest.raises(BadInput, match=f"{name}: missing"):
        open_source(path)


def masks(square: Any, never: Any = -1e4) -> dict[str, np.ndarray]:
    return {
        LAYER + "attn.bias": np.asarray(square, np.float32)[None, None],
        LAYER + "attn.masked_bias": np.asarray(never, np.float32),
    }


def test_stored_causal_masks_are_looked_at_and_left_out(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", "gpt2")
    wanted = bits(ours(path))
    assert bits(ours(folder(tmp_path / "b", "gpt2", **masks(np.tri(320))))) == wanted
    assert "2 stored causal masks" in "\n".join(open_source(tmp_path / "b").notes)


@pytest.mark.parametrize(
    ("square", "never"),
    [(np.ones((9, 9)), -1e4), (np.tri(9, 9, -1), -1e4), (np.tri(9, 8), -1e4), (np.tri(9), 0.0)],
)
def test_a_mask_that_is_another_is_refused(tmp_path: Path, square: Any, never: float) -> None:
    path = folder(tmp_path / "a", "gpt2", **masks(square, never))
    with pytest.raises(BadInput, match="is not a causal mask, and nothing would read it"):
        open_source(path)


def test_a_llama_whose_matrices_are_fused_is_refused_by_name(tmp_path: Path) -> None:
    """Case 22: how its parts are put together, and for how many devices, nobody can tell."""
    path = hf_folder(tmp_path / "a")
    layer = "model.layers.0.self_attn."
    full = stored(path)
    parts = [full.pop(f"{layer}{name}_proj.weight") for name in "qkv"]
    store(path, {**full, layer + "qkv_proj.weight": np.concatenate(parts)})
    with pytest.raises(BadInput, match=r"q_proj.weight: missing(.|\n)*qkv_proj.weight: unexpected"):
        open_source(path)


# --- tying


TIED = [kind for kind, family in FAMILIES.items() if family.tied]
NAMES = {kind: FAMILIES[kind].dialect.published for kind in FAMILIES}


@pytest.mark.parametrize("kind", TIED)
def test_a_head_that_is_there_beside_a_tied_embedding(tmp_path: Path, kind: str) -> None:
    """Cases 32, 34, 36, 37: equal, alone, or another one."""
    embed, head = NAMES[kind]("embed.weight"), NAMES[kind]("head.weight")
    path = folder(tmp_path / "a", kind)
    wanted, table = bits(ours(path)), stored(path)[embed]
    assert "head.weight" not in ours(path)
    assert bits(ours(folder(tmp_path / "b", kind, **{head: table}))) == wanted
    assert bits(ours(folder(tmp_path / "c", kind, **{head: table, embed: ...}))) == wanted
    other = folder(tmp_path / "d", kind, **{head: table + 1})
    with pytest.raises(BadInput, match="the config ties the embeddings"):
        open_source(other)
    edit_config(other, tie_word_embeddings=False)
    np.testing.assert_array_equal(ours(other)["head.weight"], table + 1)


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_untied_head_that_is_not_there_is_missed_by_name(tmp_path: Path, kind: str) -> None:
    """Case 35: transformers would draw one at random."""
    path = folder(tmp_path / "a", kind)
    full = stored(path)
    full.pop(NAMES[kind]("head.weight"), None)
    edit_config(store(path, full), tie_word_embeddings=False)
    with pytest.raises(BadInput, match=r"lm_head.weight: missing"):
        open_source(path)


def test_biases_are_those_that_the_config_names(tmp_path: Path) -> None:
    """Case 79: one that is missing is not filled with zeros, nor is one too many left out."""
    bias = "model.layers.1.self_attn.k_proj.bias"
    path = folder(tmp_path / "a", "qwen2", **{bias: ...})
    with pytest.raises(BadInput, match=rf"{bias}: missing"):
        open_source(path)
    path = folder(tmp_path / "b", "llama", **{bias: np.zeros(16, np.float32)})
    with pytest.raises(BadInput, match=rf"{bias}: unexpected"):
        open_source(path)


def test_rows_of_biases_and_head_norms_are_reordered_with_their_matrices() -> None:
    """Case 79: a model that turns adjacent pairs has Q's and K's in another order throughout."""
    from dataclasses import replace

    from jaxtwin.configs.spec import Rope
    from jaxtwin.parity.checkpoints.dialects.hf_keys import runs

    spec = from_hf({**hf_models.config("qwen3", "all").to_dict(), "architectures": None})
    turned = [
        replace(b, attn=replace(b.attn, rope=Rope(base=500.0, pairs="adjacent")))
        for b in spec.layers
    ]
    rows = FAMILIES["qwen3"].dialect.rows(replace(spec, runs=runs(turned)))
    half = np.arange(10.0)  # what a head of the file holds
    want = np.array([0, 5, 1, 6, 2, 7, 3, 8, 4, 9])
    for name, heads in (("q.bias", 4), ("k.bias", 2), ("q_norm.norm.weight", 1)):
        row = [m for m in moves(rows) if m.dst == f"layers.1.attn.{name}"]
        x = np.concatenate([half + 100 * n for n in range(heads)])
        got = row[0].forward(x)
        np.testing.assert_array_equal(got, np.concatenate([want + 100 * n for n in range(heads)]))
        np.testing.assert_array_equal(row[0].backward(got), x)


# --- what travels along


def test_the_config_that_a_model_came_with_travels_and_is_kept(tmp_path: Path) -> None:
    """Through every format of ours; and is left out, with a note, where the model is another."""
    path = edit_config(folder(tmp_path / "a", "gpt2"), resid_pdrop=0.25, n_ctx=320)
    convert(path, tmp_path / "jax", "jax")
    convert(tmp_path / "jax", tmp_path / "a.pt", "torch")
    convert(tmp_path / "a.pt", tmp_path / "b", "hf")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (config["resid_pdrop"], config["n_ctx"]) == (0.25, 320)
    assert not (tmp_path / "b" / HF_CONFIG).exists()

    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    saved["spec"]["init_std"] = 0.5
    torch.save(saved, tmp_path / "c.pt")
    report = convert(tmp_path / "c.pt", tmp_path / "c", "hf", dry_run=True)
    assert any("not kept: it has model.init_std = 0.02" in note for note in report["notes"])


def test_a_float8_folder_is_its_products_and_is_written_as_them(tmp_path: Path) -> None:
    """As the makers of Qwen 3 publish it: every scale in its place, and a witness of the rest."""
    import ml_dtypes
    import safetensors.torch

    path = folder(tmp_path / "a", "qwen3")
    full = {k: torch.from_numpy(x) for k, x in stored(path).items()}
    name = "model.layers.1.mlp.up_proj.weight"  # 44 x 32: 6 x 4 blocks of 8
    scale = torch.arange(1, 25).reshape(6, 4) / 8
    full[name] = full[name].to(torch.float8_e4m3fn)
    safetensors.torch.save_file({**full, name + "_scale_inv": scale}, path / "model.safetensors")
    stated = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8]}
    edit_config(path, quantization_config={**stated, "activation_scheme": "dynamic"})
    source = open_source(path)
    values = full[name].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    blocks = np.kron(scale.numpy(), np.ones((8, 8), np.float32))[:44]
    got = source.tensors["layers.1.ffn.up.weight"].read()
    np.testing.assert_array_equal(got, values.astype(np.float32) * blocks)
    convert(source, tmp_path / "b", "hf")
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    assert bits(ours(tmp_path / "b")) == bits({n: t.read() for n, t in source.tensors.items()})
    third, note = witness.find(source)
    assert third is not None
    assert "our own export" in note
    third(check_inputs(source.spec, 16))
    edit_config(path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(BadInput, match=r"quantization_config: .*gptq.* is not supported"):
        open_source(path)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2-tiny",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("bloom-tiny", "gemma3-tiny", "qwen3-tiny")
        ),
    ],
)
def test_transformers_builds_a_preset_from_our_export(name: str) -> None:
    """The witness of a model that no file of transformers' holds has every weight, and runs."""
    source = open_source(name)
    third, note = witness.find(source)
    assert third is not None
    assert "our own export" in note
    batch = check_inputs(source.spec, 16)
    got = third(batch)
    assert got.logits.shape == (2, 16, source.spec.vocab)
    assert got.grads.keys() == source.tensors.keys()
    assert all(np.abs(grad).max() > 0 for n, grad in got.grads.items() if "k.bias" not in n)


@pytest.mark.parametrize("name", ["transformer-tiny", "grok-tiny"])
def test_a_model_of_no_family_has_no_witness_and_is_not_written(name: str, tmp_path: Path) -> None:
    third, note = witness.find(open_source(name))
    assert third is None
    assert note.startswith("no third witness: a Hugging Face ")
    with pytest.raises(BadInput, match="a Hugging Face "):
        convert(name, tmp_path / "a", "hf")


def test_every_row_of_every_family_comes_back() -> None:
    """Every tensor with values of its own, through the rows and back, to the bit."""
    for kind, variant in hf_models.CASES:
        theirs = {**hf_models.config(kind, variant).to_dict(), "architectures": None}
        spec = from_hf(theirs)
        rows = FAMILIES[kind].dialect.rows(spec)
        model = hf_models.model(kind, variant)
        names = {n: p.detach().numpy() for n, p in model.named_parameters()}
        src = {n: Tensor.of(x) for n, x in names.items()}
        dst = forward(rows, src, "the test")
        back = backward(rows, dst, "the test")
        assert bits({n: t.read() for n, t in back.items()}) == bits(names)


def test_bloom_counts_on_without_a_length_and_says_so(tmp_path: Path) -> None:
    path = edit_config(folder(tmp_path / "a", "bloom"), seq_length=...)
    source = open_source(path)
    assert source.spec.max_len == 2048
    assert any("no seq_length: inputs may be 2048 long" in note for note in source.notes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm: true is"),
        ("bloom", {"n_embed": 31}, "names of one setting disagree: hidden_size=30, n_embed=31"),
        ("bloom", {"n_inner": 7}, r"n_inner: the class has 4 \* 30"),
        ("bloom", {"n_head": 7}, "30 is not a multiple of n_head=7"),
        ("gpt2", {"n_ctx": 7}, "names of one setting disagree: n_positions=320, n_ctx=7"),
        ("gpt2", {"n_head": 7}, "64 is not a multiple of n_head=7"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: true is not supported"),
        ("gpt2", {"n_inner": 0}, "n_inner: must be a positive integer"),
    ],
)
def test_settings_of_the_two_that_are_not_ours_are_refused(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    theirs = {**hf_models.config(kind).to_dict(), "architectures": None}
    with pytest.raises(BadInput, match=message):
        from_hf({**theirs, **changes})


def test_gpt2s_scale_of_scores_by_its_two_flags() -> None:
    width = 64 // 4
    for scaled, by_layer in ((True, False), (False, False), (True, True), (False, True)):
        flags = {"scale_attn_weights": scaled, "scale_attn_by_inverse_layer_idx": by_layer}
        spec = from_hf({**hf_models.config("gpt2", **flags).to_dict(), "architectures": None})
        model = hf_models.model("gpt2", **flags)
        theirs = [block.attn.scaling for block in model.transformer.h]
        assert [b.attn.scale or width**-0.5 for b in spec.layers] == theirs
        if not scaled or by_layer:
            assert spec.layers[0].attn.scale is not None
    assert preset("gpt2-tiny").layers[0].attn.scale is None
