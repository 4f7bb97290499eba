"""Rotary positions in a config.json, in both spellings.

transformers 4 has rope_theta beside rope_scaling, transformers 5 has both in rope_parameters. They
are read together and must agree. `kind` is what rope_type (once: type) says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxtwin.configs.spec import DynamicNTK, Linear, Llama3, LongRope, Model, Rope, Scaling, Yarn
from jaxtwin.parity.checkpoints.dialects.base import Fields, complaints, is_number

LAYER_TYPES = ("full_attention", "sliding_attention")
ORIGINAL = "original_max_position_embeddings"
FLAT = ("rope_theta", "rope_scaling", "rope_parameters")
LOCAL_BASE = "rope_local_base_freq"


def rope(fields: Fields, length: int | None) -> Rope | None:
    """The one rope of a model; None where the fields have problems. `length`: its positions."""
    fields.taken |= set(FLAT)
    groups = {name: fields.settings.get(name) for name in FLAT[1:]}
    return _rope(fields, groups, "rope_theta", length)


def ropes(fields: Fields, length: int | None) -> dict[str, Rope | None]:
    """Gemma 3's two, by layer type: rope_parameters is nested, rope_scaling is the global one's."""
    fields.taken |= {*FLAT, LOCAL_BASE}
    nested = fields.settings.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not nested.keys() <= set(LAYER_TYPES):
        fields.problems.append(f"rope_parameters: must hold {' and '.join(LAYER_TYPES)}")
        nested = {}
    inner = {name: {f"rope_parameters.{name}": nested.get(name)} for name in LAYER_TYPES}
    full = {"rope_scaling": fields.settings.get("rope_scaling"), **inner["full_attention"]}
    found = {
        "full_attention": _rope(fields, full, "rope_theta", length),
        "sliding_attention": _rope(fields, inner["sliding_attention"], LOCAL_BASE, length),
    }
    for name, one in found.items():
        if one is not None and isinstance(one.scaling, Yarn) and not one.scaling.truncate:
            fields.problems.append(
                f"rope_parameters.{name}.truncate: not read in a model with two ropes"
            )
    return found


def longest(found: Mapping[str, Rope | None], length: int) -> int:
    """max_len: transformers' "dynamic" takes inputs of up to `factor` times the length."""
    kinds = [one.scaling for one in found.values() if one is not None]
    grown = [int(length * s.factor) for s in kinds if isinstance(s, DynamicNTK)]
    return max([length, *grown])


def length_of(spec: Model) -> int:
    """max_position_embeddings, the inverse of `longest`."""
    kinds = [block.attn.rope.scaling for block in spec.layers if block.attn.rope]
    return min([spec.max_len, *(s.original for s in kinds if isinstance(s, DynamicNTK))])


def _rope(
    fields: Fields, groups: Mapping[str, Any], base_key: str, length: int | None
) -> Rope | None:
    """One rope from the base beside the groups and what the groups say."""
    bases: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    if fields.settings.get(base_key) is not None:
        bases[base_key] = fields.settings[base_key]
    rest: dict[str, dict[str, Any]] = {}
    for label, inside in groups.items():
        if inside is None:
            continue
        if not isinstance(inside, Mapping):
            fields.problems.append(f"{label}: must hold settings or null, got {inside!r}")
            continue
        rest[label] = {}
        for key, value in inside.items():
            if key == "rope_theta":
                bases[f"{label}.{key}"] = value
            elif key in ("rope_type", "type"):
                kinds[f"{label}.{key}"] = value
            else:
                rest[label][key] = value
    agreed = _agree(fields, "base", bases) and _agree(fields, "rope type", kinds)
    kind = next(iter(kinds.values()), "default")
    if not isinstance(kind, str) or kind not in KINDS:
        where = next(iter(kinds))
        known = ", ".join(KINDS)
        fields.problems.append(f"{where}: rope type {kind!r} is not supported; known: {known}")
        return None
    scaling = _scaling(fields, kind, rest, length) if agreed else None
    if not bases and base_key not in fields.settings and base_key in fields.defaults:
        bases[base_key] = fields.default(base_key)
    if not bases:
        where = next((f"{label}.rope_theta" for label in [*groups][-1:]), "")
        fields.problems.append(f"{base_key}: missing, and so is {where}; a base is never guessed")
    elif not all(is_number(base) and base > 0 for base in bases.values()):
        fields.problems.append(f"the rotary base must be a number above 0, got {bases}")
    elif not fields.problems:
        return Rope(base=float(next(iter(bases.values()))), pairs="half", scaling=scaling)
    return None


def _agree(fields: Fields, what: str, values: Mapping[str, Any]) -> bool:
    """Whether all spellings of it say the same; a problem where they do not."""
    same = len({repr(float(x) if is_number(x) else x) for x in values.values()}) < 2
    if not same:
        listed = ", ".join(f"{key}={value!r}" for key, value in values.items())
        fields.problems.append(f"two spellings of the {what} disagree: {listed}")
    return same


def _scaling(
    fields: Fields, kind: str, groups: Mapping[str, dict[str, Any]], length: int | None
) -> Scaling | None:
    """What a kind's settings make; their problems are added to those of the fields."""
    import pydantic

    label = next(iter(groups), "rope_parameters")
    settings: dict[str, Any] = {}
    for name, inside in groups.items():
        settings |= inside
        for key in inside:
            values = {f"{other}.{key}": group.get(key) for other, group in groups.items()}
            if kind != "default" and name == label:
                _agree(fields, key, values)
            elif kind != "default" and key not in groups[label]:
                fields.problems.append(f"{name}.{key}: not in {label}, which transformers reads")
    fixed = {"partial_rotary_factor": (1, None)}
    ignored = {}
    if kind == "default":  # what only scaled kinds read
        fixed |= {"factor": (1, None)}
        ignored = {ORIGINAL: "of scaled kinds"}
    inner = Fields(settings, label, fixed=fixed, ignored=ignored)
    out = None
    try:
        out = KINDS[kind](inner, length)
    except pydantic.ValidationError as error:
        inner.problems += complaints(error)
    inner.leftovers()
    fields.problems += [f"{label}.{problem}" for problem in inner.problems]
    return out


def _default(fields: Fields, length: int | None) -> None:
    return None


def _linear(fields: Fields, length: int | None) -> Linear | None:
    factor = fields.number("factor")
    return None if fields.problems else Linear(factor=factor)


def _dynamic(fields: Fields, length: int | None) -> DynamicNTK | None:
    """Its original length is max_position_embeddings and nothing else."""
    factor = fields.number("factor")
    if fields.positive_int(ORIGINAL, absent=length) != length:
        fields.problems.append(f"{ORIGINAL}: transformers takes max_position_embeddings instead")
    if fields.problems or length is None:
        return None
    return DynamicNTK(factor=factor, original=length)


def _yarn(fields: Fields, length: int | None) -> Yarn | None:
    original = fields.positive_int(ORIGINAL, absent=length)
    factor = fields.number("factor", null=None)
    scale = fields.number("attention_factor", absent=None)
    over, under = (fields.number(key, absent=None) for key in ("mscale", "mscale_all_dim"))
    fast = fields.number("beta_fast", absent=None) or 32.0
    slow = fields.number("beta_slow", absent=None) or 1.0
    truncate = fields.flag("truncate", absent=True)
    if fields.problems or length is None:
        return None
    if factor is None:
        factor = length / original
    if scale is None:
        scale = magnitude(factor)
        if over and under:
            scale = magnitude(factor, over) / magnitude(factor, under)
    return Yarn(
        factor=factor, original=original, fast=fast, slow=slow, truncate=truncate, magnitude=scale
    )


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's own, of which `attention_factor` is an override (cos and sin are multiplied by it)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(fields: Fields, length: int | None) -> Llama3 | None:
    factor = fields.number("factor")
    low, high = (fields.number(key) for key in ("low_freq_factor", "high_freq_factor"))
    original = fields.positive_int(ORIGINAL, absent=length)
    if fields.problems or length is None:
        return None
    return Llama3(factor=factor, low=low, high=high, original=original)


def _longrope(fields: Fields, length: int | None) -> LongRope | None:
    short, long = (fields.numbers(key) for key in ("short_factor", "long_factor"))
    original = fields.positive_int(ORIGINAL, absent=length)
    factor = fields.number("factor", absent=None)
    scale = fields.number("attention_factor", absent=None)
    if original == 1 and scale is None:
        fields.problems.append(f"{ORIGINAL}: 1 gives no attention_factor")
    if fields.problems or length is None:
        return None
    if scale is None:
        ratio = length / original if factor is None else factor
        scale = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return LongRope(short=short, long=long, original=original, magnitude=scale)


KINDS: dict[str, Callable[[Fields, int | None], Any]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def parameters(rope: Rope) -> dict[str, Any]:
    """rope_parameters, as transformers 5 has them."""
    return {"rope_type": "default", **written(rope.scaling), "rope_theta": rope.base}


def written(scaling: Scaling | None) -> dict[str, Any]:
    """The settings of a kind, those left out that it has anyway."""
    match scaling:
        case Linear(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case DynamicNTK(factor=factor):
            return {"rope_type": "dynamic", "factor": factor}
        case Llama3():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                ORIGINAL: scaling.original,
            }
        case LongRope():
            return {
                "rope_type": "longrope",
                "short_factor": list(scaling.short),
                "long_factor": list(scaling.long),
                ORIGINAL: scaling.original,
                "attention_factor": scaling.magnitude,
            }
        case Yarn():
            derived = scaling.magnitude == magnitude(scaling.factor)
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                ORIGINAL: scaling.original,
                "beta_fast": scaling.fast,
                "beta_slow": scaling.slow,
                **({} if derived else {"attention_factor": scaling.magnitude}),
                **({} if scaling.truncate else {"truncate": False}),
            }
    return {}


def in_both_spellings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config in both spellings, the absent one made from the other."""
    new = config.get("rope_parameters")
    out = dict(config)
    if new:
        nested = "full_attention" in new
        full = new["full_attention"] if nested else new
        base = full.get("rope_theta", config.get("rope_theta"))
        if base is not None:
            out["rope_theta"] = base
        if nested:
            local = new["sliding_attention"].get("rope_theta", config.get(LOCAL_BASE))
            out |= {} if local is None else {LOCAL_BASE: local}
        if "rope_scaling" not in config:
            old = {k: v for k, v in full.items() if k != "rope_theta"}
            plain = old.get("rope_type", "default") == "default"
            out["rope_scaling"] = None if plain else old
    elif config.get("rope_theta") is not None:
        old = config.get("rope_scaling") or {}
        kind = old.get("rope_type", old.get("type", "default"))
        full = {
            **old,
            "rope_type": kind,
            "rope_theta": old.get("rope_theta", config["rope_theta"]),
        }
        out["rope_scaling"] = config.get("rope_scaling")
        out["rope_parameters"] = full
        if LOCAL_BASE in config:
            local = {"rope_type": "default", "rope_theta": config[LOCAL_BASE]}
            out["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return out
