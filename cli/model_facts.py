"""A source speaks, and says what it is: a prompt continued, and the facts of its header."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jaxtwin.configs import BadInput, budget
from jaxtwin.configs.spec import to_json
from jaxtwin.parity.checkpoints.source import Source, open_source


def continuation(
    src: str,
    prompt: str | None,
    ids: str | None,
    tokens: int,
    temperature: float,
    top_k: int | None,
    stop: bool,
    dtype: str,
    seed: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """The prompt continued by the JAX model, as text where the source has a tokenizer."""
    import jax
    import numpy as np

    from jaxtwin import jaxmodel
    from jaxtwin.parity.sides import runs

    given = numbers(ids or "") if prompt is None else []
    progress(f"reading {src}")
    source = open_source(src, seed=seed)
    for note in source.notes:
        progress(f"note: {note}")
    tokenizer = source.tokenizer()
    if prompt is None:
        start = given
    elif tokenizer is None:
        raise BadInput(f"{src} comes without a tokenizer: give the prompt as --ids")
    else:
        start = tokenizer.encode(prompt).ids
        bos = source.ids.get("bos_token_id")
        if bos is not None and start[:2] == [bos, bos]:  # the prompt has it, and so the tokenizer
            progress("note: the prompt begins with the first token itself; it is given once")
            start = start[1:]
    if not start:
        raise BadInput("the prompt is empty: give at least one token to continue")
    with jax.enable_x64(dtype == "float64"):
        # Layers one by one: on a CPU they decode several times faster than stacked ones.
        model = runs.jax_model(source.spec, source.tensors, dtype, "unroll")
        progress("compiling and decoding")
        try:
            out = jaxmodel.generate(
                model,
                np.array([start]),
                tokens,
                temperature=temperature,
                top_k=top_k,
                eos=source.eos if stop else None,
                seed=seed,
                vocab=known(tokenizer, source.spec.vocab),
            )
        except ValueError as error:
            raise BadInput(str(error)) from None
    new = out[0, len(start) :].tolist()
    if len(new) < tokens and out.shape[1] == source.spec.max_len:
        progress(f"note: stopped at the model's context, {source.spec.max_len} tokens")
    if tokenizer is None:
        text = ",".join(map(str, new))
    else:
        text = tokenizer.decode([*start, *new], skip_special_tokens=False)
    return {"source": source.name, "prompt_ids": start, "new_ids": new, "text": text}


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
