"""Published config.json files key by key, and what every family does with its own settings."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from transformers.activations import ACT2FN

from jaxtwin.configs import BadInput, Model, preset
from jaxtwin.configs.shrink import shrunk
from jaxtwin.configs.spec import GQA
from jaxtwin.parity.checkpoints.dialects import FAMILIES, from_hf, to_hf
from jaxtwin.parity.checkpoints.dialects.base import differences
from jaxtwin.parity.checkpoints.dialects.hf_keys import IGNORED, runs
from jaxtwin.tests.helpers import hf_models
from jaxtwin.tests.helpers.hf_models import json_config as config
from jaxtwin.tests.helpers.hf_published import PUBLISHED
from jaxtwin.torchref.ffn import ACTIVATIONS


def attn(spec: Model, layer: int = 0) -> GQA:
    return spec.layers[layer].attn


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_its_preset(name: str) -> None:
    """Read, and written back with every key of it, so that transformers loads the same."""
    spec = from_hf(PUBLISHED[name])
    assert spec == preset(name)
    dtype = PUBLISHED[name].get("torch_dtype", "float32")
    ids = {k: v for k, v in PUBLISHED[name].items() if k in ("eos_token_id", "bos_token_id")}
    back = to_hf(spec, dtype, ids, PUBLISHED[name])
    assert PUBLISHED[name].items() <= back.items()
    one, other = (
        transformers.AutoConfig.for_model(**json.loads(json.dumps(c))).to_dict()
        for c in (PUBLISHED[name], back)
    )
    assert {**other, "dtype": one["dtype"]} == one
    assert not differences(from_hf(to_hf(spec)), spec)


def test_the_original_is_left_out_where_it_is_another_model() -> None:
    spec, notes = preset("gemma2-tiny"), list[str]()
    got = to_hf(spec, original=PUBLISHED["gemma2-2b"], notes=notes)
    assert got == to_hf(spec)
    assert "it has model.d = 2304, and this model has model.d = 32" in notes[0]
    notes.clear()
    assert to_hf(spec, original={"model_type": "glm"}, notes=notes) == to_hf(spec)
    assert "model_type 'glm' is not supported" in notes[0]


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_key_is_taken_or_refused_by_name(kind: str) -> None:
    """Cases 9 and 15 among them: a scalar that nobody reads is never lost quietly."""
    spec = from_hf(config(kind))
    for key in ("logits_scaling", "logit_scale", "residual_multiplier", "no_rope_layers"):
        with pytest.raises(BadInput, match=f"{key}: unknown setting"):
            from_hf(config(kind, **{key: 8}))
    for key, bad in (("quantization_config", {"bits": 4}), ("auto_map", {"AutoModel": "x.Y"})):
        with pytest.raises(BadInput, match=f"{key}: .* is not supported"):
            from_hf(config(kind, **{key: bad}))
    assert from_hf(config(kind, transformers_version="5.0", use_cache=False)) == spec
    with pytest.raises(BadInput, match=r"architectures: .*ForSequenceClassification"):
        from_hf(config(kind, architectures=[f"{kind}ForSequenceClassification"]))


@pytest.mark.parametrize(
    "kind",
    # Cases 4, 7, 9, 15, 24, 25, 59, 73 and 78, each by one that has it.
    [
        "deepseek_v3",
        "glm",
        "smollm3",
        "llama4",
        "granite",
        "cohere",
        "mixtral",
        "gpt_oss",
        "gemma3",
        "phi3",
        "bailing_moe",
    ],
)
def test_a_family_that_is_not_there_is_refused_by_name(kind: str) -> None:
    with pytest.raises(BadInput, match=f"model_type '{kind}' is not supported"):
        from_hf({"model_type": kind, "rope_parameters": {"rope_type": "default"}})


ODD = [None, 0, -1, 1, 1.5, "x", "default", [], {}, True, [1], {"a": 1}, 10**30, float("nan")]
ODD += [{"rope_type": None}, {"full_attention": 3}, {"rope_type": "yarn"}]


@pytest.mark.parametrize(("kind", "variant"), hf_models.CASES)
def test_an_odd_value_of_any_key_is_read_or_refused(kind: str, variant: str) -> None:
    """And nothing else happens: whatever is refused is told, as a BadInput."""
    keys = config(kind, variant)
    legacy = ["rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"]
    legacy += ["n_ctx", "n_embed", "text_config", "hidden_activation", "torch_dtype"]
    inner = keys.get("rope_parameters") or {}
    tries = [{**keys, key: odd} for key in [*keys, *legacy] for odd in ODD]
    tries += [{**keys, "rope_parameters": {**inner, key: odd}} for key in inner for odd in ODD]
    refused = 0
    for one in tries:
        try:
            assert isinstance(from_hf(one), Model)
        except BadInput:
            refused += 1
    assert len(tries) / 4 < refused < len(tries)


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_left_out_is_what_the_class_takes_and_is_noted(kind: str) -> None:
    """Cases 1 and 64: transformers itself is asked, and no default is silent."""
    compared = 0
    for key in FAMILIES[kind].defaults:
        gone = ["rope_parameters", "rope_scaling"] if key.startswith("rope_") else []
        left = config(kind, **dict.fromkeys([key, *gone], ...))
        notes: list[str] = []
        try:
            want = from_hf(transformers.CONFIG_MAPPING[kind].from_dict(left).to_dict())
        except Exception:  # the class's own size is not one that goes with the rest: its error
            with pytest.raises(BadInput):
                from_hf(left)
            continue
        assert differences(from_hf(left, notes=notes), want) == [], key
        read = key not in ("sliding_window", "max_window_layers", "sliding_window_pattern")
        assert not read or any(f"no {key}: " in note for note in notes), key
        compared += 1
    assert compared > 2


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_defaults_are_the_classes_own(kind: str) -> None:
    theirs = transformers.CONFIG_MAPPING[kind]().to_dict()
    ropes = theirs.get("rope_parameters") or {}
    renamed = {
        "rope_theta": ropes.get("full_attention", ropes).get("rope_theta"),
        "rope_local_base_freq": ropes.get("sliding_attention", {}).get("rope_theta"),
        "sliding_window_pattern": theirs.get("_sliding_window_pattern"),
    }
    if kind.startswith("qwen"):  # nulled where it is not in use
        used = transformers.CONFIG_MAPPING[kind](use_sliding_window=True)
        renamed["sliding_window"] = used.sliding_window
    for key, value in FAMILIES[kind].defaults.items():
        assert renamed.get(key, theirs.get(key)) == value, key


def test_keys_that_cannot_change_the_function_are_noted() -> None:
    old = {
        "_model_name_or_path": "x",
        "num_beams": 4,
        "gradient_checkpointing": True,
        "attention_dropout": 0.1,
        "max_sequence_length": 512,
    }
    notes: list[str] = []
    plain = from_hf(config("llama"))
    assert from_hf(config("llama", **old), notes=notes) == plain
    assert [note for note in notes if "_model" in note or "passed over" in note] == [
        'config.json: _model_name_or_path: "x" is ignored, private',
        "config.json: passed over, in training alone: "
        "attention_dropout 0.1, gradient_checkpointing true",
        "config.json: passed over, how text is generated: num_beams 4",
    ]
    only = config("llama", max_position_embeddings=..., max_sequence_length=512)
    assert from_hf(only) == plain
    for key in transformers.GenerationConfig().to_dict().keys() & {"num_beams", "top_k", "min_p"}:
        assert key in IGNORED


def test_an_unknown_key_is_refused_and_the_way_on_is_named() -> None:
    strange = config("llama", my_key=3, other=1)
    with pytest.raises(BadInput, match=r"my_key: unknown setting; .*--ignore my_key"):
        from_hf(strange)
    notes: list[str] = []
    assert from_hf(strange, notes=notes, ignore=["my_key", "other"]) == from_hf(config("llama"))
    assert any("my_key: 3 is ignored, as was asked" in note for note in notes)
    with pytest.raises(BadInput, match="other: unknown") as caught:
        from_hf(strange, ignore=["my_key"])
    assert "my_key" not in str(caught.value)


@pytest.mark.parametrize("kind", FAMILIES)
def test_more_layers_than_anybody_has_are_refused_at_once(kind: str) -> None:
    key = "n_layer" if kind in ("gpt2", "bloom") else "num_hidden_layers"
    more = {"sliding_window_pattern": 6} if kind == "gemma3_text" else {}
    for layers in (10_001, 10**12):
        with pytest.raises(BadInput, match=f"{key}: repeats={layers} is more than 10000 rep"):
            from_hf(config(kind, **{key: layers}, layer_types=None, **more))


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_absent_word_on_tying_is_the_classs_own_and_is_told(kind: str) -> None:
    notes: list[str] = []
    spec = from_hf(config(kind, tie_word_embeddings=...), notes=notes)
    assert spec.tied == getattr(transformers, hf_models.VARIANTS[kind][0])().tie_word_embeddings
    assert f"{FAMILIES[kind].architecture}'s are{'' if spec.tied else ' not'}" in notes[0]


# --- scales, caps, biases, norms


def test_scores_are_scaled_by_the_scalar_and_not_by_the_width() -> None:
    """Case 72; where both are the same there is nothing to say."""
    for kind in ("gemma2", "gemma3_text"):
        spec = from_hf(config(kind, query_pre_attn_scalar=24, head_dim=16))
        assert {block.attn.scale for block in spec.layers} == {24**-0.5}
        assert to_hf(spec)["query_pre_attn_scalar"] == 24
        assert attn(from_hf(config(kind, query_pre_attn_scalar=10))).scale is None
    for heads, d, scalar in ((32, 5376, 168), (32, 4608, 144)):  # the 27B of Gemma 3 and 2
        sizes = {"num_attention_heads": heads, "hidden_size": d, "head_dim": 128}
        spec = from_hf(config("gemma3_text", **sizes, query_pre_attn_scalar=scalar))
        assert attn(spec).scale == scalar**-0.5


def test_a_scale_that_no_scalar_gives_is_not_written() -> None:
    from dataclasses import replace

    spec = preset("gemma2-tiny")
    layers = [replace(b, attn=replace(b.attn, scale=0.3)) for b in spec.layers]
    with pytest.raises(BadInput, match=r"layers.0.attn.scale = 0.30.*, and this model has .* 0.3$"):
        to_hf(replace(spec, runs=runs(layers)))


def test_caps_are_the_files_own() -> None:
    spec = from_hf(config("gemma2"))
    assert ({b.attn.cap for b in spec.layers}, spec.cap) == ({5.0}, 3.0)
    spec = from_hf(config("gemma2", "all"))
    assert ({b.attn.cap for b in spec.layers}, spec.cap) == ({None}, None)
    assert from_hf(config("gemma3_text", "all")).cap == 3.0


def test_biases_are_those_of_the_class_or_of_its_flag() -> None:
    """Case 79."""
    flags = {kind: (attn(s := from_hf(config(kind))).bias, attn(s).out_bias) for kind in FAMILIES}
    assert flags.pop("qwen2") == (True, False)
    assert flags.pop("gpt2") == flags.pop("bloom") == (True, True)
    assert set(flags.values()) == {(False, False)}
    for kind in ("llama", "qwen3", "gemma", "gemma2", "gemma3_text"):
        spec = from_hf(config(kind, attention_bias=True))
        assert (attn(spec).bias, attn(spec).out_bias) == (True, True)
    for kind in ("mistral", "qwen2"):
        with pytest.raises(BadInput, match="attention_bias: "):
            from_hf(config(kind, attention_bias=True))


@pytest.mark.parametrize("kind", FAMILIES)
def test_norms_round_as_the_class_does_to_the_bit(kind: str) -> None:
    """Cases 61 and 63, in bfloat16; w = 15.8125 is one that 1 + w rounds."""
    from jaxtwin.torchref.norm import NORMS

    spec = from_hf(config(kind))
    ours = NORMS[type(spec.norm)](spec.norm, 64).bfloat16()  # type: ignore[index]
    body = hf_models.model(kind).base_model
    theirs = type(body.norm if hasattr(body, "norm") else body.ln_f)
    module = theirs(64, eps=1e-5).bfloat16()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 64, generator=generator).bfloat16()
    w = torch.randn(64, generator=generator).bfloat16()
    w[0] = 15.8125
    with torch.no_grad():
        ours.weight.copy_(w)
        module.weight.copy_(w)
    got, wanted = ours(x), module(x)
    if theirs is torch.nn.LayerNorm:  # fused, in an order of its own: as near as its rounding
        reference = torch.nn.functional.layer_norm(x.double(), (64,), w.double(), eps=1e-5)
        apart = [float((y.double() - reference).norm()) for y in (got, wanted)]
        assert apart[0] <= 2 * apart[1]
    else:
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3_text"])
def test_the_embedding_is_scaled_as_the_class_does_to_the_bit(kind: str) -> None:
    """Case 66, in bfloat16."""
    from jaxtwin.torchref.model import Scale

    for d in (2048, 2304, 2560, 3072, 3584, 3840, 5376):
        spec = from_hf(config(kind, hidden_size=d))
        assert spec.embed_scale is not None
        theirs = type(hf_models.model(kind).get_input_embeddings())
        module = theirs(3, 4, 0, embed_scale=d**0.5).bfloat16()
        ids = torch.arange(3)
        plain = torch.nn.functional.embedding(ids, module.weight)
        assert torch.equal(Scale(spec.embed_scale)(plain[None])[0], module(ids))


# --- activations


@pytest.mark.parametrize("word", ["gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_an_activation_is_the_one_that_the_class_computes(kind: str, word: str) -> None:
    """Case 67, with the class's own function as the oracle: a Gemma 1's "gelu" is the tanh form."""
    keys = {"gpt2": "activation_function", "gemma2": "hidden_activation"}
    keys["gemma3_text"] = "hidden_activation"
    if kind == "bloom":
        return  # has no such key
    key = keys.get(kind, "hidden_act")
    if word == "relu" and kind != "gpt2":
        with pytest.raises(BadInput, match=f"{key}: must be 'silu' or"):
            from_hf(config(kind, **{key: word}))
        return
    act = from_hf(config(kind, **{key: word})).layers[0].ffn.act
    theirs = getattr(hf_models.config(kind, **{key: word}), key)
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    assert torch.allclose(ACT2FN[theirs](x), ACTIVATIONS[act](x), rtol=0, atol=1e-10)
    assert not torch.allclose(
        ACT2FN[theirs](x), ACTIVATIONS["gelu" if act != "gelu" else "gelu_tanh"](x), atol=1e-5
    )
    with pytest.raises(BadInput, match=f"{key}: must be .*, got .quick_gelu"):
        from_hf(config(kind, **{key: "quick_gelu"}))


def test_blooms_gelu_is_the_tanh_form() -> None:
    from transformers.models.bloom.modeling_bloom import bloom_gelu_forward

    assert from_hf(config("bloom")).layers[0].ffn.act == "gelu_tanh"
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    assert torch.allclose(bloom_gelu_forward(x), ACTIVATIONS["gelu_tanh"](x), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "silu"}, "another activation"),
        ("gemma2", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is another activation"),
        ("gemma3_text", {"hidden_act": "tanh"}, "hidden_act: 'tanh' is another activation"),
    ],
)
def test_two_words_for_an_activation_must_agree(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        from_hf(config(kind, **changes))
    same = {"gemma": "hidden_activation"}.get(kind, "hidden_act")
    assert from_hf(config(kind, **{same: "gelu_new"})) == from_hf(config(kind))


def test_a_bloom_whose_split_products_lose_biases_is_refused() -> None:
    """slow_but_exact changes an order of sums, but with pretraining_tp > 1 two biases too."""
    config = {**PUBLISHED["bloom-style"], "slow_but_exact": True}
    from_hf(config)
    with pytest.raises(BadInput, match=r"slow_but_exact: with pretraining_tp=2"):
        from_hf({**config, "pretraining_tp": 2})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tiny_twin_is_of_its_family(name: str) -> None:
    """So that transformers can judge it; an embedding's sqrt(d) is of the small d."""
    small = shrunk(preset(name))
    assert not differences(from_hf(to_hf(small)), small)
