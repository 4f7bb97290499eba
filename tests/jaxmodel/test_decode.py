"""Decoding with a cache: the same logits as without one, and two compilations for any length."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtwin import torchref
from jaxtwin.configs import Model
from jaxtwin.configs.llama import llama
from jaxtwin.jaxmodel import Decoder, axes, generate, sample
from jaxtwin.tests.helpers import kit
from jaxtwin.tests.helpers.levels import full, slow


def small(**more) -> Model:
    sizes = {"vocab": 13, "d": 16, "layers": 2, "heads": 4, "kv": 2, "hidden": 20, "max_len": 64}
    rest = {"base": 100.0, "pairs": "half", "eps": 1e-6, "tied": True}
    return llama(**{**sizes, **rest, **more})


SPEC = small()
IDS = np.random.default_rng(0).integers(0, 13, (2, 11))


def in_chunks(
    model: Decoder, ids: np.ndarray, chunk: int, slots: int
) -> Iterator[tuple[int, jax.Array]]:
    """The logits after each chunk, by way of the cache."""
    cache = model.start(len(ids), slots)
    for at in range(0, ids.shape[1], chunk):
        piece = jnp.asarray(ids[:, at : at + chunk])
        logits, cache = sample.prefill(model, piece, cache)
        assert int(cache.length) == at + piece.shape[1]
        yield at + piece.shape[1] - 1, logits


@pytest.mark.parametrize("layout", ["scan", "unroll"])
@pytest.mark.parametrize("chunk", [1, full(2), 5, 11])
def test_cached_equals_uncached(x64: None, layout: str, chunk: int) -> None:
    """For every split of 11 tokens, the last chunk ragged; the cache longer than the text."""
    model = kit.jax_model(kit.torch_model(SPEC), layout)
    whole = np.asarray(jax.jit(lambda m, ids: m(ids))(model, jnp.asarray(IDS)))
    ends = 0
    for at, logits in in_chunks(model, IDS, chunk, slots=16):
        assert kit.apart(logits, whole[:, at]) <= 1e-13
        ends += 1
    assert ends == -(-11 // chunk)


def test_cache_exactly_full(x64: None) -> None:
    model = kit.jax_model(kit.torch_model(SPEC))
    whole = np.asarray(model(jnp.asarray(IDS)))
    *_, (_, logits) = in_chunks(model, IDS, 5, slots=11)
    assert kit.apart(logits, whole[:, -1]) <= 1e-13


def test_rows_decode_apart(x64: None) -> None:
    """A row's logits do not depend on who else is in the batch."""
    model = kit.jax_model(kit.torch_model(SPEC))
    *_, (_, both) = in_chunks(model, IDS, 2, slots=16)
    *_, (_, alone) = in_chunks(model, IDS[1:], 2, slots=16)
    assert kit.apart(both[1:], alone) <= 1e-13


@pytest.mark.parametrize(("length", "layout"), [full(8, "scan"), (60, "unroll"), slow(300, "scan")])
def test_float32_cached_equals_uncached(layout: str, length: int) -> None:
    spec = small(max_len=300)
    model = kit.jax_model(kit.torch_model(spec).float(), layout)
    ids = np.random.default_rng(1).integers(0, 13, (1, length))
    whole = np.asarray(jax.jit(lambda m, ids: m(ids))(model, jnp.asarray(ids)))
    *_, (_, logits) = in_chunks(model, ids, -(-length // 3), slots=length)
    assert kit.apart(logits, whole[:, -1]) <= 1e-5


@pytest.mark.parametrize(("length", "layout"), [full(8, "scan"), (60, "unroll"), slow(300, "scan")])
def test_bfloat16_cached_is_no_worse_than_uncached(layout: str, length: int) -> None:
    """Not bit-equal: stated. Against float64 both paths err alike, within the check's factor of 2.

    The cache is bfloat16 as the weights are, so both read the same keys and values; what differs
    is the order of sums.
    """
    spec = small(max_len=300, tied=False)
    src = kit.torch_model(spec).bfloat16()
    ids = np.random.default_rng(1).integers(0, 13, (2, length))
    with jax.enable_x64(True):
        exact = torchref.Decoder(spec).double()
        exact.load_state_dict(src.state_dict())
        truth = kit.torch_run(exact, ids)[0][:, -1]
    model = kit.jax_model(src, layout)
    assert {str(x.dtype) for x in axes.arrays(model).values()} == {"bfloat16"}
    assert {str(x.dtype) for x in jax.tree.leaves(model.start(1, 4).layers)} == {"bfloat16"}
    whole = jax.jit(lambda m, ids: m(ids))(model, jnp.asarray(ids))[:, -1]
    *_, (_, cached) = in_chunks(model, ids, -(-length // 3), slots=length)
    assert cached.dtype == whole.dtype == jnp.bfloat16
    noise = 2**-9  # half a unit in bfloat16's last place
    assert kit.apart(cached, truth) <= 2 * kit.apart(whole, truth) + noise


class Compilations:
    """Counts what XLA compiles while it listens."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.on = True
        jax.monitoring.register_event_duration_secs_listener(self.heard)

    def heard(self, event: str, seconds: float, **more) -> None:
        if self.on and event == "/jax/core/compile/backend_compile_duration":
            self.names.append(str(more.get("fun_name", "")))


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    counter = Compilations()
    yield counter.names
    counter.on = False


@pytest.mark.parametrize("layout", ["scan", slow("unroll")])
def test_twenty_tokens_compile_twice(
    layout: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's length and a single token: two programs of extend, whatever is decoded."""
    traced = []
    extend = Decoder.extend

    def counted(self: Decoder, ids: jax.Array, cache):
        traced.append(ids.shape)
        return extend(self, ids, cache)

    monkeypatch.setattr(Decoder, "extend", counted)
    spec = small(vocab=14 if layout == "scan" else 15)  # no other test has compiled it
    model = Decoder(spec, rngs=nnx.Rngs(0), layout=layout)
    prompt = np.array([[1, 2, 3]])
    compiled.clear()
    made = generate(model, prompt, 20)
    assert made.shape == (1, 23)
    assert traced == [(1, 3), (1, 1)]
    assert sum(name in ("jit(prefill)", "jit(step)") for name in compiled) == 2, compiled

    compiled.clear()
    generate(model, prompt, 33)  # other lengths, the same programs
    generate(model, prompt + 1, 5)
    assert traced == [(1, 3), (1, 1)]
    assert compiled == []

    generate(model, np.array([[1, 2, 3, 4]]), 20)  # another prompt length: its prefill alone
    assert traced == [(1, 3), (1, 1), (1, 4)]


def test_cache_holds_kv_heads() -> None:
    """Shapes: K/V heads, never query heads; one stacked leaf pair a run when scanned."""
    model = Decoder(SPEC, rngs=nnx.Rngs(0), layout="scan")
    assert [x.shape for x in jax.tree.leaves(model.start(3, 32).layers)] == [(2, 3, 32, 2, 4)] * 2
    model = Decoder(SPEC, rngs=nnx.Rngs(0), layout="unroll")
    assert [x.shape for x in jax.tree.leaves(model.start(3, 32).layers)] == [(3, 32, 2, 4)] * 4


def test_a_step_past_the_caches_end_is_refused() -> None:
    """A write there would be moved back over the tokens before it, without a word."""
    model = Decoder(SPEC, rngs=nnx.Rngs(0))
    cache = model.start(1, 4)
    _, cache = model.extend(jnp.ones((1, 3), jnp.int32), cache)
    with pytest.raises(ValueError, match=r"4 slots and holds 3 tokens: 2 more .* at least 5 slots"):
        model.extend(jnp.ones((1, 2), jnp.int32), cache)
    _, cache = model.extend(jnp.ones((1, 1), jnp.int32), cache)
    assert int(cache.length) == 4
