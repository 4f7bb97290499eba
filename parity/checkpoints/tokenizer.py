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
SPACE = "\u2581"  # how SentencePiece spells a space

LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")  # one pre-tokenizer, whatever its name
# Words as the regular expressions of the models' own tokenizer.json cut them: Llama 3 takes digits
# by up to three, Qwen one by one.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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


def _split_then_bytes(digits: str) -> Any:
    """WORDS with this pattern of digits, then spelled in bytes."""
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS % digits), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _three_digits() -> Any:
    """Llama 3's."""
    return _split_then_bytes(r"\p{N}{1,3}")


def _one_digit() -> Any:
    """Qwen's."""
    return _split_then_bytes(r"\p{N}")


PRE: dict[str, Callable[[], Any]] = {
    "smollm": _digits_then_bytes,
    "gpt-2": _bytes_alone,
    "qwen2": _one_digit,
    **dict.fromkeys(LLAMA_3, _three_digits),
}


def from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that a GGUF's metadata describes.

    BadInput when it has none, or one of a kind that is not supported, by name.
    """
    from tokenizers import AddedToken, processors

    ggml = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    _supported(ggml, where)
    tokens: list[str] = ggml["tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise BadInput(f"{where}: {len(tokens) - len(vocab)} tokens of its tokenizer appear twice")
    try:
        out = KINDS[ggml["model"]](ggml, vocab)
    except Exception as error:  # the library raises a bare Exception
        raise BadInput(f"{where}: its tokenizer cannot be built: {error}") from None
    kinds = ggml.get("token_type", [])
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        named = [t for t, k in zip(tokens, kinds, strict=False) if k == kind]
        added = [AddedToken(t, normalized=False, special=special) for t in named]
        (out.add_special_tokens if special else out.add_tokens)(added)
    if _adds_bos(ggml):
        bos = tokens[ggml["bos_token_id"]]
        out.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, ggml["bos_token_id"])],
        )
    return out


def _of_bytes(ggml: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    """Byte-level BPE: the merges as they are listed."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = [tuple(merge.split(" ", 1)) for merge in ggml["merges"]]
    # Llama 3's own: a word that is a token is that token, whatever its merges would make of it.
    words_first = ggml["pre"] in LLAMA_3
    out = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=words_first))
    if ggml["pre"] == "qwen2":  # its tokenizer.json composes; llama.cpp leaves that out
        out.normalizer = normalizers.NFC()
    out.pre_tokenizer = PRE[ggml["pre"]]()
    out.decoder = decoders.ByteLevel()
    return out


def _of_pieces(ggml: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    """SentencePiece's BPE as llama.cpp reads it: those neighbours join first that score highest.

    A score stands by the piece and not by the pair, so every way to cut a piece in two is a merge.
    Text that has no piece is spelled in bytes. A space goes before the text, and before what
    follows a special token, even where it begins with one.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    score = ggml["scores"]
    ranked = sorted(vocab, key=lambda token: (-score[vocab[token]], vocab[token]))
    merges = [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = ggml["tokens"][ggml.get("unknown_token_id", 0)]
    out = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    space: list[Any] = [normalizers.Replace(pattern=" ", content=SPACE)]
    undone: list[Any] = [
        decoders.Replace(pattern=SPACE, content=" "), decoders.ByteFallback(), decoders.Fuse()
    ]  # fmt: skip
    if ggml.get("add_space_prefix", True):
        space.insert(0, normalizers.Prepend(prepend=SPACE))
        undone.append(decoders.Strip(content=" ", left=1, right=0))
    out.normalizer, out.decoder = normalizers.Sequence(space), decoders.Sequence(undone)
    return out


# By tokenizer.ggml.model, and what each needs beside its tokens.
KINDS: dict[str, Callable[[Mapping[str, Any], dict[str, int]], Tokenizer]] = {
    "gpt2": _of_bytes,
    "llama": _of_pieces,
}
NEEDED = {"gpt2": ("tokens", "merges"), "llama": ("tokens", "scores", "token_type")}


def _adds_bos(ggml: Mapping[str, Any]) -> bool:
    """What the file says; where it says nothing, llama.cpp adds it for Llama's, of either kind."""
    default = ggml["model"] == "llama" or ggml.get("pre") in LLAMA_3
    return bool(ggml.get("add_bos_token", default and "bos_token_id" in ggml))


def _supported(ggml: Mapping[str, Any], where: str) -> None:
    if "model" not in ggml:
        raise BadInput(f"{where} carries no tokenizer")
    kind = ggml["model"]
    if kind not in list(KINDS):
        raise BadInput(f"{where}: tokenizer {kind!r} is not supported, only {sorted(KINDS)}")
    if kind == "gpt2" and ggml.get("pre") not in list(PRE):
        raise BadInput(
            f"{where}: pre-tokenizer {ggml.get('pre')!r} is not supported, only {sorted(PRE)}"
        )
    if missing := [key for key in NEEDED[kind] if not ggml.get(key)]:
        raise BadInput(f"{where}: its tokenizer lacks {' and '.join(missing)}")
    for key, of in (("tokens", str), ("merges", str), ("token_type", int), ("scores", float)):
        if not _listed(ggml.get(key, []), of):
            raise BadInput(f"{where}: {key} of its tokenizer must be a list of {of.__name__}")
    if kind == "gpt2" and (odd := [merge for merge in ggml["merges"] if " " not in merge]):
        raise BadInput(f"{where}: {odd[0]!r} is no merge of two tokens")
    count = len(ggml["tokens"])
    if kind == "llama" and (short := [k for k in NEEDED[kind] if len(ggml[k]) != count]):
        raise BadInput(f"{where}: its tokenizer has {count} tokens and {len(ggml[short[0]])} "
                       f"{short[0]}")  # fmt: skip
    if any(score != score for score in ggml.get("scores", [])):
        raise BadInput(f"{where}: scores of its tokenizer must be numbers, and one is NaN")
    for theirs in ROLES.values():
        if type(at := ggml.get(f"{theirs}_token_id", 0)) is not int:
            raise BadInput(f"{where}: tokenizer.ggml.{theirs}_token_id must be an id, got {at!r}")
    always = ("add_eos_token", "add_sep_token")
    for flag in always if kind == "llama" else (*always, "add_space_prefix"):
        if ggml.get(flag):
            raise BadInput(f"{where}: {flag} is not supported with this kind of tokenizer")
    if _adds_bos(ggml) and "bos_token_id" not in ggml:
        raise BadInput(f"{where}: add_bos_token is set and there is no bos_token_id")
    if _adds_bos(ggml) and not 0 <= ggml["bos_token_id"] < count:
        raise BadInput(
            f"{where}: add_bos_token is set and bos_token_id is {ggml['bos_token_id']}, "
            f"which is none of its {count} tokens"
        )
    if kind == "llama" and not 0 <= (at := ggml.get("unknown_token_id", 0)) < count:
        raise BadInput(f"{where}: unknown_token_id is {at}, which is none of its {count} tokens")


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
        "add_bos_token": tokenizer.post_processor is not None,
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
