"""Odd settings of every family: one clear error each or a model, and never a traceback."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from typing import Any

from jaxtwin.configs import PRESETS, BadInput, Model
from jaxtwin.parity.checkpoints.dialects import FAMILIES, from_hf, from_meta, to_hf, to_meta
from jaxtwin.parity.checkpoints.dialects.base import differences

ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 1.5, 0.0, -0.0, 1e-300, 1e300, math.nan, math.inf,
    2**31, 2**63, 2**70, "", "x", "3", "float8", "default", "silu", "gelu_new", [], [1], [0.5] * 4,
    ["full_attention"] * 3, ["sliding_attention", 2], {}, {"a": 1}, {"rope_type": "linear"},
    {"rope_type": "yarn", "factor": 2}, {"factor": None}, {"type": [1]}, b"bytes", (1, 2), 1 + 2j,
]  # fmt: skip
KEYS = [
    "head_dim", "num_key_value_heads", "rope_scaling", "rope_parameters", "rope_theta",
    "layer_types", "sliding_window", "hidden_act", "tie_word_embeddings", "text_config",
    "quantization_config", "attention_bias", "torch_dtype", "model_type", "architectures",
    "layer_norm_eps", "partial_rotary_factor", "eos_token_id", "_private", "num_beams", "n_inner",
    "a key that nobody knows", "", "pad_token_id", "max_position_embeddings",
]  # fmt: skip


def mutated(config: dict[str, Any], rng: random.Random) -> dict[Any, Any]:
    """One to four keys that are gone, odd, new, another's or nested."""
    out: dict[Any, Any] = copy.deepcopy(config)
    for _ in range(rng.randint(1, 4)):
        name = rng.choice([*out, *KEYS])
        change = rng.randrange(6)
        if change == 0:
            out.pop(name, None)
        elif change in (1, 2):
            out[name] = copy.deepcopy(rng.choice(ODD))
        elif change == 3:
            out[name] = copy.deepcopy(out.get(rng.choice(list(out) or [""])))
        elif change == 4 and isinstance(out.get(name), dict):
            inner = out[name]
            inner[rng.choice([*inner, "factor", "odd"])] = copy.deepcopy(rng.choice(ODD))
        elif change == 5 and rng.random() < 0.2:
            out = {"text_config": out, "model_type": rng.choice(["gemma3", "mistral3", "llava"])}
    return out


def published() -> list[dict[str, Any]]:
    """A config.json for each family: of the first preset that transformers has a class for."""
    found = {}
    for spec in PRESETS.values():
        try:
            config = to_hf(spec)
        except BadInput:
            continue
        found.setdefault(config["model_type"], config)
    return list(found.values())


def test_five_hundred_odd_configs() -> None:
    """What is read says what is written from it: the same model comes back."""
    bases = published()
    assert {base["model_type"] for base in bases} == set(FAMILIES)
    seen: Counter[str] = Counter()
    named: set[bool] = set()  # does the error name the config?
    for seed in range(450):
        rng = random.Random(seed)
        config = mutated(bases[seed % len(bases)], rng)
        try:
            spec = from_hf(config, f"config {seed}")
        except BadInput as error:
            seen["refused"] += 1
            named.add(f"config {seed}" in str(error))
            continue
        seen["read"] += 1
        assert isinstance(spec, Model)
        assert differences(from_hf(to_hf(spec)), spec) == []
    params = to_meta(PRESETS["llama3-8b"], [])
    for seed in range(50):
        odd = mutated(params, random.Random(seed))
        try:
            spec = from_meta(odd, {}, False, "params", [])
        except BadInput:
            seen["refused"] += 1
            continue
        seen["read"] += 1
        assert differences(from_meta(to_meta(spec, []), {}, False, "params", []), spec) == []
    assert named == {True}
    assert seen.total() == 500
    assert min(seen.values()) > 50
