"""The tokenizer that travels with a model: from tokenizer.json, or rebuilt from GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxtwin.configs import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # HF's name, GGUF's name


def _digits_then_bytes() -> Any:
    """SmolLM's: every digit by itself, then GPT-2's words, spelled in bytes.

    A digit by itself is what the training tokenizer did (its tokenizer.json says so) and what
    llama.cpp does for "smollm". transformers drops that step when it reads the same GGUF: its
    table of pre-tokenizers has no "smollm", and the class that it falls back to has GPT-2's steps
    alone. In this vocabulary no merge joins 0 to 9, so that shows less on digits than beside them:
    four spaces before a "1" are one token for it, and three and one for transformers.
    """
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _bytes_alone() -> Any:
    """GPT-2's own: its words, spelled in bytes."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


PRE: dict[str, Callable[[], Any]] = {"smollm": _digits_then_bytes, "gpt-2": _bytes_alone}


def from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that a GGUF's metadata describes.

    BadInput when it has none, or one of a kind that is not supported, by name.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    ggml = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    _supported(ggml, where)
    tokens: list[str] = ggml["tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in ggml["merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise BadInput(f"{where}: {len(tokens) - len(vocab)} tokens of its tokenizer appear twice")
    try:
        out = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the library raises a bare Exception
        raise BadInput(f"{where}: its tokenizer cannot be built: {error}") from None
    out.pre_tokenizer = PRE[ggml["pre"]]()
    out.decoder = decoders.ByteLevel()
    kinds = ggml.get("token_type", [])
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        named = [t for t, k in zip(tokens, kinds, strict=False) if k == kind]
        added = [AddedToken(t, normalized=False, special=special) for t in named]
        (out.add_special_tokens if special else out.add_tokens)(added)
    if ggml.get("add_bos_token"):
        bos = tokens[ggml["bos_token_id"]]
        out.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, ggml["bos_token_id"])],
        )
    return out


def _supported(ggml: Mapping[str, Any], where: str) -> None:
    if "model" not in ggml:
        raise BadInput(f"{where} carries no tokenizer")
    if ggml["model"] != "gpt2":
        raise BadInput(f"{where}: tokenizer {ggml['model']!r} is not supported, only 'gpt2'")
    if ggml.get("pre") not in list(PRE):
        raise BadInput(
            f"{where}: pre-tokenizer {ggml.get('pre')!r} is not supported, only {sorted(PRE)}"
        )
    if missing := [key for key in ("tokens", "merges") if not ggml.get(key)]:
        raise BadInput(f"{where}: its tokenizer lacks {' and '.join(missing)}")
    for key, kind in (("tokens", str), ("merges", str), ("token_type", int)):
        if not _listed(ggml.get(key, []), kind):
            raise BadInput(f"{where}: {key} of its tokenizer must be a list of {kind.__name__}")
    if odd := [merge for merge in ggml["merges"] if " " not in merge]:
        raise BadInput(f"{where}: {odd[0]!r} is no merge of two tokens")
    for theirs in ROLES.values():
        if type(at := ggml.get(f"{theirs}_token_id", 0)) is not int:
            raise BadInput(f"{where}: tokenizer.ggml.{theirs}_token_id must be an id, got {at!r}")
    for flag in ("add_space_prefix", "add_eos_token", "add_sep_token"):
        if ggml.get(flag):
            raise BadInput(f"{where}: {flag} is not supported with this kind of tokenizer")
    if ggml.get("add_bos_token") and "bos_token_id" not in ggml:
        raise BadInput(f"{where}: add_bos_token is set and there is no bos_token_id")
    if ggml.get("add_bos_token") and not 0 <= ggml["bos_token_id"] < len(ggml["tokens"]):
        raise BadInput(
            f"{where}: add_bos_token is set and bos_token_id is {ggml['bos_token_id']}, "
            f"which is none of its {len(ggml['tokens'])} tokens"
        )


def _listed(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)


def files_from_gguf(
    metadata: Mapping[str, Any], where: str, vocab: int | None = None
) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json, as transformers' AutoTokenizer reads them.

    BadInput as from_gguf, and when the tokens are more than the model's vocabulary.
    """
    tokenizer = from_gguf(metadata, where)
    if vocab is not None and (count := tokenizer.get_vocab_size()) > vocab:
        raise BadInput(f"{where}: its tokenizer has {count} tokens, and its model only {vocab}")
    roles = {}
    for ours, theirs in ROLES.items():
        at = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if at is not None and 0 <= at < len(metadata["tokenizer.ggml.tokens"]):
            roles[f"{ours}_token"] = tokenizer.id_to_token(at)
    config: dict[str, Any] = {
        # The class that takes tokenizer.json as it is; a model's own class would rebuild it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token")),
        "clean_up_tokenization_spaces": False,
        **roles,
    }
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
    }


def from_json(data: bytes, where: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises a bare Exception
        raise BadInput(f"{where} is not a sound tokenizer.json: {error}") from None
