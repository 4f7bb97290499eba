"""Conversion in slices: what it holds at a time, and that the result is an ordinary checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jaxtwin.benchmarks.memory import measured
from jaxtwin.configs import BadInput
from jaxtwin.configs.atomic_write import Unwritable
from jaxtwin.configs.llama import llama
from jaxtwin.jaxmodel import checkpoint, stream
from jaxtwin.parity.checkpoints import readers, writers
from jaxtwin.parity.checkpoints.convert import convert, hashes
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.tests.helpers.folders import bits, pt_file, torch_state
from jaxtwin.tests.helpers.random_bits import random_bits

SPEC = llama(
    vocab=40, d=32, layers=5, heads=4, kv=2, hidden=48, max_len=32, base=500.0, pairs="half",
    eps=1e-5, tied=False, width=8,
)  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a few KiB count as large."""
    monkeypatch.setattr(stream, "PIECE", 2**11)
    monkeypatch.setattr(stream, "LAYER", 2**8)
    monkeypatch.setattr(stream, "BEHIND", 2**11)
    monkeypatch.setattr(writers, "PIECE", 2**9)


def folder(path: Path, dtype: str = "bfloat16", layout: str = "scan") -> Path:
    """A model in our folder, of several chunks where `small` is in force."""
    source = pt_file(path / "a.pt", SPEC, torch_state(SPEC, dtype))
    convert(source, path / "jax", layout=layout)
    return path / "jax"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process' peak")
def test_the_peak_is_far_below_the_weights(tmp_path: Path) -> None:
    """400 MiB in shards; the largest tensor is 24 MiB, the largest stack 92 MiB.

    Held are a few layers or the embedding, and what Orbax and tensorstore take.
    """
    for name, told in measured(tmp_path, 400).items():
        assert told["weights"] > 400
        assert told["more"] < 200, name


@pytest.mark.usefixtures("small")
def test_conversions_in_threads_do_not_meet(tmp_path: Path) -> None:
    """Orbax numbers what it saves for the process: two at a time waited for one another."""
    source = pt_file(tmp_path / "a.pt", SPEC, torch_state(SPEC, "bfloat16"))
    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(convert, source, tmp_path / f"out{i}", sha256=True) for i in range(6)]
        found = [report.result(120)["sha256"] for report in done]
    assert all(each == found[0] for each in found)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("small")
def test_no_write_fails_unheard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of all that is waited for, each in turn: opening, a slice in between, the last one."""
    source, right = pt_file(tmp_path / "a.pt", SPEC, torch_state(SPEC, "bfloat16")), stream.written
    calls: list[Any] = []

    def counted(pending: Any) -> Any:
        calls.append(pending)
        done = right(pending)
        if len(calls) in wrong:
            raise Unwritable("lost")
        return done

    monkeypatch.setattr(stream, "written", counted)
    wrong = set[int]()
    convert(source, tmp_path / "all")
    total = len(calls)
    assert total > 40
    for at in (1, 2, total // 2, total - 1, total):
        calls.clear()
        wrong = {at}
        with pytest.raises(BadInput, match="cannot be written: lost"):
            convert(source, tmp_path / "jax")
        assert not (tmp_path / "jax").exists()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", ["scan", "unroll"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_orbax_restores_what_was_written_in_slices(tmp_path: Path, dtype: str, layout: str) -> None:
    """Plain Orbax, as NumPy and as JAX arrays, and our reader: the same bits as in memory."""
    where = folder(tmp_path, dtype, layout)
    source = open_source(tmp_path / "a.pt")
    from jaxtwin.parity.table.tensors import forward

    rows = decoder_table.rows(SPEC, layout)
    due = bits({k: t.read() for k, t in forward(rows, source.tensors, "x").items()})
    plain = ocp.load_checkpointables(where / "0")["params"]
    assert {type(x) for x in plain.values()} == {np.ndarray}
    assert bits(plain) == due
    devices = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = checkpoint.read(where, shardings=devices)
    assert bits({k: np.asarray(v) for k, v in arrays.items()}) == due
    assert bits(checkpoint.read(where)) == due
    assert hashes(open_source(where).tensors) == hashes(source.tensors)
    cut = {path for path, x in checkpoint.describe(where).shapes.items() if x.size * 2 > 2**11}
    chunks = checkpoint.describe(where).chunks
    for path in cut if layout == "scan" else ():
        layers = path.startswith("stack/")
        assert chunks[path] != plain[path].shape, path
        assert not layers or chunks[path] == (1, *plain[path].shape[1:]), path


@pytest.mark.usefixtures("small")
def test_the_way_back_reads_a_layer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stack of several chunks is read whole; every layer of it and every other array is once."""
    where = folder(tmp_path)
    chunks = checkpoint.describe(where).chunks
    shapes = checkpoint.describe(where).shapes
    several = {path for path in shapes if chunks[path] != shapes[path].shape}
    assert len(several) >= 7
    parts: list[tuple[str, int, int]] = []
    reader = stream.reader

    def counted(step: Path, group: str, path: str, context: Any) -> Callable[[Any], np.ndarray]:
        inner = reader(step, group, path, context)

        def part(index: Any) -> np.ndarray:
            parts.append((path, index[0].start, index[0].stop))
            return inner(index)

        return part

    monkeypatch.setattr(stream, "reader", counted)
    convert(where, tmp_path / "hf", "hf")
    stacks = {path for path in several if path.startswith("stack/")}
    due = [(path, i, i + 1) for path in stacks for i in range(5)]
    due += [(path, 0, shapes[path].shape[0]) for path in shapes.keys() - stacks]
    assert sorted(parts) == sorted(due)
    source = open_source(tmp_path / "a.pt")
    assert hashes(open_source(tmp_path / "hf").tensors) == hashes(source.tensors)


@pytest.mark.usefixtures("small")
def test_a_part_of_a_stored_array_is_read_alone(tmp_path: Path) -> None:
    where = folder(tmp_path)
    saved, tensors = readers.jax_folder(where)
    stored = checkpoint.read(where)
    for path, part in checkpoint.parts(where, saved).items():
        index = tuple(slice(n // 3, n // 3 + 1 + n // 2) for n in stored[path].shape)
        assert part(index).tobytes() == stored[path][index].tobytes()
        assert part(index).dtype == stored[path].dtype
    for name, tensor in tensors.items():
        index = tuple(slice(n // 3, n // 3 + 1 + n // 2) for n in tensor.shape)
        assert tensor.part(index).tobytes() == tensor.read()[index].tobytes(), name


@pytest.mark.usefixtures("small")
def test_damage_of_a_chunk_is_refused(tmp_path: Path) -> None:
    """A data file of it gone, and one cut short: no zeros instead, no crash."""
    where = folder(tmp_path)
    data = sorted((where / "0" / "params").rglob("d/*"), key=lambda p: p.stat().st_size)[-1]
    kept = data.read_bytes()
    for spoilt in (None, kept[: len(kept) // 2]):
        data.unlink()
        if spoilt is not None:
            data.write_bytes(spoilt)
        with pytest.raises(BadInput, match="cannot be read"):
            convert(where, tmp_path / "hf", "hf")
        assert not (tmp_path / "hf").exists()
        data.write_bytes(kept)
    convert(where, tmp_path / "hf", "hf")


@pytest.mark.usefixtures("small")
def test_a_chunk_that_is_not_there_is_no_zeros(tmp_path: Path) -> None:
    import tensorstore as ts

    where = folder(tmp_path)
    base = {"driver": "file", "path": f"{where / '0' / 'params'}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    (key,) = [k for k in store.list().result() if k.startswith(b"stack/runs/0/0/attn/q/c/3")]
    store.delete_range(ts.KvStore.KeyRange(key, key + b"\0")).result()
    for to in ("hf", "jax"):
        with pytest.raises(BadInput, match="cannot be read"):
            convert(where, tmp_path / "out", to)


@pytest.mark.usefixtures("small")
def test_a_step_that_orbax_stored_otherwise_is_read_too(tmp_path: Path) -> None:
    """One file each and zarr 2, in chunks: there no slices are offered."""
    where = folder(tmp_path)
    arrays = checkpoint.read(where)
    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    context.array.saving.use_zarr3 = False
    context.array.saving.storage_options.chunk_byte_size = 2**11
    with context:
        ocp.save_checkpointables(where / "1", {"params": arrays})
    saved, tensors = readers.jax_folder(where)
    assert saved.step == 1
    assert any(saved.chunks[path] != x.shape for path, x in saved.shapes.items())
    assert checkpoint.parts(where, saved) == {}
    assert hashes(tensors) == hashes(open_source(tmp_path / "a.pt").tensors)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (700,), (40, 33), (33, 40), (3, 5, 100)])
@pytest.mark.parametrize("turned", [False, True])
def test_the_bytes_of_an_array_in_pieces(shape: tuple[int, ...], turned: bool) -> None:
    x = random_bits(shape, ml_dtypes.bfloat16, 0)
    x = x.T if turned else x
    pieces = list(writers.raw(x))
    assert b"".join(pieces) == x.tobytes()
    if not x.flags.c_contiguous:
        assert all(len(p) <= max(2**9, x.nbytes // len(x)) for p in pieces)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("shape", "chunk"),
    [((), ()), ((3,), (3,)), ((97, 11), (33, 11)), ((2, 600), (1, 600)), ((7, 5, 40), (2, 5, 40))],
)
def test_chunks_need_not_divide_the_array(
    tmp_path: Path, shape: tuple[int, ...], chunk: tuple[int, ...]
) -> None:
    x = random_bits(shape, np.float32, 0)
    stream.write(tmp_path / "0", "params", {"x": Tensor(shape, x.dtype, lambda: x)}, set())
    stored = ocp.checkpointables_metadata(tmp_path / "0").metadata["params"]["x"]
    assert stored.storage_metadata.chunk_shape == chunk
    assert ocp.load_checkpointables(tmp_path / "0")["params"]["x"].tobytes() == x.tobytes()


@pytest.mark.usefixtures("small")
def test_a_large_array_that_is_no_stack_is_written_in_pieces(tmp_path: Path) -> None:
    """Each value once, in whole chunks, at the places they came from; read once."""
    x = random_bits((96, 40), np.float32, 0)
    reads: list[int] = []

    def read() -> np.ndarray:
        reads.append(1)
        return x

    stream.write(tmp_path / "0", "params", {"x": Tensor(x.shape, x.dtype, read)}, set())
    assert reads == [1]
    stored = ocp.checkpointables_metadata(tmp_path / "0").metadata["params"]["x"]
    assert stored.storage_metadata.chunk_shape == (12, 40)  # at most 2 KiB
    got = ocp.load_checkpointables(tmp_path / "0")["params"]["x"]
    assert got.tobytes() == x.tobytes()


def test_a_thread_behind_keeps_order_and_says_what_went_wrong() -> None:
    seen: list[int] = []
    with writers.Behind() as behind:
        for i in range(9):
            behind.call(seen.append, i)
    assert seen == list(range(9))

    def fail(_: int) -> None:
        raise BadInput("no room")

    def work(calls: int, error: type[Exception] | None = None) -> None:
        with writers.Behind() as behind:
            for i in range(calls):
                behind.call(fail, i)
            if error:
                raise error

    for calls in (1, 5):
        with pytest.raises(BadInput, match="no room"):
            work(calls)
    with pytest.raises(KeyError):  # the first error counts
        work(1, KeyError)
