"""Fresh values: spreads on both mirrors, and the same seed giving the same model everywhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtwin import torchref
from jaxtwin.configs import Model, Run
from jaxtwin.configs.llama import llama
from jaxtwin.jaxmodel import Decoder, abstract, axes
from jaxtwin.parity.table import bridge, decoder_table, tensors
from jaxtwin.tests.helpers import kit
from jaxtwin.tests.helpers.levels import full, slow

LAYERS = 2
SPEC = llama(
    vocab=96,
    d=64,
    layers=LAYERS,
    heads=4,
    kv=2,
    hidden=96,
    max_len=8,
    base=100.0,
    pairs="half",
    eps=1e-6,
    tied=False,
)
LAYOUTS = ("scan", "unroll")


@pytest.fixture(scope="module")
def fresh() -> dict[str, dict[str, np.ndarray]]:
    """Fresh values of both layouts, seed 0, by torchref's names and by ours."""
    out = {}
    for layout in LAYOUTS:
        model = Decoder(SPEC, rngs=nnx.Rngs(0), layout=layout)
        dst = {k: tensors.Tensor.of(np.asarray(v)) for k, v in axes.arrays(model).items()}
        src = tensors.backward(decoder_table.rows(SPEC, layout), dst, "fresh")
        out[layout] = {name: tensor.read() for name, tensor in src.items()}
    return out


def check_spreads(values: dict[str, np.ndarray], std: float) -> None:
    """Scales are ones. A sample's spread is within 5 sigma (sigma/sqrt(2n)), its mean too."""
    residual = std / (2 * LAYERS) ** 0.5
    seen = set()
    for name, x in values.items():
        if x.ndim == 1:
            np.testing.assert_array_equal(x, np.ones_like(x), err_msg=name)
            continue
        ends = name.endswith((".attn.o.weight", ".ffn.down.weight"))
        wanted, n = residual if ends else std, x.size
        assert abs(x.std() / wanted - 1) < 5 / (2 * n) ** 0.5, (name, x.std(), wanted)
        assert abs(x.mean()) < 5 * wanted / n**0.5, name
        seen.add(ends)
        # Normal, not uniform of that spread: about 0.3% lie beyond three sigma.
        assert 0 < np.mean(np.abs(x) > 3 * wanted) < 0.02, name
    assert seen == {True, False}
    assert residual <= 0.5 * std  # so that the band can tell them apart


@pytest.mark.parametrize("std", [0.02, 0.5])
def test_spreads_in_torchref(std: float) -> None:
    from dataclasses import replace

    model = torchref.Decoder(replace(SPEC, init_std=std), seed=0)
    check_spreads({k: bridge.to_numpy(v) for k, v in model.state_dict().items()}, std)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spreads_in_jaxmodel(fresh: dict[str, dict[str, np.ndarray]], layout: str) -> None:
    check_spreads(fresh[layout], 0.02)


def test_every_matrix_is_drawn_by_itself(fresh: dict[str, dict[str, np.ndarray]]) -> None:
    """No two of the same shape hold the same values: not two layers, not k and v."""
    for values in (
        fresh["scan"],
        {k: v.numpy() for k, v in torchref.Decoder(SPEC).state_dict().items()},
    ):
        first = [tuple(x.ravel()[:8].tolist()) for x in values.values() if x.ndim == 2]
        assert len(set(first)) == len(first)


def test_scanned_and_unrolled_start_alike(fresh: dict[str, dict[str, np.ndarray]]) -> None:
    assert fresh["scan"].keys() == fresh["unroll"].keys()
    for name, x in fresh["scan"].items():
        np.testing.assert_array_equal(x, fresh["unroll"][name], err_msg=name)


def test_patterns_start_alike_in_both_layouts() -> None:
    """Two runs with a pattern of two blocks: layer numbers decide, not where a layer is stacked."""
    (run,) = SPEC.runs
    (block,) = run.blocks
    from dataclasses import replace

    other = replace(block, ffn=replace(block.ffn, hidden=40))
    runs = (Run(blocks=(block, other), repeats=2), Run(blocks=(block,), repeats=1))
    spec = replace(SPEC, runs=runs)
    values = []
    for layout in LAYOUTS:
        model = Decoder(spec, rngs=nnx.Rngs(3), layout=layout)
        dst = {k: tensors.Tensor.of(np.asarray(v)) for k, v in axes.arrays(model).items()}
        values.append(tensors.backward(decoder_table.rows(spec, layout), dst, "fresh"))
    for name in values[0]:
        np.testing.assert_array_equal(values[0][name].read(), values[1][name].read(), err_msg=name)


def test_seeds(fresh: dict[str, dict[str, np.ndarray]]) -> None:
    def embed(seed: int) -> np.ndarray:
        return np.asarray(jax.jit(lambda: Decoder(SPEC, rngs=nnx.Rngs(seed)).embed.weight[...])())

    np.testing.assert_array_equal(embed(0), fresh["scan"]["embed.weight"])
    assert (embed(1) != embed(0)).any()

    def src(seed: int) -> np.ndarray:
        return torchref.Decoder(SPEC, seed=seed).embed.weight.detach().numpy()

    np.testing.assert_array_equal(src(0), src(0))
    assert (src(1) != src(0)).any()


def make(spec: Model, layout: str) -> dict[str, Any]:
    return axes.arrays(Decoder(spec, rngs=nnx.Rngs(0), layout=layout))


@pytest.mark.parametrize(
    ("ways", "layout"),
    [(1, "scan"), full(2, "scan"), full(4, "scan"), (8, "scan"), slow(8, "unroll")],
)
def test_sharded_values_are_the_same(
    fresh: dict[str, dict[str, np.ndarray]], ways: int, layout: str
) -> None:
    """Made under jit straight into their shards: the bits of the values made whole."""
    mesh = Mesh(np.array(jax.devices()[:ways]), ("x",))

    def split(shape: tuple[int, ...]) -> NamedSharding:
        """Over the last axis that divides."""
        axis = max(i for i, n in enumerate(shape) if n % ways == 0)
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "x"))

    shapes = jax.eval_shape(lambda: make(SPEC, layout))
    placed = {name: split(x.shape) for name, x in shapes.items()}
    values = jax.jit(lambda: make(SPEC, layout), out_shardings=placed)()
    assert len(values["embed/weight"].sharding.device_set) == ways
    dst = {k: tensors.Tensor.of(np.asarray(v)) for k, v in values.items()}
    src = tensors.backward(decoder_table.rows(SPEC, layout), dst, "fresh")
    for name, tensor in src.items():
        np.testing.assert_array_equal(tensor.read(), fresh[layout][name], err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_dtype_is_a_cast_of_the_same_draw(
    fresh: dict[str, dict[str, np.ndarray]], dtype: str
) -> None:
    with jax.enable_x64(dtype == "float64"):
        assert {str(x.dtype) for x in axes.arrays(abstract(SPEC, dtype=dtype)).values()} == {dtype}
        make = jax.jit(lambda: Decoder(SPEC, rngs=nnx.Rngs(0), dtype=dtype).embed.weight[...])
        np.testing.assert_array_equal(
            np.asarray(make()), fresh["scan"]["embed.weight"].astype(jnp.dtype(dtype))
        )


def test_kit_is_livelier_than_a_fresh_model() -> None:
    """What the comparisons use: scales that are not one, matrices of unit gain."""
    model = kit.torch_model(SPEC)
    assert model.norm.weight.std() > 0.2
    assert model.layers[0].attn.q.weight.std() > 0.1
