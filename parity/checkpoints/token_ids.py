"""The ids that begin, end and fill texts: integers of the vocabulary, or left out with a note."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtwin.configs import BadInput, Model
from jaxtwin.parity.checkpoints import files
from jaxtwin.parity.checkpoints.dialects.hf_keys import TOKEN_IDS

GENERATION = "generation_config.json"


def within(given: Any, spec: Model, where: str, notes: list[str]) -> list[int]:
    """The token ids, one or several, that are in the vocabulary; a note on the others."""
    listed = given if isinstance(given, list) else [] if given is None else [given]
    if odd := [at for at in listed if type(at) is not int]:
        raise BadInput(f"{where} must be a token's id (an integer), got {odd[0]!r:.60}")
    good = [at for at in listed if 0 <= at < spec.vocab]
    if len(good) < len(listed):
        notes.append(f"{where} is {given}: ids outside the vocabulary of {spec.vocab} are left out")
    return good


def sound(
    given: Mapping[str, Any], spec: Model, where: str, notes: list[str]
) -> dict[str, int | list[int] | None]:
    """bos, eos and pad as they are given, without the ids that no token has."""
    out: dict[str, int | list[int] | None] = {}
    for key in TOKEN_IDS:
        if key in given:
            many = isinstance(given[key], list)
            if many and key != "eos_token_id":
                raise BadInput(f"{where}: {key} must be one token's id, got {given[key]!r:.60}")
            good = within(given[key], spec, f"{where}: {key}", notes)
            out[key] = (good if many else good[0]) if good else None
    return out


def ggml(
    metadata: Mapping[str, Any], spec: Model, where: str, notes: list[str]
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A GGUF's bos, eos and pad, and every id that ends a text."""

    def one(role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        if isinstance(metadata.get(key), list):
            raise BadInput(f"{where}: {key} must be one token's id, got {metadata[key]!r:.60}")
        good = within(metadata.get(key), spec, f"{where}: {key}", notes)
        return good[0] if good else None

    ids = {"bos_token_id": one("bos"), "eos_token_id": one("eos"), "pad_token_id": one("padding")}
    ends = (at for at in (ids["eos_token_id"], one("eot")) if at is not None)
    return ids, tuple(dict.fromkeys(ends))


def ends(
    ids: Mapping[str, Any], generation: bytes | None, spec: Model, where: str, notes: list[str]
) -> tuple[int, ...]:
    """Every id that ends a text: generation_config.json's where it has some, else config.json's."""
    given = ids.get("eos_token_id")
    if generation is not None:
        file = f"{GENERATION} of {where}"
        said = files.parsed(generation, file).get("eos_token_id")
        given = given if said is None else within(said, spec, f"{file}: eos_token_id", notes)
    return tuple(dict.fromkeys(within(given, spec, f"{where}: eos_token_id", notes)))
