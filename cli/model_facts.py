"""A prompt continued by a source's model, and the facts of its header."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxtwin.configs import BadInput, budget
from jaxtwin.configs.spec import to_json
from jaxtwin.parity.checkpoints.source import Source, open_source


@dataclass(frozen=True)
class Continuation:
    """A prompt, as text or as ids with commas, and how it is continued."""

    prompt: str | None = None
    ids: str | None = None
    tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    stop: bool = True  # at the model's end tokens
    dtype: str = "float32"
    seed: int = 0
    names: str | None = None  # of a state dict under a person's own names
    spec: str | None = None
    ignore: Sequence[str] = ()  # unknown keys of a config.json


def continuation(src: str, wanted: Continuation, progress: Callable[[str], None]) -> dict[str, Any]:
    """The prompt continued by the JAX model, as text where the source has a tokenizer."""
    ids = numbers(wanted.ids or "") if wanted.prompt is None else []
    progress(f"reading {src}")
    source = open_source(
        src, seed=wanted.seed, names=wanted.names, spec=wanted.spec, ignore=wanted.ignore
    )
    for note in source.notes:
        progress(f"note: {note}")
    tokenizer = source.tokenizer()
    if wanted.prompt is not None:
        ids = _encoded(source, tokenizer, wanted.prompt, progress)
    if not ids:
        raise BadInput("the prompt is empty: give at least one token to continue")
    new = _generated(source, ids, wanted, known(tokenizer, source.spec.vocab), progress)
    if len(new) < wanted.tokens and len(ids) + len(new) == source.spec.max_len:
        progress(f"note: stopped at the model's context, {source.spec.max_len} tokens")
    if tokenizer is None:
        text = ",".join(map(str, new))
    else:
        text = tokenizer.decode([*ids, *new], skip_special_tokens=False)
    return {"source": source.name, "prompt_ids": ids, "new_ids": new, "text": text}


def _encoded(
    source: Source, tokenizer: Any, prompt: str, progress: Callable[[str], None]
) -> list[int]:
    if tokenizer is None:
        raise BadInput(f"{source.name} comes without a tokenizer: give the prompt as --ids")
    ids: list[int] = tokenizer.encode(prompt).ids
    bos = source.ids.get("bos_token_id")
    if bos is not None and ids[:2] == [bos, bos]:  # the prompt has it, and so the tokenizer
        progress("note: the prompt already starts with the BOS token; a second one is not added")
        return ids[1:]
    return ids


def _generated(
    source: Source,
    ids: list[int],
    wanted: Continuation,
    vocab: int | None,
    progress: Callable[[str], None],
) -> list[int]:
    """The new ids."""
    import jax
    import numpy as np

    from jaxtwin import jaxmodel
    from jaxtwin.parity.sides import runs

    with jax.enable_x64(wanted.dtype == "float64"):
        # Layers one by one: on a CPU they decode several times faster than stacked ones.
        model = runs.jax_model(source.spec, source.tensors, wanted.dtype, "unroll")
        progress("compiling and decoding")
        try:
            out = jaxmodel.generate(
                model,
                np.array([ids]),
                wanted.tokens,
                temperature=wanted.temperature,
                top_k=wanted.top_k,
                eos=source.eos if wanted.stop else None,
                seed=wanted.seed,
                vocab=vocab,
            )
        except ValueError as error:
            raise BadInput(str(error)) from None
    new: list[int] = out[0, len(ids) :].tolist()
    return new


def known(tokenizer: Any, vocab: int) -> int | None:
    """How many ids the tokenizer can read back, where the embedding has more rows than that."""
    if tokenizer is None:
        return None
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return size if 0 < size < vocab else None


def numbers(text: str) -> list[int]:
    """Ids written with commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(
            f"--ids takes whole numbers with commas between them, got {text!r}"
        ) from None


def known_presets() -> list[dict[str, Any]]:
    """Every preset with its sizes; the JSON of `presets`."""
    from jaxtwin.configs import PRESETS
    from jaxtwin.parity.checkpoints.packages import PACKAGES

    return [
        {
            "name": name,
            "parameters": budget.parameters(spec).total,
            "layers": len(spec.layers),
            "d": spec.d,
            "vocab": spec.vocab,
            "max_len": spec.max_len,
            "install": PACKAGES[name].install if name in PACKAGES else None,
        }
        for name, spec in PRESETS.items()
    ]


def inspected(source: Source) -> dict[str, Any]:
    """The facts of an opened source; the JSON of `inspect`."""
    count = budget.parameters(source.spec)
    width = source.dtype.itemsize
    return {
        "name": source.name,
        "kind": source.kind,
        "names": source.dialect,
        "parameters": {"total": count.total, **asdict(count)},
        "tensors": len(source.published),
        "dtype": str(source.dtype),
        "bytes": {
            "weights": budget.weight_bytes(source.spec, width),
            "kv_cache_per_token": budget.kv_cache_bytes(source.spec, 1, 1, width),
        },
        "eos": list(source.eos),
        "carried": sorted(source.carry),
        "spec": to_json(source.spec),
        "notes": list(source.notes),
    }
