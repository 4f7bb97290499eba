"""The text, its tokens, and the order they come in."""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers

from jaxtwin.configs import BadInput
from jaxtwin.configs.runs import Data
from jaxtwin.tests.helpers import kit, training
from jaxtwin.train import data, loss, mesh

TEXT = Data(source="stdlib", max_bytes=30_000)


def test_whole_files_of_the_standard_library_in_order() -> None:
    texts = data.documents(30_000)
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    names = [n for n in names if not {"test", "tests", "site-packages"} & set(n.split("/"))]
    due = [(root / name).read_text(encoding="utf-8") for name in names[: len(texts)]]
    assert texts == due
    total = sum(len(text.encode()) for text in texts)
    assert total <= 30_000 < total + (root / names[len(texts)]).stat().st_size
    with pytest.raises(BadInput, match=r"data\.max_bytes allows not one file"):
        data.documents(10)


def test_bytes_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    tokens = data.tokens(TEXT, 257, None, (), tmp_path)
    parts = bytes_of(tokens.ids, 256)
    assert parts == [text.encode() for text in data.documents(TEXT.max_bytes)]
    message = "the text, in bytes for .*, has id 256, but the model's vocabulary ends at 255"
    with pytest.raises(BadInput, match=message):
        data.tokens(TEXT, 256, None, (), tmp_path)


def bytes_of(ids: np.ndarray, end: int) -> list[bytes]:
    assert ids[-1] == end
    cuts = np.flatnonzero(ids == end)
    return [bytes(part[part != end].tolist()) for part in np.split(ids, cuts + 1)[:-1]]


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    """A small byte-level BPE, saved with everything that a chat adds."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(data.documents(20_000), trainer)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
    )
    made.enable_truncation(7)
    made.enable_padding()  # to the longest of a batch, with id 0
    return made


def test_the_checkpoints_own_tokenizer(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """No chat settings, one end a document, and every character there."""
    file = tokenizer.to_str().encode()
    tokens = data.tokens(TEXT, 300, file, (1, 0), tmp_path)
    assert tokens.end == 1
    assert (tokens.ids == 1).sum() == len(data.documents(TEXT.max_bytes))
    assert (tokens.ids != 0).all()
    cuts = np.flatnonzero(tokens.ids == 1)
    parts = [part[part != 1].tolist() for part in np.split(tokens.ids, cuts + 1)[:-1]]
    assert tokenizer.decode_batch(parts) == data.documents(TEXT.max_bytes)
    top = tokens.ids.max()
    with pytest.raises(BadInput, match=f"the tokenizer has id {top}, but .* ends at {top - 1}"):
        data.tokens(TEXT, top, file, (1,), tmp_path)


def test_a_special_token_in_the_text_is_text(tokenizer: tokenizers.Tokenizer) -> None:
    (ids,) = data._encoded(tokenizer.to_str().encode(), ["a <|end|> b"])
    assert len(ids) > 5
    assert not {0, 1} & set(ids.tolist())
    assert tokenizer.decode(ids.tolist()) == "a <|end|> b"


def test_what_ends_a_document_is_never_guessed(
    tmp_path: Path, tokenizer: tokenizers.Tokenizer
) -> None:
    file = tokenizer.to_str().encode()
    with pytest.raises(BadInput, match=r"names no end token; set data\.eos"):
        data.tokens(TEXT, 300, file, (), tmp_path)
    assert data.tokens(replace(TEXT, eos=0), 300, file, (1,), tmp_path).end == 0  # 0 is an id
    with pytest.raises(BadInput, match="id 300, but the model's vocabulary ends at 299"):
        data.tokens(replace(TEXT, eos=300), 300, file, (1,), tmp_path)
    with pytest.raises(BadInput, match=r"tokenizer\.json cannot be read"):
        data.tokens(TEXT, 300, b"{}", (1,), tmp_path)


def test_tokenized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = data.tokens(TEXT, 300, None, (), tmp_path)
    data.store(tokens, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{tokens.name}.npy"]

    def again(texts: list[str]) -> Any:
        raise AssertionError("tokenized again")

    monkeypatch.setattr(data, "_bytes", again)
    kept = data.tokens(TEXT, 300, None, (), tmp_path)
    assert training.same(kept.ids, tokens.ids)
    assert (kept.end, kept.name) == (tokens.end, tokens.name)
    with pytest.raises(BadInput, match="ends at 199"):  # what is kept is checked all the same
        data.tokens(TEXT, 200, None, (), tmp_path)
    first = len(data.documents(TEXT.max_bytes)[0].encode())
    for other in (replace(TEXT, eos=0), replace(TEXT, max_bytes=first)):
        with pytest.raises(AssertionError, match="tokenized again"):
            data.tokens(other, 300, None, (), tmp_path)


def test_a_cut_off_write_leaves_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = data.tokens(TEXT, 300, None, (), tmp_path)

    def cut(path: Path, ids: np.ndarray) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "save", cut)
    with pytest.raises(OSError, match="No space"):
        data.store(tokens, tmp_path)
    assert data.tokens(TEXT, 300, None, (), tmp_path).ids.size == tokens.ids.size


def test_an_example_worked_out_by_hand() -> None:
    """End 9. A document's end belongs to it, predicts nothing, and the next starts at 0."""
    row = np.array([5, 6, 9, 1, 2, 9, 9, 3], np.int32)
    found = {name: x.tolist() for name, x in data.example(row, 9).items()}
    assert found == {
        "ids": [5, 6, 9, 1, 2, 9, 9],
        "labels": [6, 9, -100, 2, 9, -100, -100],
        "positions": [0, 1, 2, 0, 1, 2, 0],
        "segments": [0, 0, 0, 1, 1, 1, 2],
    }


def test_every_token_is_predicted_once() -> None:
    ids = np.random.default_rng(0).integers(0, 9, 100).astype(np.int32)
    rows = data.Rows(data.Tokens(ids, 8, "x"), 7)
    assert len(rows) == 14
    examples = [rows[i] for i in range(14)]
    read = np.concatenate([e["ids"] for e in examples])
    labels = np.concatenate([e["labels"] for e in examples])
    assert (read == ids[:98]).all()
    assert (labels == np.where(ids[:98] == 8, loss.IGNORE, ids[1:99])).all()


def test_packed_documents_do_not_see_each_other(x64: None) -> None:
    """Packed into one row, two documents have the loss and gradient that they have alone."""
    spec = training.spec()
    first, second = np.array([5, 6, 7, 47]), np.array([8, 9, 10, 11, 12, 47])
    row = np.concatenate([first, second, [1]]).astype(np.int32)
    plan = training.plan(dtype=np.float64, batch=1, length=10)
    gradients = training.Gradients(plan)
    params = training.lively(spec)

    def run(row: np.ndarray) -> tuple[float, dict[str, np.ndarray], int]:
        fields = {name: x[None] for name, x in data.example(row, 47).items()}
        value, grads = gradients(params, data.Batch(**fields))
        return float(value), grads, int((fields["labels"] != loss.IGNORE).sum())

    packed = run(row)
    alone = [run(np.append(part, 1).astype(np.int32)) for part in (first, second)]
    assert packed[2] == alone[0][2] + alone[1][2] == 8
    due = sum(value * count for value, _, count in alone) / 8
    assert kit.apart(packed[0], due) <= 1e-14
    for path, grad in packed[1].items():
        dues = sum(grads[path] * count for _, grads, count in alone) / 8
        assert kit.apart(grad, dues) <= 1e-13, path


def feed(shape: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> data.Feed:
    """Ten rows of seven distinct tokens each, three a batch."""
    tokens = data.Tokens(np.arange(71, dtype=np.int32), 999, "counted")
    run = training.run(shape, **{"batch": 3, "length": 7, **changes})
    return data.Feed(run, tokens, mesh.build(run.mesh))


def rows_of(batch: data.Batch) -> list[int]:
    ids = np.asarray(batch.ids)
    assert (ids == ids[:, :1] + np.arange(7)).all()
    return (ids[:, 0] // 7).tolist()


def test_every_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    batches = feed()
    order = [row for _ in range(20) for row in rows_of(next(batches))]
    epochs = [order[i * 10 : i * 10 + 10] for i in range(6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    again = feed()
    assert [row for _ in range(20) for row in rows_of(next(again))] == order
    other = feed(seed=4)
    assert [row for _ in range(20) for row in rows_of(next(other))] != order


@pytest.mark.parametrize("read", [1, 3, 11])
def test_a_fresh_feed_goes_on_where_the_saved_one_stood(read: int) -> None:
    batches = feed()
    for _ in range(read):
        next(batches)
    state = batches.state()
    due = [rows_of(next(batches)) for _ in range(20)]
    fresh = feed()
    fresh.restore(state)
    assert [rows_of(next(fresh)) for _ in range(20)] == due


@pytest.mark.parametrize("changes", [{"seed": 4}, {"batch": 4}, {"length": 8}])
def test_a_place_in_another_order_is_refused(changes: dict[str, int]) -> None:
    state = feed().state()
    ((name, now),) = changes.items()
    with pytest.raises(BadInput, match=f"{name} was {state['same'][name]}, is {now}"):
        feed(**changes).restore(state)


def test_each_device_holds_its_own_rows() -> None:
    batch = next(feed((2, 2, 2), batch=8))
    alone = next(feed(batch=8))
    for field in ("ids", "labels", "positions", "segments"):
        whole = np.asarray(getattr(alone, field))
        shards = getattr(batch, field).addressable_shards
        assert {shard.index[0].start for shard in shards} == {0, 2, 4, 6}
        for shard in shards:
            assert shard.data.shape == (2, 7)
            assert (np.asarray(shard.data) == whole[shard.index]).all()


def test_a_text_shorter_than_a_row() -> None:
    with pytest.raises(BadInput, match=r"71 tokens, too few for length=100; raise data\.max"):
        feed(length=100)
