"""Positions that are added: to the embedding and to the scores, on both mirrors, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtwin import jaxmodel, torchref
from jaxtwin.configs import Alibi, Learned, Model, Rope, Run, Sinusoidal, T5Bias
from jaxtwin.jaxmodel import position as jax_position
from jaxtwin.parity.selftest.tiny_models import shapes
from jaxtwin.parity.table import bridge
from jaxtwin.tests.helpers import kit
from jaxtwin.tests.helpers.parts import SIDES, JaxSide, TorchSide
from jaxtwin.torchref import position as torch_position

Side = TorchSide | JaxSide


@pytest.fixture(params=SIDES, ids=lambda side: side.name)
def side(request: pytest.FixtureRequest) -> Side:
    return request.param


def test_a_part_of_each_head_turns(side: Side) -> None:
    """The first 4 of 8 coordinates, with a head of 4's frequencies; the rest stays (case 58)."""
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 8))
    positions = np.array([[0, 1, 5], [7, 300, 4]])
    got = side.rotate(Rope(base=100.0, pairs="half", width=4), x, positions)
    turn = np.exp(1j * positions[:, :, None, None] * 100.0 ** (-np.arange(0, 4, 2) / 4))
    z = (x[..., 0:2] + 1j * x[..., 2:4]) * turn
    np.testing.assert_allclose(got[..., :4], np.concatenate((z.real, z.imag), -1), atol=1e-14)
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])


@pytest.mark.parametrize("module", [torch_position, jax_position])
def test_alibi_slopes(module: Any) -> None:
    """Those of the paper for 8 heads, and of its code for 6: 4 of its own, 2 of 8's."""
    assert module.slopes(8) == [2.0**-i for i in range(1, 9)]
    assert module.slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert module.slopes(1) == [2.0**-8]


def test_alibi_slopes_are_transformers() -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for heads in (1, 2, 3, 6, 8, 12, 20):
        table = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
        np.testing.assert_allclose(torch_position.slopes(heads), table[:, 0, 1], rtol=1e-6)


@pytest.mark.parametrize("module", [torch_position, jax_position])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (8, 64), (16, 100)])
def test_t5_buckets_are_transformers(module: Any, buckets: int, longest: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(longest + 50)
    want = T5Attention._relative_position_bucket(
        -distance, bidirectional=False, num_buckets=buckets, max_distance=longest
    ).numpy()
    table = module.buckets(T5Bias(buckets=buckets, longest=longest))
    got = np.array(table)[np.minimum(distance.numpy(), longest)]
    # Where a bucket begins at a whole number, float32's logarithm may put it one bucket low.
    half, rest = buckets // 2, buckets - buckets // 2
    begins = [half * (longest / half) ** (k / rest) for k in range(rest)]
    whole = {round(x) for x in begins if abs(x - round(x)) < 1e-4}
    odd = {int(n) for n in distance[got != want]}
    assert odd <= whole
    assert (got >= want).all()


def sinusoids(position: int, d: int) -> list[float]:
    pairs = [position / 10_000 ** (2 * i / d) for i in range(d // 2)]
    return [f(angle) for angle in pairs for f in (math.sin, math.cos)]


BASE = shapes()["pre-norm"]


def embedded(spec: Model, ids: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What both mirrors' first layer is given, in float64, and the embedding's rows."""
    model = kit.torch_model(spec)
    with torch.no_grad():
        src = model.embed_tokens(torch.from_numpy(ids), torch.from_numpy(positions)).numpy()
    with jax.enable_x64(True):
        from jaxtwin.jaxmodel.cache import AttentionContext

        seen = AttentionContext(*(jax.numpy.asarray(x) for x in (positions, positions, 0, 0, 0)))
        dst = np.asarray(kit.jax_model(model).embed_tokens(jax.numpy.asarray(ids), seen))
    np.testing.assert_allclose(dst, src, rtol=1e-14, atol=1e-14)
    return src, model


def test_sinusoidal_and_learned_positions_are_added() -> None:
    """After the embedding's scale: 4 e + PE (arXiv 1706.03762, sections 3.4 and 3.5)."""
    ids, positions = np.array([[5, 5, 9]]), np.array([[0, 7, 63]])
    got, model = embedded(replace(BASE, position=Sinusoidal(), embed_scale=4.0), ids, positions)
    rows = model.embed.weight.detach().numpy()[ids]
    want = 4 * rows + [[sinusoids(p, BASE.d) for p in (0, 7, 63)]]
    np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-14)
    got, model = embedded(replace(BASE, position=Learned(), embed_scale=4.0), ids, positions)
    rows, table = (m.weight.detach().numpy() for m in (model.embed, model.position))
    np.testing.assert_allclose(got, 4 * rows[ids] + table[positions], rtol=1e-15)


@pytest.mark.parametrize(
    ("d", "rounded"),
    [
        (2048, 45.25),
        (2304, 48),
        (2560, 50.5),
        (3072, 55.5),
        (3584, 59.75),
        (3840, 62),
        (5376, 73.5),
    ],
)
def test_the_embedding_scale_is_rounded_to_the_dtype(d: int, rounded: float) -> None:
    """Case 66: in bfloat16 the scale is a bfloat16, and in float32 it is not rounded so."""
    from jaxtwin.jaxmodel.model import Scale as JaxScale
    from jaxtwin.torchref.model import Scale as TorchScale

    exact = d**0.5
    x = np.random.default_rng(0).normal(size=(1, 4, 64))
    for dtype, scale in ((ml_dtypes.bfloat16, rounded), (np.float32, np.float32(exact))):
        one = x.astype(dtype)
        want = (one.astype(np.float64) * float(scale)).astype(dtype)
        dst = np.asarray(JaxScale(exact)(jax.numpy.asarray(one)))
        src = bridge.to_numpy(TorchScale(exact)(bridge.to_torch(one)))
        np.testing.assert_array_equal(dst.astype(np.float64), want.astype(np.float64))
        np.testing.assert_array_equal(src.astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize("position", [Learned(), None])
def test_a_position_beyond_the_table_is_refused(position: Any) -> None:
    """A table has no row there, and JAX would take the last one in silence."""
    spec = replace(BASE, position=position)
    ids = np.zeros((1, 2), np.int64)
    far = np.array([[0, spec.max_len]])
    src, dst = torchref.Decoder(spec), jaxmodel.Decoder(spec, rngs=nnx.Rngs(0))
    if position is None:
        src(torch.from_numpy(ids), positions=torch.from_numpy(far))
        dst(ids, positions=far)
        return
    with pytest.raises(ValueError, match=r"positions must be in 0 \.\.\. 63, got 64"):
        src(torch.from_numpy(ids), positions=torch.from_numpy(far))
    with pytest.raises(ValueError, match=r"positions must be in 0 \.\.\. 63, got 64"):
        dst(ids, positions=far)


@pytest.mark.parametrize(
    ("position", "rope", "relative"),
    [(Learned(), None, None), (None, "rope", None), (None, None, Alibi()), (None, None, T5Bias())],
    ids=["learned", "rope", "alibi", "t5"],
)
def test_left_padding_changes_nothing(position: Any, rope: Any, relative: Any) -> None:
    """[0 0 5 6 7] with positions from the mask is [5 6 7] (case 76)."""
    (block,) = BASE.runs[0].blocks
    attn = replace(block.attn, rope=block.attn.rope if rope else None, relative=relative)
    runs = (Run(blocks=(replace(block, attn=attn),), repeats=2),)
    model = kit.torch_model(replace(BASE, position=position, runs=runs))
    short, padded = np.array([[5, 6, 7]]), np.array([[0, 0, 5, 6, 7]])
    where = {"positions": np.array([[0, 0, 0, 1, 2]]), "segments": np.array([[0, 0, 1, 1, 1]])}
    with torch.no_grad():
        want = model(torch.from_numpy(short)).numpy()
        got = model(torch.from_numpy(padded), **{k: torch.from_numpy(v) for k, v in where.items()})
        without = model(torch.from_numpy(padded), segments=torch.from_numpy(where["segments"]))
    assert kit.apart(got.numpy()[:, 2:], want) <= 1e-13
    # Without positions: a table gives other vectors, and only distances count for the others.
    off = kit.apart(without.numpy()[:, 2:], want)
    assert off > 1e-2 if isinstance(position, Learned) else off <= 1e-13
    with jax.enable_x64(True):
        dst = np.asarray(kit.jax_model(model)(padded, **where))
    assert kit.apart(dst[:, 2:], want) <= 1e-13
