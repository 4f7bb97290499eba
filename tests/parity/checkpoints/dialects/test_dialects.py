"""Published namings and configs: what is read, what is refused, what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import transformers

from jaxtwin.configs import PRESETS, BadInput, preset
from jaxtwin.configs.spec import RMS, Llama3, Rope, Run, from_json, to_json
from jaxtwin.parity.checkpoints.dialects import (
    HF_LLAMA,
    from_gguf,
    from_hf,
    from_reference,
    of_architecture,
    of_model_type,
    to_hf,
)
from jaxtwin.parity.checkpoints.dialects.base import differences
from jaxtwin.parity.table.tensors import moves
from jaxtwin.tests.helpers.folders import CONFIG, hf_model
from jaxtwin.tests.helpers.folders import from_config as read


def attn(spec: Any) -> Any:
    return spec.layers[0].attn


# --- Hugging Face configs: the case book's section A


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 500_000.0},
        {"rope_theta": 500_000},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 500_000.0}},
        {"rope_theta": 500_000.0, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": ..., "rope_scaling": {"type": "default", "rope_theta": 500_000.0}},
        {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "default", "type": "default"}},
        {"rope_theta": 500_000.0, "rope_scaling": None, "rope_parameters": None},
    ],
)
def test_the_rotary_base_is_read_in_every_spelling(keys: dict[str, Any]) -> None:
    """Cases 1, 3, 4. transformers 5 itself reads the same base from the same keys."""
    spec = read(**keys)
    assert attn(spec).rope == Rope(base=500_000.0, pairs="half")
    config = {k: v for k, v in {**CONFIG, **keys}.items() if v is not ...}
    theirs = transformers.LlamaConfig.from_dict(config)
    assert theirs.rope_parameters["rope_theta"] == attn(spec).rope.base


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_theta": None}, "a base is never guessed"),
        ({"rope_theta": 0}, "must be a number above 0"),
        ({"rope_theta": True}, "must be a number above 0"),
        ({"rope_parameters": {"rope_theta": 600.0}}, "spellings of the base disagree"),
        (
            {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "linear"}},
            "spellings of the rope type disagree",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
            "spellings of the rope type disagree",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "rope_scaling.factor: Input"),
        ({"rope_scaling": {"type": "proportional"}}, "'proportional' is not supported; known: def"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope type 'su' is not supported"),
        ({"rope_scaling": {"type": ["linear"]}}, "is not supported"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "alpha": 1}},
            "rope_scaling.alpha: unknown setting",
        ),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling.factor: 8.0 is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 500.0}}},
            "rope_parameters.full_attention",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling: must hold settings"),
    ],
)
def test_a_base_that_is_missing_scaled_or_disputed_is_refused(
    keys: dict[str, Any], message: str
) -> None:
    """Cases 1 and 3, and every type of scaling by its name (12 among them)."""
    with pytest.raises(BadInput, match=message):
        read(**keys)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_read_with_its_own_factor(factor: float) -> None:
    """Case 12: neither factor is quietly taken for the other, or for none."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    rope = attn(read(rope_scaling=scaling)).rope
    assert rope.scaling == Llama3(factor=factor, low=1.0, high=4.0, original=16)
    for gone in ("factor", "low_freq_factor", "high_freq_factor"):
        with pytest.raises(BadInput, match=f"rope_scaling.{gone}: missing, and never guessed"):
            read(rope_scaling={k: v for k, v in scaling.items() if k != gone})


def test_the_head_width_is_read_and_not_derived() -> None:
    """Case 5: 16 / 4 would be 4."""
    spec = read(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    shapes = {m.src[0]: m.src_shape for m in moves(HF_LLAMA.rows(spec))}
    layer = "model.layers.0.self_attn."
    assert shapes[layer + "q_proj.weight"] == (32, 16)
    assert shapes[layer + "k_proj.weight"] == shapes[layer + "v_proj.weight"] == (16, 16)
    assert shapes[layer + "o_proj.weight"] == (16, 32)
    assert to_hf(spec)["head_dim"] == 8


@pytest.mark.parametrize("absent", [None, ...])
def test_null_is_as_good_as_absent(absent: Any) -> None:
    """Case 6."""
    spec = read(head_dim=absent, num_key_value_heads=absent, rope_scaling=absent)
    assert (attn(spec).width, attn(spec).kv) == (24 // 6, 6)


def test_tying_counts_where_the_decoder_says_it() -> None:
    """Case 10: the inner value decides, both ways round; alone, the outer one does."""
    inner = {k: v for k, v in CONFIG.items() if k != "tie_word_embeddings"}
    assert from_hf({"text_config": {**inner, "tie_word_embeddings": True}}).tied
    both = {"tie_word_embeddings": True, "text_config": {**inner, "tie_word_embeddings": False}}
    assert not from_hf(both).tied
    assert from_hf({"tie_word_embeddings": True, "text_config": inner}).tied
    assert not from_hf({"text_config": inner}).tied
    with pytest.raises(BadInput, match="hidden_size is 7 at the top and 24 in text_config"):
        from_hf({"hidden_size": 7, "text_config": inner})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": 1}, "attention_bias: must be true or false, got 1"),
        ({"mlp_bias": "no"}, "mlp_bias: must be true or false"),
        ({"no_rope_layers": [1, 1, 0]}, "no_rope_layers: unknown setting"),
        ({"rope_interleaved": True}, "rope_interleaved: true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "qwen2"}, 'architectures: .* is not supported, only ."Qwen2ForCausalLM"'),
        ({"sliding_window": 4096}, "sliding_window: 4096"),
        ({"num_key_value_head": 2}, "num_key_value_head: unknown setting.*'num_key_value_heads'"),
        ({"logits_scaling": 8}, "logits_scaling: unknown setting"),
        ({"hidden_act": "relu"}, "hidden_act: must be 'silu' or"),
        ({"vocab_size": None}, "vocab_size: must be a positive integer, got null"),
        ({"vocab_size": 23.0}, "vocab_size: must be a positive integer, got 23.0"),
        ({"vocab_size": "23"}, "vocab_size: must be a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers: must be a positive integer"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps: must be a number of 0 or more"),
        ({"num_key_value_heads": 4}, "heads=6 is not a multiple of kv=4"),
        ({"head_dim": 7}, "width=7 is odd"),
        ({"initializer_range": 0.0}, "init_std"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, "spellings of the dtype disagree"),
    ],
)
def test_what_llama_is_not_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read(**changes)


def test_all_problems_are_shown_together() -> None:
    with pytest.raises(BadInput) as caught:
        read(attention_bias=3, hidden_size=None, vocab=3, rope_theta=0)
    for name in ("attention_bias", "hidden_size", "vocab: unknown setting", "base"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("act", "ours"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
    ],
)
def test_the_flavour_of_gelu_follows_the_config(act: str, ours: str) -> None:
    """Case 67, with transformers' own function as the oracle."""
    import torch
    from transformers.activations import ACT2FN

    from jaxtwin.torchref.ffn import ACTIVATIONS

    assert read(hidden_act=act).layers[0].ffn.act == ours
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    assert torch.allclose(ACT2FN[act](x), ACTIVATIONS[ours](x), rtol=0, atol=1e-15)


def test_transformers_own_configs_are_read(tmp_path: Any) -> None:
    """What transformers 5 writes, and every key of its full dictionary, in both spellings."""
    config = hf_model(tied=True).config
    assert from_hf(config.to_dict()).tied
    assert from_hf(json.loads(config.to_json_string(use_diff=True))).d == 24
    old = {k: v for k, v in config.to_dict().items() if k not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": 500.0, "rope_scaling": None, "torch_dtype": "float32"}
    assert from_hf(old) == from_hf(config.to_dict())


def test_the_real_smollm2_config_is_its_preset() -> None:
    """Key by key as published, down to the keys of other runtimes; only its spread is not ours."""
    config = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
    }  # fmt: skip
    spec = from_hf(config)
    assert spec.init_std == 0.041666666666666664
    wanted = preset("smollm2-135m")
    assert replace(spec, init_std=wanted.init_std) == wanted


# --- what is written


NO_FAMILY = ("grok", "transformer")  # presets that no class of transformers computes


@pytest.mark.parametrize("name", [n for n in sorted(PRESETS) if not n.startswith(NO_FAMILY)])
def test_a_written_config_reads_back_in_both_versions(name: str) -> None:
    """Case 2: an old reader finds the old keys, transformers 5 the new ones, and they are equal."""
    spec = preset(name)
    config = json.loads(json.dumps(to_hf(spec, "bfloat16")))
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    back = [from_hf(c) for c in (config, old, new)]
    assert back[0] == back[1] == back[2]
    half = json.loads(json.dumps(to_json(spec)).replace("adjacent", "half"))
    assert back[0] == from_json(half, "the test")
    theirs = transformers.AutoConfig.for_model(**config)
    assert not differences(from_hf(theirs.to_dict()), spec)
    assert str(theirs.dtype) == "torch.bfloat16"
    rope = attn(spec).rope
    if rope is not None and config["model_type"] != "gemma3_text":
        assert theirs.rope_parameters["rope_theta"] == rope.base
        assert (old["rope_scaling"] is None) == (rope.scaling is None)
        assert theirs.rope_parameters["rope_type"] == (rope.scaling or Default).kind


class Default:
    """What transformers calls no scaling."""

    kind = "default"


@pytest.mark.parametrize("name", [n for n in sorted(PRESETS) if n.startswith(NO_FAMILY)])
def test_a_preset_of_no_family_is_not_written(name: str) -> None:
    with pytest.raises(BadInput, match=r"a Hugging Face .*, and this model "):
        to_hf(preset(name))


def test_token_ids_are_written_as_given() -> None:
    """Cases 13 and 17: a list stays one, 0 stays 0, and what is not known is null, not 1 or 2."""
    config = to_hf(preset("smollm2-tiny"), ids={"bos_token_id": 0, "eos_token_id": [0, 5]})
    theirs = transformers.LlamaConfig.from_dict(config)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, [0, 5], None)


def test_a_model_that_no_family_has_is_refused_by_its_first_difference() -> None:
    spec = preset("smollm2-tiny")
    block = spec.layers[0]
    layers = lambda *blocks: replace(spec, runs=(Run(blocks=blocks, repeats=1),))  # noqa: E731
    wider = replace(block, ffn=replace(block.ffn, hidden=41))
    eps = replace(block, pre_ffn=RMS(eps=1e-3))
    rope = replace(block, attn=replace(block.attn, rope=Rope(base=7.0, pairs="half")))
    no_rope = replace(block, attn=replace(block.attn, rope=None))
    sandwich = replace(block, post_attn=RMS(eps=1e-5))
    for bad, message in [
        (layers(block, wider), "llama has layers.1.ffn.hidden = 40, and this model has .*= 41"),
        (layers(block, eps), "layers.1.pre_ffn.eps"),
        (layers(block, rope), "layers.1.attn.rope.base"),
        (layers(block, no_rope), "layers.1.attn.rope"),
        (layers(no_rope), "always has rotary positions"),
        (layers(block, sandwich), "layers.1.post_attn"),
        (replace(spec, norm=None), "always has a final norm"),
    ]:
        with pytest.raises(BadInput, match=message):
            to_hf(bad)
    with pytest.raises(BadInput, match=r"no name for layers\.0\.post_attn\.weight"):
        HF_LLAMA.rows(layers(sandwich))
    grouped = layers(block, block)
    assert from_hf(to_hf(grouped)).layers == grouped.layers
    assert to_hf(replace(spec, d=35))["model_type"] == "mistral"  # a Llama's heads divide d


# --- GGUF metadata


def metadata(**changes: Any) -> dict[str, Any]:
    data = {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "llama.context_length": 32,
        "llama.embedding_length": 24,
        "llama.feed_forward_length": 20,
        "llama.attention.head_count": 6,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 500.0,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "llama.vocab_size": 23,
        "llama.rope.dimension_count": 4,
    }
    data |= {"llama." + key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in data.items() if value is not ...}


def test_gguf_metadata_is_a_spec() -> None:
    """The decimal that the file's float32 was made from, and tying from the tensors' names."""
    spec = from_gguf(metadata(), {"token_embd.weight"}, "the test", [])
    assert spec == read(head_dim=4, tie_word_embeddings=True)
    assert spec.norm.eps == 1e-5
    assert not from_gguf(metadata(), {"output.weight"}, "the test", []).tied
    wide = metadata(attention__key_length=10, attention__value_length=10, rope__dimension_count=10)
    assert attn(from_gguf(wide, {}, "the test", [])).width == 10
    assert attn(from_gguf(metadata(attention__head_count_kv=...), {}, "the test", [])).kv == 6
    counted = metadata(vocab_size=...) | {"tokenizer.ggml.tokens": ["a", "b"]}
    assert from_gguf(counted, {}, "the test", []).vocab == 2
    notes: list[str] = []
    assert attn(from_gguf(metadata(rope__freq_base=...), {}, "the test", notes)).rope.base == 1e4
    assert any("no rope.freq_base: 10000.0, the default of llama.cpp" in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope__dimension_count": 2}, "head width 4 expected throughout"),
        ({"attention__value_length": 6}, "head width 4 expected throughout"),
        ({"rope__scaling__type": "yarn"}, 'rope.scaling.type: "yarn" is not supported'),
        ({"expert_count": 8}, "expert_count: 8 is not supported"),
        ({"attention__head_count": [6, 6, 6]}, "attention.head_count: must be a positive integer"),
        ({"attention__sliding_window": 4096}, "attention.sliding_window"),
        ({"attention__scales": 2.0}, "attention.scales: unknown setting"),
        ({"vocab_size": ...}, "so is the token list that would be counted"),
    ],
)
def test_gguf_settings_that_are_not_ours_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        from_gguf(metadata(**changes), {}, "the test", [])


def test_one_part_of_a_split_gguf_is_refused() -> None:
    with pytest.raises(BadInput, match="one part of a split GGUF"):
        from_gguf(metadata() | {"split.count": 2}, {}, "the test", [])


def test_unknown_kinds_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match="model_type 'glm' is not supported; supported: bloom, gem"):
        of_model_type({"model_type": "glm"}, "config.json")
    with pytest.raises(BadInput, match="'gemma3' is not supported"):
        of_model_type({"model_type": "gemma3"}, "config.json")
    with pytest.raises(BadInput, match=r"'qwen' is not supported .did you mean 'qwen3'"):
        of_model_type({"model_type": "qwen"}, "config.json")
    with pytest.raises(BadInput, match=r"'mixtral' is not supported yet: mixture of experts$"):
        of_model_type({"model_type": "mixtral"}, "config.json")
    with pytest.raises(BadInput, match="model_type is missing"):
        of_model_type({}, "config.json")
    with pytest.raises(BadInput, match="architecture 'bert' is not supported"):
        of_architecture({"general.architecture": "bert"}, "x.gguf")
    assert of_model_type({"text_config": {"model_type": "llama"}}, "config.json")[0] is HF_LLAMA


def test_the_reference_config_is_read_strictly() -> None:
    config = {
        "vocab": 23, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 40,
        "context": 16, "theta": 10000.0, "eps": 1e-06, "tied": True,
    }  # fmt: skip
    assert attn(from_reference(config, "the test")).rope.pairs == "adjacent"
    for bad, message in [
        ({"heads": 0}, "heads: must be a positive integer"),
        ({"theta": "1e4"}, "theta: must be a number"),
        ({"bias": True}, "bias: unknown setting"),
        ({"kv_heads": 3}, "heads=4 is not a multiple of kv=3"),
    ]:
        with pytest.raises(BadInput, match=message):
            from_reference(config | bad, "the test")
    del config["tied"]
    with pytest.raises(BadInput, match="tied: missing"):
        from_reference(config, "the test")
