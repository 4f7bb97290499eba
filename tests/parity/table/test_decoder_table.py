"""The table's rows and what is done with them: elements move, no bit changes."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxtwin.configs import RMS, BadInput, Model, Run, preset
from jaxtwin.parity.table import axis_ops, decoder_table, tensors
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, backward, forward, prove
from jaxtwin.tests.helpers.random_bits import random_bits

LAYOUTS = ("scan", "unroll")
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float64, np.float16]


def patterned() -> Model:
    """Two runs, the first with a pattern of two blocks that differ: layers 0 2 | 1 3 | 4."""
    spec = preset("reference-tiny")
    (block,) = spec.runs[0].blocks
    other = replace(block, ffn=replace(block.ffn, hidden=20), post_ffn=RMS(eps=1e-6))
    runs = (Run(blocks=(block, other), repeats=2), Run(blocks=(other,), repeats=1))
    return replace(spec, runs=runs, tied=False)


def digest(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("pattern", "flipped"),
    [
        ("(n h) d -> d n h", "d n h -> (n h) d"),
        ("d -> d", "d -> d"),
        ("(n p c) d -> (n c p) d", "(n c p) d -> (n p c) d"),
    ],
)
def test_flip(pattern: str, flipped: str) -> None:
    assert axis_ops.flip(pattern) == flipped
    assert axis_ops.flip(flipped) == pattern


def test_shape() -> None:
    sizes = {"n": 3, "h": 4, "d": 5}
    assert axis_ops.shape("(n h) d", sizes) == (12, 5)
    assert axis_ops.shape("d n h", sizes) == (5, 3, 4)
    assert axis_ops.shape("d", sizes) == (5,)


def test_rearrange_by_hand() -> None:
    x = np.arange(6).reshape(6, 1)
    sizes = {"n": 1, "p": 2, "c": 3, "d": 1, "unused": 9}
    moved = axis_ops.rearrange(x, "(n p c) d -> (n c p) d", sizes)
    assert moved.ravel().tolist() == [0, 3, 1, 4, 2, 5]
    split = {"n": 2, "h": 3, "d": 1}
    moved = axis_ops.rearrange(np.arange(6).reshape(6, 1), "(n h) d -> d n h", split)
    assert moved.tolist() == [[[0, 1, 2], [3, 4, 5]]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["smollm2-tiny", "patterned"])
def test_every_tensor_comes_back_bit_for_bit(name: str, layout: str, dtype: Any) -> None:
    spec = patterned() if name == "patterned" else preset(name)
    rows = decoder_table.rows(spec, layout)
    src = {
        name: random_bits(shape, dtype, seed)
        for seed, (name, shape) in enumerate(tensors.src_shapes(rows))
    }
    dst = forward(rows, {k: Tensor.of(v) for k, v in src.items()}, "there")
    values = {k: Tensor.of(v.read()) for k, v in dst.items()}
    for name, tensor in dst.items():
        assert values[name].dtype == tensor.dtype == np.dtype(dtype)
        assert values[name].shape == tensor.shape
    back = backward(rows, values, "here")
    assert back.keys() == src.keys()
    assert {k: digest(v.read()) for k, v in back.items()} == {k: digest(v) for k, v in src.items()}
    # Read in another order, when a stack cannot be kept: the same.
    assert all(digest(back[k].read()) == digest(src[k]) for k in reversed(list(back)))


def test_layers_stand_where_the_pattern_puts_them() -> None:
    """Block `at` of a run holds every period-th layer; the last run begins where the first ends."""
    spec = patterned()
    marked = {
        name: np.full(shape, float(name.split(".")[1]) if name.startswith("layers.") else -1.0)
        for name, shape in tensors.src_shapes(decoder_table.rows(spec, "scan"))
    }
    arrays = {k: Tensor.of(v) for k, v in marked.items()}
    dst = {k: t.read() for k, t in forward(decoder_table.rows(spec, "scan"), arrays, "x").items()}
    assert dst["stack/runs/0/0/attn/q"][:, 0, 0, 0].tolist() == [0, 2]
    assert dst["stack/runs/0/1/attn/q"][:, 0, 0, 0].tolist() == [1, 3]
    assert dst["stack/runs/1/0/attn/q"][:, 0, 0, 0].tolist() == [4]
    assert dst["stack/runs/0/1/post_ffn/weight"].shape == (2, 32)
    dst = {k: t.read() for k, t in forward(decoder_table.rows(spec, "unroll"), arrays, "x").items()}
    for i in range(5):
        assert (dst[f"stack/layers/{i}/ffn/up"] == i).all()


def test_each_row_moves_as_the_letters_say() -> None:
    """q.weight's row n h becomes q[:, n, h]; o.weight's column n h becomes o[n, h]; head is v d."""
    spec = replace(preset("reference-tiny"), tied=False)
    rng = np.random.default_rng(0)
    src = {k: rng.normal(size=s) for k, s in tensors.src_shapes(decoder_table.rows(spec, "unroll"))}
    arrays = {k: Tensor.of(v) for k, v in src.items()}
    dst = {k: t.read() for k, t in forward(decoder_table.rows(spec, "unroll"), arrays, "x").items()}
    n, h = 3, 5
    q, o = "layers.1.attn.q.weight", "layers.1.attn.o.weight"
    np.testing.assert_array_equal(dst["stack/layers/1/attn/q"][:, n, h], src[q][n * 8 + h])
    np.testing.assert_array_equal(dst["stack/layers/1/attn/o"][n, h], src[o][:, n * 8 + h])
    k, v = dst["stack/layers/1/attn/k"], dst["stack/layers/1/attn/v"]
    np.testing.assert_array_equal(k[:, 1, h], src["layers.1.attn.k.weight"][8 + h])
    np.testing.assert_array_equal(v[:, 1, h], src["layers.1.attn.v.weight"][8 + h])
    for part in ("gate", "up", "down"):
        x = dst[f"stack/layers/2/ffn/{part}"]
        np.testing.assert_array_equal(x, src[f"layers.2.ffn.{part}.weight"].T)
    np.testing.assert_array_equal(dst["embed/weight"], src["embed.weight"])
    np.testing.assert_array_equal(dst["head/weight"], src["head.weight"].T)


def test_holes() -> None:
    """In both names it renames; in the other's alone it stacks in front; both at once work."""
    row = Row("l{l}/up", "layers.{l}.experts.{e}.up", "f d -> d f", {"f": 2, "d": 3})
    row = replace(row, holes={"l": [4, 7], "e": range(5)})
    moves = list(row.moves())
    assert [m.dst for m in moves] == ["l4/up", "l7/up"]
    assert moves[1].src == tuple(f"layers.7.experts.{e}.up" for e in range(5))
    assert moves[1].dst_shape == (5, 3, 2)
    assert moves[1].src_shape == (2, 3)

    both = replace(row, dst="up", holes={"l": [0, 1], "e": [0, 1, 2]})
    (move,) = both.moves()
    assert move.dst_shape == (2, 3, 3, 2)
    names = [f"layers.{x}.experts.{e}.up" for x in (0, 1) for e in (0, 1, 2)]
    assert move.src == tuple(names)
    arrays = {name: np.full((2, 3), i, np.float32) for i, name in enumerate(names)}
    dst = forward([both], {k: Tensor.of(v) for k, v in arrays.items()}, "x")
    value = dst["up"].read()
    assert value[:, :, 0, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
    back = backward([both], {"up": Tensor.of(value)}, "x")
    for name, x in arrays.items():
        np.testing.assert_array_equal(back[name].read(), x)


ROWS = [
    Row("a", "A", "f d -> d f", {"f": 2, "d": 3}),
    Row("b", "B{l}", "d -> d", {"d": 3}, {"l": [0, 1]}),
]
GOOD = {"A": np.zeros((2, 3)), "B0": np.zeros(3), "B1": np.ones(3)}


def source_tensors(**changes: Any) -> dict[str, Tensor]:
    """The good tensors with some replaced, or left out where None."""
    arrays = {k: v for k, v in {**GOOD, **changes}.items() if v is not None}
    return {k: Tensor.of(v) for k, v in arrays.items()}


def test_what_fits_is_taken() -> None:
    assert forward(ROWS, source_tensors(), "the file").keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"B1": None}, r"B1: missing, expected shape \(3,\)"),
        ({"C": np.zeros(7)}, r"C: unexpected, shape \(7,\); nothing would read it"),
        ({"A": np.zeros((3, 2))}, r"A: shape \(3, 2\), expected \(2, 3\)"),
        ({"A": np.zeros(6)}, r"A: shape \(6,\), expected \(2, 3\)"),
        ({"A": None, "a": np.zeros((2, 3))}, r"A: missing"),
        ({"B1": np.ones(3, np.float32)}, r"b stacks tensors of \['float32', 'float64'\]"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        forward(ROWS, source_tensors(**changes), "the file")
    assert str(error.value).startswith("the file ")


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(BadInput) as error:
        forward(
            ROWS,
            source_tensors(A=np.zeros((3, 2)), B0=None, B_0=np.zeros(3), C=np.zeros(1)),
            "the file",
        )
    told = str(error.value)
    assert all(f"  {name}: " in told for name in ("A", "B0", "B_0", "C"))
    assert "B0: missing, expected shape (3,); is it 'B_0'?" in told


def test_a_table_that_reads_twice_is_refused() -> None:
    rows = [*ROWS, Row("c", "A", "f d -> d f", {"f": 2, "d": 3})]
    with pytest.raises(BadInput, match="A: read 2 times by the table"):
        forward(rows, source_tensors(), "the file")
    with pytest.raises(BadInput, match="a: read 2 times by the table"):
        backward([*ROWS, Row("a", "C", "d -> d", {"d": 3})], source_tensors(), "the file")


def test_backward_refuses_too() -> None:
    dst = {"a": Tensor.of(np.zeros((3, 2))), "b": Tensor.of(np.zeros((3, 3)))}
    with pytest.raises(BadInput, match=r"b: shape \(3, 3\), expected \(2, 3\)"):
        backward(ROWS, dst, "the model")


def test_a_long_list_of_problems_is_cut() -> None:
    wanted = [(f"t{i:03}", (1,)) for i in range(50)]
    with pytest.raises(BadInput, match="and 30 more") as error:
        prove(wanted, {}, "the file")
    assert str(error.value).count("missing") == 20


def test_nothing_is_read_before_it_is_asked_for() -> None:
    reads: list[str] = []

    def lazy(name: str, x: np.ndarray) -> Tensor:
        def read() -> np.ndarray:
            reads.append(name)
            return x

        return Tensor(x.shape, x.dtype, read)

    dst = forward(ROWS, {k: lazy(k, v) for k, v in GOOD.items()}, "the file")
    assert reads == []
    dst["b"].read()
    assert reads == ["B0", "B1"]  # each once, and no other
    reads.clear()

    dst = {k: lazy(k, t.read()) for k, t in forward(ROWS, source_tensors(), "the file").items()}
    back = backward(ROWS, dst, "the model")
    assert reads == []
    back["B0"].read()
    back["B1"].read()
    assert reads == ["b"]  # a stack's parts in order: it is read once


def test_moves_are_views_where_they_can_be() -> None:
    """A transposed matrix costs no copy."""
    x = np.zeros((2, 3))
    dst = forward(ROWS, source_tensors(A=x), "the file")
    assert np.shares_memory(dst["a"].read(), x)


@pytest.mark.parametrize("by", ["numpy", "xla"])
def test_a_transposed_copy_is_the_plain_one(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the width and dtype, where axes merge to a matrix and where they do not."""
    monkeypatch.setattr(axis_ops, "XLA_TRANSPOSES", 1 if by == "xla" else 2**60)
    copy = axis_ops._transposed(np.zeros((3, 40)).T)
    assert (copy is not None) == (by == "xla")
    assert (
        axis_ops._transposed(np.zeros((3, 80))[:, :40]) is None
    )  # not in C order, and not transposed
    for dtype in DTYPES:
        for shape in [(), (5,), (3, 40), (40, 3), (2, 3, 35), (3, 4, 5, 6), (0, 4)]:
            x = random_bits(shape, dtype, len(shape))
            for order in itertools.permutations(range(len(shape))):
                copy = x.transpose(order)
                out = np.empty(copy.shape, dtype)
                axis_ops.put(copy, out)
                assert out.tobytes() == copy.tobytes()
                assert axis_ops.ordered(copy).tobytes() == copy.tobytes()
                assert axis_ops.ordered(copy).flags.c_contiguous


def test_numpy_transposes_where_jax_may_not() -> None:
    """Under somebody's trace, or a guard of transfers."""
    x = random_bits((1024, 512), np.float32, 3).T
    assert axis_ops._transposed(x) is not None

    def traced(y: jax.Array) -> jax.Array:
        assert axis_ops.ordered(x).tobytes() == x.tobytes()
        return y

    jax.jit(traced)(1.0)
    with jax.transfer_guard("disallow_explicit"):
        assert axis_ops.ordered(x).tobytes() == x.tobytes()
