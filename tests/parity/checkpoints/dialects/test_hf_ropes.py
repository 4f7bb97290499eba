"""Rotary positions in a config.json: every kind, every spelling, and what they come to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import transformers

from jaxtwin.configs import BadInput
from jaxtwin.configs.spec import DynamicNTK, Linear, Llama3, LongRope, Rope, Yarn
from jaxtwin.parity.checkpoints.dialects import from_hf, to_hf
from jaxtwin.parity.checkpoints.dialects.base import differences
from jaxtwin.parity.checkpoints.dialects.hf_rope import in_both_spellings
from jaxtwin.tests.helpers import hf_models
from jaxtwin.tests.helpers.folders import CONFIG
from jaxtwin.tests.helpers.folders import from_config as read
from jaxtwin.torchref.position import Rotary

KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "linear": ({"factor": 2.0}, Linear(factor=2.0)),
    "dynamic": ({"factor": 2.0}, DynamicNTK(factor=2.0, original=32)),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 8, "attention_factor": 1.25},
        Yarn(factor=4.0, original=8, magnitude=1.25),
    ),
    "llama3": (
        {
            "factor": 8,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 16,
        },
        Llama3(factor=8.0, low=1.0, high=4.0, original=16),
    ),
    "longrope": (
        {
            "short_factor": [1, 1, 1, 1, 1.5],
            "long_factor": [1, 2, 3, 4, 5],
            "original_max_position_embeddings": 8,
        },
        LongRope(
            short=(1.0, 1.0, 1.0, 1.0, 1.5),
            long=(1.0, 2.0, 3.0, 4.0, 5.0),
            original=8,
            magnitude=math.sqrt(1 + math.log(32 / 8) / math.log(8)),
        ),
    ),
}


def scaling(**changes: Any) -> Any:
    rope = read(**changes).layers[0].attn.rope
    assert rope is not None
    return rope.scaling


def frequencies(rope: Rope, width: int, longest: int) -> list[float]:
    return Rotary(rope, width).frequency(longest)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_in_every_spelling(kind: str) -> None:
    """Case 3: "type", "rope_type", both, and transformers 5's place for them."""
    settings, wanted = KINDS[kind]
    for named in ({"type": kind}, {"rope_type": kind}, {"type": kind, "rope_type": kind}):
        inside = {**named, **settings}
        assert scaling(rope_scaling=inside) == wanted
        assert scaling(rope_theta=..., rope_parameters={**inside, "rope_theta": 500}) == wanted
        assert scaling(rope_scaling=inside, rope_parameters={**inside, "rope_theta": 500}) == wanted
    other = {"rope_type": "linear" if kind != "linear" else "dynamic"}
    with pytest.raises(BadInput, match="two spellings of the rope type disagree"):
        read(rope_scaling={"type": kind, **settings, **other})


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_of_a_kind_is_read_again_and_by_transformers(kind: str) -> None:
    """Case 2: the old keys and the new, each of which says all."""
    spec = read(rope_scaling={"rope_type": kind, **KINDS[kind][0]}, tie_word_embeddings=True)
    config = to_hf(spec)
    inside = {k: v for k, v in config["rope_parameters"].items() if k != "rope_theta"}
    assert config["rope_scaling"] == inside
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    assert from_hf(old) == from_hf(new) == from_hf(config) == spec
    for one in (old, new, config):
        theirs = transformers.LlamaConfig(**one)
        assert theirs.rope_parameters == config["rope_parameters"]
        assert not differences(from_hf(theirs.to_dict()), spec)


@pytest.mark.parametrize("kind", [*KINDS, "default"])
def test_an_unknown_or_missing_setting_of_a_kind_is_refused(kind: str) -> None:
    settings = {"rope_type": kind, **KINDS.get(kind, ({},))[0]}
    with pytest.raises(BadInput, match=r"rope_scaling.betafast: unknown setting"):
        read(rope_scaling={**settings, "betafast": 3})
    with pytest.raises(BadInput, match=r"rope_scaling.partial_rotary_factor: 0.5 is not supported"):
        read(rope_scaling={**settings, "partial_rotary_factor": 0.5})
    needed = set(settings) & {"factor", "low_freq_factor", "high_freq_factor", "long_factor"}
    assert needed or kind == "default"
    for key in needed:
        with pytest.raises(BadInput, match=f"rope_scaling.{key}: missing, and never guessed"):
            read(rope_scaling={k: v for k, v in settings.items() if k != key})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "dynamic", "factor": 0.5}, "factor: Input should be greater"),
        (
            {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 8},
            "transformers takes max_position_embeddings instead",
        ),
        ({**KINDS["llama3"][0], "rope_type": "llama3", "high_freq_factor": 1}, "must be less than"),
        ({"rope_type": "yarn", "factor": "4"}, "rope_scaling.factor: must be a number"),
        (
            {**KINDS["longrope"][0], "rope_type": "longrope", "short_factor": [1, 2]},
            "short has 2 factors for 5 pairs",
        ),
        (
            {**KINDS["longrope"][0], "rope_type": "longrope", "long_factor": 2},
            "long_factor: must be a list of numbers",
        ),
        ({"rope_type": "proportional", "factor": 2}, "'proportional' is not supported"),
        ({"rope_type": "mrope", "mrope_section": [1, 2]}, "'mrope' is not supported"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    """Case 59 among them: frequencies of 0 at the end are not a narrower rotation."""
    with pytest.raises(BadInput, match=message):
        read(rope_scaling=settings)


def test_a_setting_in_one_spelling_alone_is_refused() -> None:
    """transformers 5 reads rope_scaling alone where there are both."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    for one, other in (({"truncate": False}, {}), ({}, {"truncate": False})):
        with pytest.raises(BadInput, match="truncate"):
            read(rope_scaling={**yarn, **one}, rope_parameters={**yarn, **other})
    with pytest.raises(BadInput, match="two spellings of the factor disagree"):
        read(rope_scaling=yarn, rope_parameters={**yarn, "factor": 2.0})


# --- YaRN's magnitude and ramp, by transformers' rule


@pytest.mark.parametrize(
    ("factor", "more", "magnitude"),
    [
        (128.0, {"attention_factor": 1.4852}, 1.4852),  # case 51: final, and not a multiplier
        (16.0, {}, 1.2772589),  # case 52
        (16.0, {"mscale": 1, "mscale_all_dim": 1}, 1.0),
        (16.0, {"attention_factor": 1.0}, 1.0),
        (16.0, {"attention_factor": 1.0, "mscale": 0.7, "mscale_all_dim": 0.3}, 1.0),
        (16.0, {"mscale": 0.7}, 1.2772589),  # one of the two alone is not read
        (16.0, {"mscale": 0.707, "mscale_all_dim": 0}, 1.2772589),
        (1.0, {}, 1.0),
    ],
)
def test_yarns_magnitude(factor: float, more: dict[str, Any], magnitude: float) -> None:
    """Cases 51 and 52, and transformers' own function agrees with each."""
    inside = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 8, **more}
    got = scaling(rope_scaling=inside)
    assert got.magnitude == pytest.approx(magnitude, abs=5e-8)
    assert theirs(inside)[1] == got.magnitude


def theirs(inside: dict[str, Any], **sizes: Any) -> tuple[Any, float]:
    """transformers' own table and factor."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kept = {k: v for k, v in {**CONFIG, **sizes}.items() if k not in ("rope_theta", "model_type")}
    config = transformers.LlamaConfig(**kept, rope_parameters={"rope_theta": 500.0, **inside})
    table, factor = ROPE_INIT_FUNCTIONS[inside["rope_type"]](config, None)
    return table, factor


@pytest.mark.parametrize(("truncate", "second"), [(None, 0.217407), (False, 0.169172)])
def test_yarns_ramp_may_have_ends_between_pairs(truncate: Any, second: float) -> None:
    """Case 53."""
    more = {} if truncate is None else {"truncate": truncate}
    inside = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 64, **more}
    rope = read(rope_scaling=inside, rope_theta=10_000, head_dim=16).layers[0].attn.rope
    assert rope is not None
    assert frequencies(rope, 16, 1)[1] == pytest.approx(second, abs=5e-7)


def test_yarn_reads_the_ratio_of_the_lengths_where_the_factor_is_null() -> None:
    inside = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8}
    assert scaling(rope_scaling=inside).factor == 32 / 8


def test_llama3_from_its_config() -> None:
    """Case 50."""
    inside = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    sizes = {"head_dim": 64, "rope_theta": 500_000.0, "max_position_embeddings": 131_072}
    rope = read(rope_scaling=inside, **sizes).layers[0].attn.rope
    assert rope is not None
    plain = frequencies(Rope(base=500_000.0, pairs="half"), 64, 1)
    ratios = [a / b for a, b in zip(frequencies(rope, 64, 1), plain, strict=True)]
    assert ratios[:15] == [1.0] * 15
    assert ratios[15:18] == pytest.approx([0.60557, 0.30374, 0.10345], abs=5e-6)
    assert ratios[18:] == pytest.approx([1 / 32] * 14, rel=1e-15)


# --- dynamic NTK


def test_dynamic_scaling_from_its_config() -> None:
    """Case 56: from max_position_embeddings on the base grows with the length, and goes back."""
    inside = {"rope_type": "dynamic", "factor": 2.0}
    sizes = {"head_dim": 16, "rope_theta": 10_000.0, "max_position_embeddings": 64}
    spec = read(rope_scaling=inside, **sizes)
    rope = spec.layers[0].attn.rope
    assert rope is not None
    assert spec.max_len == 128
    second = [frequencies(rope, 16, longest)[1] for longest in (10, 64, 65, 128, 10)]
    wanted = [0.316228, 0.316228, 0.314841, 0.270296, 0.316228]
    assert second == pytest.approx(wanted, abs=5e-7)
    config = to_hf(spec)
    assert config["max_position_embeddings"] == 64
    assert not differences(from_hf(config), spec)


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.5, 3.3])
def test_a_length_that_is_no_multiple_comes_back(factor: float) -> None:
    spec = read(rope_scaling={"type": "dynamic", "factor": factor})
    assert spec.max_len == int(32 * factor)
    assert from_hf(to_hf(spec)).max_len == spec.max_len


# --- Gemma 3's two


def gemma3(**changes: Any) -> dict[str, Any]:
    config = hf_models.config("gemma3_text").to_dict()
    old = {"rope_theta": 5_000.0, "rope_local_base_freq": 100.0}
    config |= {**old, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, **changes}
    return {k: v for k, v in config.items() if v is not ...}


@pytest.mark.parametrize("gone", [(), ("rope_parameters",), ("rope_theta", "rope_scaling")])
def test_local_and_global_layers_have_their_own(gone: tuple[str, ...]) -> None:
    """Case 57: seven layers; the sixth alone is global, with its own base, positions over 8."""
    if "rope_theta" in gone:
        gone = (*gone, "rope_local_base_freq")
    spec = from_hf(gemma3(**dict.fromkeys(gone, ...)))
    ropes = [block.attn.rope for block in spec.layers]
    local = Rope(base=100.0, pairs="half")
    global_ = Rope(base=5_000.0, pairs="half", scaling=Linear(factor=8.0))
    assert ropes == [*[local] * 5, global_, local]
    assert [block.attn.window for block in spec.layers] == [*[17] * 5, None, 17]
    written = to_hf(spec)
    assert written["rope_parameters"].keys() == {"full_attention", "sliding_attention"}
    assert (written["rope_theta"], written["rope_local_base_freq"]) == (5_000.0, 100.0)
    assert written["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_local_base_freq": 200.0}, "spellings of the base disagree: rope_local_base_freq"),
        ({"rope_theta": 6.0}, "spellings of the base disagree: rope_theta=6.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "spellings of the factor"),
        ({"rope_parameters": {"rope_type": "default"}}, "must hold full_attention and sliding"),
    ],
)
def test_two_ropes_that_disagree_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        from_hf(gemma3(**changes))


def test_a_setting_that_transformers_does_not_read_when_nested_is_refused() -> None:
    """It looks for `truncate` beside the layer types and not within them."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 5.0, "truncate": False}
    nested = {"full_attention": yarn, "sliding_attention": {"rope_theta": 100.0}}
    olds = dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq"), ...)
    with pytest.raises(BadInput, match=r"full_attention.truncate: not read in a model"):
        from_hf(gemma3(rope_parameters=nested, **olds))


# --- one spelling from the other


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5.0},
        {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}},
        {"rope_parameters": {"rope_theta": 5.0}},
        {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_the_spelling_that_lacks_is_made_of_the_other(config: dict[str, Any]) -> None:
    """And transformers loads the very same from both."""
    full = in_both_spellings(config)
    assert {"rope_theta", "rope_scaling", "rope_parameters"} <= full.keys()
    one, both = (transformers.LlamaConfig(**c).to_dict() for c in (config, full))
    assert both == one
    assert in_both_spellings({"n_positions": 3}) == {"n_positions": 3}
