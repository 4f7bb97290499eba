"""A config.json of Hugging Face transformers, read to a spec and written from one.

Every key is taken over, or must have a value that we compute, or is known to change nothing, or is
refused by name. What is written has both the spellings of transformers 4 and those of 5.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from jaxtwin.configs import BadInput, Model, nearest
from jaxtwin.parity.checkpoints.dialects.base import build_spec, differences
from jaxtwin.parity.checkpoints.dialects.hf_bloom import BLOOM
from jaxtwin.parity.checkpoints.dialects.hf_gemma import GEMMA, GEMMA2, GEMMA3
from jaxtwin.parity.checkpoints.dialects.hf_gpt2 import GPT2
from jaxtwin.parity.checkpoints.dialects.hf_keys import IGNORED, TOKEN_IDS, Family, one_dtype
from jaxtwin.parity.checkpoints.dialects.hf_llama import LLAMA, MISTRAL
from jaxtwin.parity.checkpoints.dialects.hf_olmo2 import OLMO2
from jaxtwin.parity.checkpoints.dialects.hf_qwen import QWEN2, QWEN3
from jaxtwin.parity.checkpoints.dialects.hf_rope import in_both_spellings

# In the order in which they are tried for a spec.
FAMILIES = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, GPT2, BLOOM, OLMO2)
}
# Models that hold a vision model too: the decoder within, by its own model_type.
WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
WITHIN = ("model.language_model.", "language_model.model.", "language_model.")  # before its names
BESIDE = ("vision", "multi_modal_projector", "visual")  # what is none of the decoder's
NOT_YET = {  # known by name, to be refused by name
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "llama4",
                     "llama4_text", "dbrx", "phimoe", "granitemoe"), "mixture of experts"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3"), "latent attention"),
    **dict.fromkeys(("mamba", "mamba2", "jamba", "zamba", "recurrent_gemma", "bamba"),
                    "state-space layers"),
    **dict.fromkeys(("t5", "bart", "whisper", "mt5"), "encoders"),
}  # fmt: skip
T = TypeVar("T")
HF_CONFIG = "hf_config.json"  # the config.json that a model came with, among the carried files


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a config's model_type; a BadInput that lists the supported ones."""
    inner = config.get("text_config")
    nested = inner.get("model_type") if isinstance(inner, Mapping) else None
    name = config.get("model_type", nested)
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    if isinstance(name, str) and name in NOT_YET:
        raise BadInput(f"{where}: model_type {name!r} is not supported yet: {NOT_YET[name]}")
    problem = "model_type is missing"
    if name is not None:
        problem = f"model_type {name!r} is not supported"
        if isinstance(name, str) and "did you mean" in (hint := nearest(name, FAMILIES)):
            problem += f" ({hint})"
    raise BadInput(f"{where}: {problem}; supported: {', '.join(sorted(FAMILIES))}")


def text_part(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The config of the decoder within a model of text and images; None where it is no such one."""
    inner = config.get("text_config")
    kind = WRAPPERS.get(str(config.get("model_type")))
    if kind is None:
        return None
    if not isinstance(inner, Mapping):
        raise BadInput(f"{where}: a {config['model_type']} must have the decoder's text_config")
    dtypes = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    tied = config.get("tie_word_embeddings")  # the whole model's class ties them, by its own flag
    flag = {} if tied is None else {"tie_word_embeddings": tied}
    return {**dtypes, **inner, **flag, "model_type": kind}


def text_tensors(tensors: Mapping[str, T], notes: list[str]) -> dict[str, T]:
    """The decoder's tensors within those of a model of text and images, as it names them alone."""
    out: dict[str, T] = {}
    beside = 0
    for name, tensor in tensors.items():
        prefix = next((p for p in WITHIN if name.startswith(p)), None)
        if prefix is None and any(word in name for word in BESIDE):
            beside += 1
        elif prefix is None:
            out[name] = tensor
        else:
            bare = name.removeprefix(prefix)
            out[bare if bare.startswith("lm_head") else f"model.{bare}"] = tensor
    notes.append(f"the decoder alone is read: {beside} tensors of the vision part are not")
    return out


def decoder_config(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """The decoder's own settings where they are nested in text_config, and notes for the user.

    The inner value counts. Where the outer part says otherwise, that is an error for all but the
    keys that change nothing, and for tying, whose outer value readers are known to get wrong.
    """
    if "text_config" not in config:
        return dict(config), []
    outer = {k: v for k, v in config.items() if k != "text_config"}
    inner = config["text_config"]
    if not isinstance(inner, Mapping):
        raise BadInput(f"{where}: text_config must hold settings, got {inner!r}")
    notes = []
    for key in sorted(k for k in outer.keys() & inner.keys() if outer[k] != inner[k]):
        problem = f"{where}: {key} is {outer[key]!r} at the top and {inner[key]!r} in text_config"
        if key not in IGNORED and key != "tie_word_embeddings":
            raise BadInput(problem)
        notes.append(f"{problem}; the one in text_config is used")
    return {**outer, **inner}, notes


def is_float8(config: Mapping[str, Any]) -> bool:
    """Whether the weights are float8 with scales, the one quantization that is read."""
    stated = config.get("quantization_config")
    return isinstance(stated, Mapping) and stated.get("quant_method") == "fp8"


def from_hf(
    config: Mapping[str, Any],
    where: str = "config.json",
    notes: list[str] | None = None,
    ignore: Collection[str] | None = (),
) -> Model:
    """The spec of a config.json; what a class supplies by itself is added to the notes.

    `ignore` are unknown keys that the user says change nothing that is computed; None for all.
    A BadInput lists every key that is missing, unknown (with the nearest known one), out of range
    or has a value that is not supported, and every pair of spellings that disagree.
    """
    family = family_of(config, where)
    config, found = decoder_config(config, where)
    if is_float8(config):  # of the tensors, which are read as their products
        del config["quantization_config"]
    fields = family.fields(config, where, ignore)
    one_dtype(fields)
    spec = build_spec(family.read, where, fields=fields)
    if config.get("tie_word_embeddings") is None:
        tied = "are" if family.tied else "are not"
        assumed = f"does not say whether embeddings are tied; a {family.architecture}'s {tied}"
        found.append(f"{where} {assumed}")
    if notes is not None:
        notes += [*found, *(f"{where}: {note}" for note in fields.notes)]
    return spec


def to_hf(
    spec: Model,
    dtype: str = "float32",
    ids: Mapping[str, Any] | None = None,
    original: Mapping[str, Any] | None = None,
    notes: list[str] | None = None,
) -> dict[str, Any]:
    """The config.json of a spec; `ids` are token ids to write in it.

    `original` is the config.json that the model came with. Where it still says what the spec says,
    every key of it is kept, so that transformers loads what it loaded before; else it is left out
    and a note says so. Without it the first family is taken whose class computes what the spec
    says. BadInput where no family fits, naming the first difference to the nearest. (Only the order
    of rotary pairs may differ: the rows of Q and K are reordered.)
    """
    ids = ids or {}
    if original is not None:
        kept, odd = _kept(spec, original)
        if kept is not None:
            # An id outside the vocabulary is used by nothing, and is kept as the file has it.
            known = {key: ids[key] for key in TOKEN_IDS if ids.get(key) is not None}
            return {**in_both_spellings(kept), "torch_dtype": dtype, "dtype": dtype, **known}
        if notes is not None:
            notes.append(f"the config.json that this model came with is not kept: {odd}")
    family, config = _written(spec)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **in_both_spellings(config),
        "torch_dtype": dtype,
        "dtype": dtype,
        **{key: ids.get(key) for key in TOKEN_IDS},  # absent ones would be the class's own
    }


def _kept(spec: Model, original: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The original's keys, or None and why they are not this model's."""
    where = "it"
    try:
        old = from_hf(original, where, ignore=None)  # it was read before, with what was ignored
        config, _ = decoder_config(original, where)
        config.pop("quantization_config", None)
    except BadInput as error:
        return None, str(error)
    if odd := differences(spec, old):
        return None, f"it has {odd[0][1]}, and this model has {odd[0][0]}"
    return config, ""


def _written(spec: Model) -> tuple[Family, dict[str, Any]]:
    """The first family that has such a model, and its keys."""
    tried: list[tuple[int, str]] = []
    for family in FAMILIES.values():
        try:
            config = family.write(spec)
            back = from_hf({"model_type": family.model_type, **config}, "the config to be written")
        except BadInput as error:
            tried.append((10**9, str(error)))
            continue
        odd = differences(spec, back)
        if not odd:
            return family, config
        ours, theirs = odd[0]
        problem = f"a Hugging Face {family.model_type} has {theirs}, and this model has {ours}"
        tried.append((len(odd), problem))
    raise BadInput(min(tried, key=lambda each: each[0])[1])
