"""Where arrays live: one table, one resolver, and early errors that name the axis."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtwin.configs import LEGEND, PRESETS, BadInput, runs
from jaxtwin.jaxmodel import abstract, axes
from jaxtwin.tests.helpers import training
from jaxtwin.train import mesh

CUBE = runs.Mesh(data=2, fsdp=2, tensor=2)


def test_the_table_knows_the_alphabet_and_nothing_else() -> None:
    assert mesh.RULES.keys() == LEGEND.keys()
    used = {axis for rule in mesh.RULES.values() for axis in rule.parameter + rule.activation}
    assert used == set(mesh.AXES) == set(runs.Mesh.__dataclass_fields__)


@pytest.mark.parametrize(
    ("letters", "shape", "column", "due"),
    [
        ("v d", (48, 32), "parameter", P(("tensor",), ("fsdp",))),
        ("d v", (32, 48), "parameter", P(("fsdp",), ("tensor",))),
        ("l d n h", (3, 32, 4, 8), "parameter", P(None, ("fsdp",), ("tensor",), None)),
        ("l n h d", (3, 4, 8, 32), "parameter", P(None, ("tensor",), None, ("fsdp",))),
        ("l f d", (3, 48, 32), "parameter", P(None, ("tensor",), ("fsdp",))),
        ("l d", (3, 32), "parameter", P(None, ("fsdp",))),
        ("b t d", (8, 5, 32), "activation", P(("data", "fsdp"), None, None)),
        ("b t n h", (8, 5, 4, 8), "activation", P(("data", "fsdp"), None, ("tensor",), None)),
        ("b t v", (8, 5, 48), "activation", P(("data", "fsdp"), None, ("tensor",))),
    ],
)
def test_letters_say_how_an_array_is_cut(
    letters: str, shape: tuple[int, ...], column: str, due: P
) -> None:
    assert mesh.partition(letters, shape, column, mesh.build(CUBE)) == (due, [])


def test_letters_that_cannot_be_cut() -> None:
    cube = mesh.build(CUBE)
    with pytest.raises(ValueError, match="letter 'z' of 'd z' is unknown"):
        mesh.partition("d z", (4, 4), "parameter", cube)
    with pytest.raises(ValueError, match="'f v': f and v would both be sharded over tensor"):
        mesh.partition("f v", (4, 4), "parameter", cube)
    with pytest.raises(ValueError, match="'d f' do not fit the shape"):
        mesh.partition("d f", (4, 4, 4), "parameter", cube)


@pytest.mark.parametrize(
    ("letters", "shape", "column", "said"),
    [
        ("v d", (47, 32), "parameter", "vocabulary v=47 is not divisible by tensor=2"),
        ("d f", (31, 48), "parameter", "model width d=31 is not divisible by fsdp=2"),
        ("d f", (32, 47), "parameter", "ffn hidden width f=47 is not divisible by tensor=2"),
        ("b t d", (5, 8, 32), "activation", "batch b=5 is not divisible by data=2 x fsdp=2"),
    ],
)
def test_what_does_not_divide_is_named(
    letters: str, shape: tuple[int, ...], column: str, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        mesh.partition(letters, shape, column, mesh.build(CUBE))


def test_heads_that_do_not_divide_stay_whole_and_are_reported_once() -> None:
    """SmolLM2 has 9 heads and 3 K/V heads; two-way tensor parallelism keeps them whole."""
    model = abstract(PRESETS["smollm2-135m"])
    shapes = {path: x.shape for path, x in axes.arrays(model).items()}
    shardings, notes = mesh.parameters(axes.letters(model), shapes, mesh.build(CUBE))
    assert shardings["stack/runs/0/0/attn/q"].spec == P(None, ("fsdp",), None, None)
    assert shardings["stack/runs/0/0/ffn/up"].spec == P(None, ("fsdp",), ("tensor",))
    assert sorted(notes) == [
        "3 key/value heads are not divisible by tensor=2: replicated on every device",
        "9 query heads are not divisible by tensor=2: replicated on every device",
    ]


def test_every_parameter_that_does_not_divide_is_listed() -> None:
    model = abstract(PRESETS["reference-tiny"])
    shapes = {path: x.shape for path, x in axes.arrays(model).items()}
    with pytest.raises(BadInput, match=r"(?s)does not fit the model:.*embed/weight: .*v=257"):
        mesh.parameters(axes.letters(model), shapes, mesh.build(CUBE))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_has_a_place_for_every_parameter(name: str) -> None:
    model = abstract(PRESETS[name])
    shapes = {path: x.shape for path, x in axes.arrays(model).items()}
    devices = mesh.build(runs.Mesh(data=2, fsdp=2))
    letters = axes.letters(model)
    shardings, notes = mesh.parameters(letters, shapes, devices)
    assert shardings.keys() == shapes.keys()
    assert notes == []
    for path, shape in shapes.items():  # each that has the model's width is cut by fsdp
        held = np.prod(shardings[path].shard_shape(shape))
        whole = "d" not in letters[path].split()  # what belongs to heads and hidden units: small
        assert held * (1 if whole else 2) == np.prod(shape), path


def test_moments_are_cut_like_their_parameters() -> None:
    plan = training.plan((2, 2, 2))
    masters = {path: s.spec for path, s in plan.params.items()}
    adam = plan.state.opt_state[1][0]
    assert {path: s.spec for path, s in adam.mu.items()} == masters
    assert {path: s.spec for path, s in adam.nu.items()} == masters
    assert adam.count.spec == P()


def test_activations_are_cut_where_the_model_names_them() -> None:
    resolve = mesh.activations(mesh.build(CUBE))

    @jax.jit
    def named(x: jax.Array) -> jax.Array:
        with axes.resolving(resolve):
            return axes.constrain(x, "b t f")

    out = named(jnp.zeros((8, 3, 48)))
    assert out.addressable_shards[0].data.shape == (2, 3, 24)


def test_a_mesh_larger_than_the_machine() -> None:
    with pytest.raises(BadInput, match=r"mesh 4x2x2 needs 16 devices and this machine has 8"):
        mesh.build(runs.Mesh(data=4, fsdp=2, tensor=2))
    with pytest.raises(
        BadInput, match="16 CPU devices cannot be simulated: JAX has started with 8"
    ):
        mesh.simulate(16)
    mesh.simulate(8)


SIMULATED = """
from jaxtwin.train import mesh
mesh.simulate(6)
import jax, jax.numpy as jnp
from jaxtwin.configs import runs
devices = mesh.build(runs.Mesh(data=3, fsdp=2))
x = jax.device_put(jnp.arange(6.0)[:, None], mesh.rows(devices))
print(jax.jit(jnp.sum)(x), len(x.addressable_shards), jax.devices()[0].platform)
"""


def test_devices_are_simulated_in_a_fresh_process() -> None:
    """XLA aborts on a flag it does not know, so the time limits' names are right too."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-c", SIMULATED], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "15.0 6 cpu\n", done.stderr
