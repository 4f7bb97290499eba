"""Fused tensors: several rows that between them read one tensor there."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints import files, readers
from jaxtwin.parity.table import bridge
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, backward, forward, src_shapes


def tensors(**arrays: Any) -> dict[str, Tensor]:
    return {name: Tensor.of(np.asarray(x)) for name, x in arrays.items()}


def values(named: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in named.items()}


def come_back(rows: list[Row], src: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The destinations that the rows make of these sources, checked to come back bit for bit."""
    dst = values(forward(rows, tensors(**src), "x"))
    back = values(backward(rows, tensors(**dst), "x"))
    assert back.keys() == src.keys()
    for name, x in src.items():
        assert (back[name].dtype, back[name].shape) == (x.dtype, x.shape)
        np.testing.assert_array_equal(back[name], x)
    return dst


# --- by hand


def grouped(n: int, k: int, h: int, d: int) -> list[Row]:
    """[q..q k v] for each K/V head."""
    pattern, sizes = "(k j h) d -> (k j h) d", {"k": k, "j": n // k + 2, "h": h, "d": d}
    cuts = {"q": (0, n // k), "k": (n // k, n // k + 1), "v": (n // k + 1, n // k + 2)}
    return [Row(name, "qkv", pattern, sizes, take=("j", *cut)) for name, cut in cuts.items()]


def test_qkv_grouped_by_kv_head() -> None:
    """Case 21: 4 query heads, 2 of K/V, width 1."""
    rows = grouped(4, 2, 1, 1)
    assert src_shapes(rows) == [("qkv", (8, 1))]
    dst = come_back(rows, {"qkv": np.arange(8).reshape(8, 1)})
    assert {name: x.ravel().tolist() for name, x in dst.items()} == {
        "q": [0, 1, 4, 5],
        "k": [2, 6],
        "v": [3, 7],
    }


def test_gate_and_up_interleaved() -> None:
    """Case 25: rows g0 u0 g1 u1, and the same [gate; up]."""
    sizes = {"f": 2, "j": 2, "d": 3}
    for pattern, order in (("(f j) d -> f d", [0, 2, 1, 3]), ("(j f) d -> f d", [0, 1, 2, 3])):
        rows = [
            Row("gate", "both", pattern, sizes, take=("j", 0, 1)),
            Row("up", "both", pattern, sizes, take=("j", 1, 2)),
        ]
        x = np.arange(12).reshape(4, 3)
        dst = come_back(rows, {"both": x})
        np.testing.assert_array_equal(dst["gate"], x[order[:2]])
        np.testing.assert_array_equal(dst["up"], x[order[2:]])


def test_gpt2s_columns_and_blooms_heads() -> None:
    """c_attn (d, q k v one after another), and q k v within each head, rows."""
    n, h, d = 2, 3, 4
    sizes = {"n": n, "h": h, "d": d, "j": 3}
    x = np.arange(d * 3 * n * h).reshape(d, 3 * n * h)
    rows = [
        Row(p, "w", "d (j n h) -> (n h) d", sizes, take=("j", i, i + 1))
        for i, p in enumerate("qkv")
    ]
    dst = come_back(rows, {"w": x})
    for i, name in enumerate("qkv"):
        np.testing.assert_array_equal(dst[name], x[:, i * n * h : (i + 1) * n * h].T)
    rows = [
        Row(p, "w", "(n j h) d -> (n h) d", sizes, take=("j", i, i + 1))
        for i, p in enumerate("qkv")
    ]
    x = np.ascontiguousarray(x.T)
    dst = come_back(rows, {"w": x})
    for i, name in enumerate("qkv"):
        wanted = np.concatenate([x[(m * 3 + i) * h :][:h] for m in range(n)])
        np.testing.assert_array_equal(dst[name], wanted)


def test_blocks_of_unequal_size_and_holes_beside_them() -> None:
    """Phi-3's q, k, v rows; one layer's name from another's by a hole, and all layers stacked."""
    n, k, h, d = 4, 2, 3, 5
    sizes = {"j": n + 2 * k, "h": h, "d": d}
    cuts = {"q": (0, n), "k": (n, n + k), "v": (n + k, n + 2 * k)}
    src = {f"qkv.{i}": np.random.default_rng(i).normal(size=((n + 2 * k) * h, d)) for i in (2, 5)}

    def rows(name: str) -> list[Row]:
        return [
            Row(part + name, "qkv.{l}", "(j h) d -> (j h) d", sizes, {"l": [2, 5]}, ("j", *cut))
            for part, cut in cuts.items()
        ]

    each, all_ = come_back(rows(".{l}"), src), come_back(rows(""), src)
    for part, (start, stop) in cuts.items():
        for at, i in enumerate((2, 5)):
            wanted = src[f"qkv.{i}"][start * h : stop * h]
            np.testing.assert_array_equal(each[f"{part}.{i}"], wanted)
            np.testing.assert_array_equal(all_[part][at], wanted)


def test_biases_are_cut_as_weights_are() -> None:
    dst = come_back(
        [
            Row(p, "b", "(j n) -> n", {"j": 3, "n": 2}, take=("j", i, i + 1))
            for i, p in enumerate("qkv")
        ],
        {"b": np.arange(6, dtype=np.float32)},
    )
    assert dst["v"].tolist() == [4, 5]


# --- any sizes, any cuts


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Row], dict[str, np.ndarray]]:
    """A fused tensor with its letters in any order and grouping, cut anywhere along one."""
    letters = "abcd"[: draw(st.integers(2, 4))]
    sizes = {a: draw(st.integers(1, 4)) for a in letters}
    letter = draw(st.sampled_from(letters))
    inner = draw(st.sets(st.integers(1, max(1, sizes[letter] - 1))))
    edges = [0, *sorted(e for e in inner if e < sizes[letter]), sizes[letter]]

    def side(order: list[str]) -> str:
        cuts = [draw(st.booleans()) for _ in order[1:]]
        groups = [[order[0]]]
        for name, cut in zip(order[1:], cuts, strict=True):
            groups.append([name]) if cut else groups[-1].append(name)
        return " ".join("(" + " ".join(g) + ")" if len(g) > 1 else g[0] for g in groups)

    left = side(draw(st.permutations(letters)))
    layers = draw(st.integers(1, 3))
    stacked = draw(st.booleans())
    rows = []
    for at, (start, stop) in enumerate(itertools.pairwise(edges)):
        gone = stop - start == 1 and draw(st.booleans())
        right = side([a for a in draw(st.permutations(letters)) if not (gone and a == letter)])
        rows.append(
            Row(
                f"part{at}" + ("" if stacked else ".{l}"),
                "w.{l}",
                f"{left} -> {right}",
                sizes,
                {"l": range(layers)},
                (letter, start, stop),
            )
        )
    dtype = draw(st.sampled_from([np.float32, np.float64, np.float16]))
    shape = src_shapes(rows)[0][1]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    src = {
        f"w.{i}": np.frombuffer(rng.bytes(math.prod(shape) * np.dtype(dtype).itemsize), dtype)
        for i in range(layers)
    }
    order = draw(st.permutations(rows))
    return order, {name: x.reshape(shape) for name, x in src.items()}


@given(cases())
def test_every_fused_tensor_comes_back_bit_for_bit(case: Any) -> None:
    rows, src = case
    dst = forward(rows, tensors(**src), "x")
    parts = {name: tensor.read() for name, tensor in dst.items()}
    for name, tensor in dst.items():
        assert (parts[name].shape, parts[name].dtype) == (tensor.shape, tensor.dtype)
    assert sum(x.size for x in parts.values()) == sum(x.size for x in src.values())
    back = backward(rows, tensors(**parts), "x")
    assert back.keys() == src.keys()
    for name, x in src.items():
        assert back[name].shape == x.shape
        assert back[name].read().tobytes() == x.tobytes()
    for name in reversed(list(src)):  # read in another order: the same
        assert back[name].read().tobytes() == src[name].tobytes()
    for name in reversed(list(dst)):
        assert dst[name].read().tobytes() == parts[name].tobytes()


# --- how often, and what is refused


def test_a_fused_tensor_is_read_once_for_all_of_its_parts() -> None:
    reads: list[str] = []

    def lazy(name: str, x: np.ndarray) -> Tensor:
        def read() -> np.ndarray:
            reads.append(name)
            return x

        return Tensor(x.shape, x.dtype, read)

    rows = [
        row.prefixed("{l}.", "{l}.", {"l": [i]}) for i in range(2) for row in grouped(4, 2, 1, 1)
    ]
    src = {f"{i}.qkv": lazy(f"{i}.qkv", np.zeros((8, 1))) for i in range(2)}
    dst = forward(rows, src, "x")
    assert reads == []
    for tensor in dst.values():
        tensor.read()
    assert reads == ["0.qkv", "1.qkv"]


def test_the_stacks_of_a_fused_tensors_parts_are_read_once() -> None:
    """Layer by layer, though q, k and v are three stacks."""
    reads: list[str] = []

    def lazy(name: str, x: np.ndarray) -> Tensor:
        def read() -> np.ndarray:
            reads.append(name)
            return x

        return Tensor(x.shape, x.dtype, read)

    rows = [row.prefixed("", "{l}.", {"l": range(3)}) for row in grouped(4, 2, 1, 1)]
    src = {f"{i}.qkv": np.arange(8).reshape(8, 1) + 10 * i for i in range(3)}
    stacks = values(forward(rows, tensors(**src), "x"))
    back = backward(rows, {name: lazy(name, x) for name, x in stacks.items()}, "x")
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor.read(), src[name])
    assert sorted(reads) == ["k", "q", "v"]


def cut(*takes: tuple[int, int], **more: Any) -> list[Row]:
    sizes = {"j": 4, "d": 2, **more.pop("sizes", {})}
    return [
        Row(f"p{i}", "w", "(j d) -> (j d)", sizes, take=("j", *take), **more)
        for i, take in enumerate(takes)
    ]


@pytest.mark.parametrize(
    "takes", [[(0, 2)], [(0, 2), (3, 4)], [(0, 2), (1, 4)], [(0, 4), (0, 4)], [(1, 4)], [(0, 5)]]
)
def test_takes_that_do_not_tile_the_axis_are_refused(takes: list[tuple[int, int]]) -> None:
    rows = cut(*takes)
    with pytest.raises(AssertionError, match=r"the table takes \[.* of the 4 entries of w"):
        forward(rows, tensors(w=np.zeros(8)), "x")
    dst = {f"p{i}": np.zeros(2 * (stop - start)) for i, (start, stop) in enumerate(takes)}
    with pytest.raises(AssertionError, match="the table takes"):
        backward(rows, tensors(**dst), "x")


def test_takes_along_different_axes_are_refused() -> None:
    sizes = {"a": 2, "b": 2}
    rows = [
        Row("p", "w", "a b -> a b", sizes, take=("a", 0, 1)),
        Row("q", "w", "a b -> a b", sizes, take=("b", 1, 2)),
    ]
    with pytest.raises(AssertionError, match="cuts w along different axes"):
        forward(rows, tensors(w=np.zeros((2, 2))), "x")


def test_a_row_that_reads_the_whole_beside_them_is_refused() -> None:
    rows = [*cut((0, 2), (2, 4)), Row("whole", "w", "(j d) -> (j d)", {"j": 4, "d": 2})]
    with pytest.raises(BadInput, match="w: read 2 times by the table"):
        forward(rows, tensors(w=np.zeros(8)), "x")


def test_a_letter_is_left_out_only_where_one_entry_is_taken() -> None:
    row = Row("p", "w", "(j d) -> d", {"j": 4, "d": 2}, take=("j", 0, 4))
    with pytest.raises(ValueError, match="has j on one side alone"):
        forward([row], tensors(w=np.zeros(8)), "x")["p"].read()


def test_a_fused_tensor_of_parts_of_different_dtypes_is_refused() -> None:
    dst = tensors(p0=np.zeros(4, np.float32), p1=np.zeros(4, np.float64))
    with pytest.raises(BadInput, match=r"w is fused of tensors of .'float32', 'float64'"):
        backward(cut((0, 2), (2, 4)), dst, "x")


def test_a_part_keeps_no_whole_tensor_alive() -> None:
    x = np.zeros(8)
    for tensor in forward(cut((0, 2), (2, 4)), tensors(w=x), "x").values():
        assert not np.shares_memory(tensor.read(), x)


# --- slices


def watched(x: np.ndarray, reads: list[int]) -> Tensor:
    """A tensor that notes how many values were asked of it."""

    def read() -> np.ndarray:
        reads.append(x.size)
        return x

    def slices(index: Any) -> np.ndarray:
        reads.append(x[index].size)
        return x[index]

    return Tensor(x.shape, x.dtype, read, slices)


@given(cases(), st.data())
def test_a_part_is_what_the_whole_has_there(case: Any, data: st.DataObject) -> None:
    """Of both directions, whatever is merged, stacked or fused, and never more than the tensor."""
    rows, src = case
    reads: list[int] = []
    dst = forward(rows, {k: watched(x, reads) for k, x in src.items()}, "x")
    dst_tensors = {name: watched(tensor.read(), reads) for name, tensor in dst.items()}
    back = backward(rows, dst_tensors, "x")
    for tensor in (*dst.values(), *back.values()):
        bounds = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in tensor.shape]
        index = tuple(slice(*bound) for bound in bounds)
        got, full = tensor.part(index), tensor.read()
        assert got.dtype == full.dtype
        assert got.tobytes() == full[index].tobytes()
        assert got.shape == full[index].shape


def test_a_part_of_whole_heads_reads_no_more_than_it() -> None:
    """Rows there merged of n h, here d n h: head 1 alone; and of grouped Q, K, V one group."""
    sizes = {"n": 4, "h": 3, "d": 5}
    x = np.arange(60).reshape(12, 5)
    reads: list[int] = []
    row = Row("q", "{l}.q", "(n h) d -> d n h", sizes, {"l": [0, 1, 2]})
    dst = forward([row], {f"{i}.q": watched(x + i, reads) for i in range(3)}, "x")
    index = (slice(1, 3), slice(0, 5), slice(1, 2), slice(0, 3))
    got = dst["q"].part(index)
    assert reads == [15, 15]
    np.testing.assert_array_equal(got[0], (x + 1)[3:6].T[:, None])
    reads.clear()
    dst = forward(grouped(4, 2, 3, 5), {"qkv": watched(np.arange(120).reshape(24, 5), reads)}, "x")
    dst["q"].part((slice(6, 12), slice(2, 4)))
    assert reads == [12]
    reads.clear()
    back = backward([row], {"q": watched(np.zeros((3, 5, 4, 3)), reads)}, "x")
    back["1.q"].part((slice(3, 9), slice(0, 5)))
    assert reads == [30]
    reads.clear()
    back["2.q"].read()  # of a stack that can be sliced, a layer alone
    assert reads == [60]


def test_a_part_of_a_file_is_read_from_the_file(tmp_path: Path) -> None:
    """safetensors and torch files in every dtype of theirs, as the library and NumPy cut them."""
    import safetensors.numpy
    import torch

    rng = np.random.default_rng(0)
    for dtype in files.FLOATS.values():
        x = rng.normal(size=(4, 5, 3)).astype(dtype)
        safetensors.numpy.save_file({"x": x}, tmp_path / "x.safetensors")
        torch.save({"x": bridge.to_torch(x)}, tmp_path / "x.bin")
        for path in (tmp_path / "x.safetensors", tmp_path / "x.bin"):
            tensor = files.OPENERS[path.suffix](path)["x"]
            assert tensor.slices is not None
            index = (slice(1, 3), slice(None), slice(2, None))
            assert tensor.part(index).tobytes() == x[index].tobytes()
            assert tensor.part(index).shape == (2, 5, 1)


def test_a_part_of_a_gguf_is_dequantized_from_its_rows(tmp_path: Path) -> None:
    import gguf

    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, kind in (("q", gguf.GGMLQuantizationType.Q8_0), ("f", None)):
        data = x if kind is None else gguf.quantize(x, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, tensors_ = readers.gguf_file(tmp_path / "x.gguf")
    for tensor in tensors_.values():
        assert tensor.shape == (4, 64)
        index = (slice(1, 3), slice(5, 40))
        np.testing.assert_array_equal(tensor.part(index), tensor.read()[index])
