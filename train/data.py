"""Tokens to train on, and the order they come in.

The text is the source of the running Python's standard library: a few tens of megabytes that every
machine has. It is tokenized once, kept, and cut into rows; grain shuffles the rows and remembers
its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import tokenize
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import tokenizers
from jax.sharding import Mesh

from jaxtwin.configs import BadInput
from jaxtwin.configs.runs import Data, Training
from jaxtwin.train import loss, mesh
from jaxtwin.train.step import Batch

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
BYTES = 256  # ids below this are bytes; this one ends a document


@dataclass(frozen=True)
class Tokens:
    """The whole text as ids, documents one after another, each followed by `end`."""

    ids: np.ndarray
    end: int
    name: str  # the same for the same text, tokenizer and end


def documents(max_bytes: int) -> list[str]:
    """The standard library's files in the order of their paths, whole, up to that many bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not SKIPPED & set(path.relative_to(root).parts)
    )
    texts = []
    for name in found:
        max_bytes -= (root / name).stat().st_size
        if max_bytes < 0:
            break
        with tokenize.open(root / name) as file:  # obeys the file's declared encoding
            texts.append(file.read())
    if not texts:
        raise BadInput(f"data.max_bytes allows not one file of the standard library in {root}")
    return texts


def tokens(
    config: Data, vocab: int, tokenizer: bytes | None, eos: Sequence[int], cache: Path
) -> Tokens:
    """The text as ids of that tokenizer.json, or as bytes where there is none.

    A document ends with `data.eos`, or else with the first of the checkpoint's own `eos` (bytes:
    with 256). Read from `cache` when the same text was tokenized before. BadInput when no id ends a
    document, or an id falls outside the vocabulary: JAX would clamp or wrap it silently.
    """
    texts = documents(config.max_bytes)
    if config.eos is not None:
        eos = [config.eos]
    elif tokenizer is None:
        eos = [BYTES]
    if not eos:
        raise BadInput("the checkpoint names no end token; set data.eos to what ends a document")
    end = eos[0]
    key = json.dumps([end, tokenizers.__version__, texts]).encode() + (tokenizer or b"")
    name = hashlib.sha256(key).hexdigest()[:16]
    path = cache / f"{name}.npy"
    if path.exists():
        ids = np.load(path, mmap_mode="r")
        return Tokens(_checked(ids, end, vocab, tokenizer is None), end, name)
    parts = _bytes(texts) if tokenizer is None else _encoded(tokenizer, texts)
    stop = np.array([end], np.int32)
    ids = np.concatenate([x for part in parts for x in (part, stop)])
    return Tokens(_checked(ids, end, vocab, tokenizer is None), end, name)


def store(tokens: Tokens, cache: Path) -> None:
    """Keeps the tokens where `tokens` will look for them; a cut-off write leaves no file there."""
    path = cache / f"{tokens.name}.npy"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        hidden = cache / f".{uuid.uuid4().hex}.npy"
        np.save(hidden, tokens.ids)
        os.replace(hidden, path)


def _bytes(texts: list[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def _encoded(file: bytes, texts: list[str]) -> list[np.ndarray]:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(file)
    except Exception as error:  # the library raises nothing more exact
        raise BadInput(f"the checkpoint's tokenizer.json cannot be read: {error}") from None
    # The file may carry a chat's settings: truncation, padding, tokens added in front.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a source file is text
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encodings]


def _checked(ids: np.ndarray, end: int, vocab: int, raw: bool) -> np.ndarray:
    top = max(int(ids.max()), end)
    if top >= vocab:
        source = "the text, in bytes for want of a tokenizer.json," if raw else "the tokenizer"
        raise BadInput(f"{source} has id {top}, but the model's vocabulary ends at {vocab - 1}")
    return ids


@dataclass(frozen=True)
class Rows:
    """Row i: the tokens from i * length on, and one more, which the last of them predicts."""

    tokens: Tokens
    length: int

    def __len__(self) -> int:
        return (len(self.tokens.ids) - 1) // self.length

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        row = np.asarray(self.tokens.ids[i * self.length :][: self.length + 1], np.int32)
        return example(row, self.tokens.end)


def example(row: np.ndarray, end: int) -> dict[str, np.ndarray]:
    """One row (t+1) as a Batch's fields (t): every document a segment with its own positions.

    A document's end belongs to it and predicts nothing: what follows it is another document.
    """
    ids, labels = loss.shift(row)
    last = ids == end
    segments = np.cumsum(last, dtype=np.int32) - last
    at = np.arange(len(ids), dtype=np.int32)
    starts = np.maximum.accumulate(np.where(np.diff(segments, prepend=0) > 0, at, 0))
    return {
        "ids": ids,
        "labels": np.where(last, np.int32(loss.IGNORE), labels),
        "positions": at - starts.astype(np.int32),
        "segments": segments.astype(np.int32),
    }


class Feed:
    """Batches on the devices, without end: rows shuffled by the seed, anew in every epoch.

    Every host computes the same order and puts on its devices only the rows they hold, so the
    global batch, and the place in it, do not depend on how many hosts there are.
    """

    def __init__(self, run: Training, tokens: Tokens, devices: Mesh):
        rows = Rows(tokens, run.length)
        if len(rows) == 0:
            raise BadInput(
                f"the text has {len(tokens.ids)} tokens, too few for length={run.length}; "
                "raise data.max_bytes"
            )
        self.sharding = mesh.rows(devices)
        self.same = {
            "batch": run.batch,
            "length": run.length,
            "seed": run.seed,
            "tokens": tokens.name,
        }
        order = grain.MapDataset.source(rows).shuffle(seed=run.seed).repeat()
        batches = order.batch(run.batch, drop_remainder=True)
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        self.iterator = iter(batches.to_iter_dataset(ahead))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return place(Batch(**next(self.iterator)), self.sharding)

    def state(self) -> dict[str, Any]:
        """The place in the order, and what the order depends on."""
        return {"iterator": self.iterator.get_state(), "same": self.same}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from there, or a BadInput if the order has changed since: rows would repeat."""
        was = state["same"]
        changed = [
            f"{key} was {was.get(key)}, is {now}"
            for key, now in self.same.items()
            if was.get(key) != now
        ]
        if changed:
            raise BadInput(
                "the checkpoint's place in the data means nothing here: "
                + "; ".join(changed)
                + "; start in a new folder, or restore what changed"
            )
        self.iterator.set_state(state["iterator"])


def place(batch: Batch, sharding: jax.sharding.Sharding) -> Batch:
    """A host's batch (all rows) on the devices, each taking its own rows."""
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda at: x[at]), batch
    )
