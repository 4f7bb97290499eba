"""The ids that begin, end and fill texts: integers of the vocabulary, or left out with a note."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtwin.configs import BadInput, Model
from jaxtwin.parity.checkpoints import files
from jaxtwin.parity.checkpoints.dialects.hf_keys import TOKEN_IDS

GENERATION = "generation_config.json"


def in_vocabulary(value: Any, spec: Model, where: str, notes: list[str]) -> list[int]:
    """The token ids, one or several, that are in the vocabulary; a note on the others."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if odd := [at for at in listed if type(at) is not int]:
        raise BadInput(f"{where} must be a token's id (an integer), got {odd[0]!r:.60}")
    good = [at for at in listed if 0 <= at < spec.vocab]
    if len(good) < len(listed):
        notes.append(f"{where} is {value}: ids outside the vocabulary of {spec.vocab} are left out")
    return good


def from_config(
    config: Mapping[str, Any], spec: Model, where: str, notes: list[str]
) -> dict[str, int | list[int] | None]:
    """A config.json's bos, eos and pad ids, without those outside the vocabulary."""
    out: dict[str, int | list[int] | None] = {}
    for key in TOKEN_IDS:
        if key in config:
            many = isinstance(config[key], list)
            if many and key != "eos_token_id":
                raise BadInput(f"{where}: {key} must be one token's id, got {config[key]!r:.60}")
            good = in_vocabulary(config[key], spec, f"{where}: {key}", notes)
            out[key] = (good if many else good[0]) if good else None
    return out


def from_gguf(
    metadata: Mapping[str, Any], spec: Model, where: str, notes: list[str]
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A GGUF's bos, eos and pad, and every id that ends a text."""

    def one(role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        if isinstance(metadata.get(key), list):
            raise BadInput(f"{where}: {key} must be one token's id, got {metadata[key]!r:.60}")
        good = in_vocabulary(metadata.get(key), spec, f"{where}: {key}", notes)
        return good[0] if good else None

    ids = {"bos_token_id": one("bos"), "eos_token_id": one("eos"), "pad_token_id": one("padding")}
    eos = (at for at in (ids["eos_token_id"], one("eot")) if at is not None)
    return ids, tuple(dict.fromkeys(eos))


def eos_ids(
    ids: Mapping[str, Any], generation: bytes | None, spec: Model, where: str, notes: list[str]
) -> tuple[int, ...]:
    """Every id that ends a text: generation_config.json's where it has some, else config.json's."""
    eos = ids.get("eos_token_id")
    if generation is not None:
        file = f"{GENERATION} of {where}"
        stated = files.parsed(generation, file).get("eos_token_id")
        eos = eos if stated is None else in_vocabulary(stated, spec, f"{file}: eos_token_id", notes)
    return tuple(dict.fromkeys(in_vocabulary(eos, spec, f"{where}: eos_token_id", notes)))
