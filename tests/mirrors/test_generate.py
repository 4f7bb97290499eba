"""generate()'s rules on both mirrors, on a model whose next token is known beforehand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxtwin import jaxmodel, torchref
from jaxtwin.configs.llama import llama
from jaxtwin.jaxmodel import sample
from jaxtwin.tests.helpers import kit

Generate = Callable[..., np.ndarray]


def counting(vocab: int, max_len: int = 16) -> Any:
    """Its greedy continuation counts up: after i comes i + 1, and after the last id comes 0.

    The layers add nothing to the stream, each id has an axis of its own, and the head's row of
    i + 1 lies along the axis of i.
    """
    spec = llama(
        vocab=vocab,
        d=vocab,
        layers=1,
        heads=1,
        kv=1,
        hidden=2,
        max_len=max_len,
        base=100.0,
        pairs="half",
        eps=1e-6,
        tied=False,
        width=2,
    )
    model = torchref.Decoder(spec)
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(vocab))
        model.head.weight.copy_(torch.eye(vocab).roll(1, 0))
        for layer in model.layers:
            layer.attn.o.weight.zero_()
            layer.ffn.down.weight.zero_()
    return model


def of(side: str, model: Any) -> Generate:
    if side == "torchref":

        def run(ids: Any, *args: Any, **more: Any) -> np.ndarray:
            return torchref.generate(model, torch.as_tensor(ids), *args, **more).numpy()

        return run
    twin = kit.jax_model(model, "unroll")

    def run(ids: Any, *args: Any, **more: Any) -> np.ndarray:
        return jaxmodel.generate(twin, np.asarray(ids), *args, **more)

    return run


@pytest.fixture(scope="module", params=["torchref", "jaxmodel"])
def side(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def generate(side: str) -> Generate:
    return of(side, counting(12))


def test_counts(generate: Generate) -> None:
    np.testing.assert_array_equal(generate([[3], [10]], 4), [[3, 4, 5, 6, 7], [10, 11, 0, 1, 2]])


def test_nothing_new(generate: Generate) -> None:
    np.testing.assert_array_equal(generate([[3, 9]], 0), [[3, 9]])


def test_stops_at_the_context(generate: Generate) -> None:
    made = generate([[0, 1, 2]], 100)
    np.testing.assert_array_equal(made, [[*range(12), 0, 1, 2, 3]])
    full = generate(made, 5)  # nothing fits any more
    np.testing.assert_array_equal(full, made)


def test_a_finished_row_is_filled_while_others_go_on(generate: Generate) -> None:
    np.testing.assert_array_equal(
        generate([[3], [5]], 6, eos=6),
        [[3, 4, 5, 6], [5, 6, 6, 6]],  # and it stops when every row is finished
    )


def test_an_eos_in_the_prompt_finishes_nothing(generate: Generate) -> None:
    np.testing.assert_array_equal(
        generate([[6, 6], [4, 3]], 2, eos=6), [[6, 6, 7, 8], [4, 3, 4, 5]]
    )


def test_each_row_is_filled_with_the_eos_it_made(generate: Generate) -> None:
    for ends in ([9, 5], (5, 9)):
        np.testing.assert_array_equal(
            generate([[2], [7], [1]], 8, eos=ends),
            [[2, 3, 4, 5, 5], [7, 8, 9, 9, 9], [1, 2, 3, 4, 5]],
        )


@pytest.mark.parametrize("none", [(), []])
def test_no_eos_at_all(generate: Generate, none: Sequence[int]) -> None:
    np.testing.assert_array_equal(generate([[3]], 2, eos=none), generate([[3]], 2))


def test_eos_zero_is_an_eos(generate: Generate) -> None:
    np.testing.assert_array_equal(generate([[10]], 8, eos=0), [[10, 11, 0]])


def test_the_last_step_may_finish_a_row(generate: Generate) -> None:
    np.testing.assert_array_equal(generate([[3], [4]], 2, eos=6), [[3, 4, 5], [4, 5, 6]])


REFUSED = {
    "new_tokens": ({"new_tokens": -1}, "new_tokens must not be negative, got -1"),
    "cold": ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
    "endless": ({"temperature": float("inf")}, "temperature must be 0 or more, got inf"),
    "no number": ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
    "top_k 0": ({"top_k": 0}, "top_k must be in 1 ... 12, got 0"),
    "top_k -1": ({"top_k": -1}, "top_k must be in 1 ... 12, got -1"),
    "top_k v+1": ({"top_k": 13}, "top_k must be in 1 ... 12, got 13"),
    "eos -1": ({"eos": -1}, "eos must be in 0 ... 11, got -1"),
    "eos v": ({"eos": 12}, "eos must be in 0 ... 11, got 12"),
    "one eos of two": ({"eos": [3, 12]}, r"eos must be in 0 ... 11, got \[3, 12\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(generate: Generate, case: str) -> None:
    more, message = REFUSED[case]
    more = {"new_tokens": 3, **more}
    with pytest.raises(ValueError, match=message):
        generate([[1, 2]], **more)
    with pytest.raises(ValueError, match=message):  # also when there would be nothing to do
        generate([[1] * 16], **more)


@pytest.mark.parametrize("eos", [6.0, 2.5, True, [3.0]])
def test_an_eos_that_is_no_integer(side: str, eos: Any) -> None:
    """It is not rounded to one. Under test the signatures would refuse it first: they are off."""
    model = counting(12)

    def run() -> Any:
        if side == "torchref":
            return inspect.unwrap(torchref.generate)(model, torch.tensor([[1]]), 1, eos=eos)
        return inspect.unwrap(sample.check_sampling)(model.spec, 1, 0.0, None, eos)

    with pytest.raises(ValueError, match=r"eos must be in 0 ... 11, got"):
        run()


@pytest.mark.parametrize("ids", [[[12]], [[-1]], [[0] * 17]])
def test_refused_prompts(generate: Generate, ids: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="ids must be"):
        generate(ids, 0)


def test_prompts_too_narrow_for_what_follows(side: str) -> None:
    generate = of(side, counting(300))
    prompt = np.array([[253, 254]], np.uint8)
    np.testing.assert_array_equal(generate(prompt, 4), [[253, 254, 255, 256, 257, 258]])


@pytest.fixture(scope="module")
def tied(side: str) -> Generate:
    """After any id: two tokens tie for the first place, one comes third, the rest far behind."""
    model = counting(12)
    with torch.no_grad():
        model.embed.weight.fill_(1)
        model.head.weight.fill_(-2)
        model.head.weight[[4, 7]] = 0.25
        model.head.weight[2] = 0.2
    return of(side, model)


def drawn(generate: Generate, **more: Any) -> set[int]:
    prompt = np.zeros((200, 1), np.int64)  # 200 rows: 200 draws
    return set(generate(prompt, 1, seed=1, **more)[:, -1].tolist())


def test_top_k_keeps_ties(tied: Generate) -> None:
    """The cut is a score: k=1 of two tied admits both, and not the third."""
    assert drawn(tied, temperature=1.0, top_k=1) == {4, 7}
    assert drawn(tied, temperature=1.0, top_k=2) == {4, 7}
    assert drawn(tied, temperature=1.0, top_k=3) == {4, 7, 2}


def test_top_k_of_the_whole_vocabulary_changes_nothing(generate: Generate) -> None:
    prompt = np.arange(12)[:, None]
    one = generate(prompt, 6, temperature=2.0, seed=3)
    np.testing.assert_array_equal(one, generate(prompt, 6, temperature=2.0, seed=3, top_k=12))
    assert len({*one[:, 1:].ravel().tolist()}) > 6


def test_temperature_zero_is_argmax_whatever_else_is_said(generate: Generate) -> None:
    expected = [[3, 4, 5, 6, 7]]
    for more in ({}, {"seed": 5}, {"top_k": 12}, {"top_k": 1, "seed": 9}):
        np.testing.assert_array_equal(generate([[3]], 4, temperature=0.0, **more), expected)


def test_ties_at_temperature_zero_are_repeatable(tied: Generate) -> None:
    for seed in range(5):
        np.testing.assert_array_equal(tied([[0]], 3, seed=seed), [[0, 4, 4, 4]])


def test_seeds(generate: Generate) -> None:
    prompt = np.arange(12)[:, None]
    one = generate(prompt, 8, temperature=3.0, seed=1)
    np.testing.assert_array_equal(one, generate(prompt, 8, temperature=3.0, seed=1))
    assert (one != generate(prompt, 8, temperature=3.0, seed=2)).any()


def test_each_step_draws_anew(tied: Generate) -> None:
    """The scores are the same at every step, and still the tokens are not."""
    assert set(tied([[0]], 15, temperature=1.0, top_k=1)[0, 1:].tolist()) == {4, 7}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_divides_the_scores(side: str, temperature: float) -> None:
    """Two tokens whose scores are 1 apart: odds of e^(1/T), within 5 sigma of 4,000 draws."""
    model = counting(4)
    with torch.no_grad():
        model.embed.weight.fill_(1)
        model.head.weight.fill_(-100)
        model.head.weight[0], model.head.weight[1] = 0.25, 0.0
    prompt = np.full((4_000, 1), 2)
    made = of(side, model)(prompt, 1, temperature=temperature, seed=0)[:, -1]
    p = 1 / (1 + np.exp(-1 / temperature))
    assert set(made.tolist()) == {0, 1}
    assert abs(np.mean(made == 0) - p) < 5 * (p * (1 - p) / 4_000) ** 0.5


def test_pick_cuts_at_the_score() -> None:
    logits = jnp.array([[3.0, 3.0, 1.0]])
    keys = jax.random.split(jax.random.key(0), 100)
    picked = jax.vmap(lambda key: sample.pick(logits, key, 1.0, 1)[0])(keys)
    assert set(picked.tolist()) == {0, 1}


def test_each_is_called_with_every_new_column() -> None:
    columns: list[list[int]] = []
    twin = kit.jax_model(counting(12), "scan")
    made = jaxmodel.generate(
        twin, np.array([[3], [5]]), 6, eos=6, each=lambda ids: columns.append(ids.tolist())
    )
    np.testing.assert_array_equal(made[:, 1:], np.array(columns).T)


@pytest.mark.parametrize("layout", ["scan", "unroll"])
def test_mirrors_generate_alike(layout: str, x64: None) -> None:
    """Greedy tokens of a lively model, up to its context."""
    spec = llama(
        vocab=13,
        d=16,
        layers=2,
        heads=4,
        kv=2,
        hidden=20,
        max_len=24,
        base=100.0,
        pairs="half",
        eps=1e-6,
        tied=True,
    )
    model = kit.torch_model(spec, seed=5)
    ids = np.random.default_rng(0).integers(0, 13, (3, 5))
    expected = torchref.generate(model, torch.from_numpy(ids), 100)
    assert expected.shape == (3, 24)
    np.testing.assert_array_equal(
        jaxmodel.generate(kit.jax_model(model, layout), ids, 100), expected.numpy()
    )


def test_rows_that_pad_the_embedding_are_never_chosen() -> None:
    """A tokenizer of 8 for a table of 13, whose spare rows shout (case 94)."""
    sizes = {"vocab": 13, "d": 8, "layers": 1, "heads": 2, "kv": 1, "hidden": 8, "max_len": 16}
    spec = llama(**sizes, base=100.0, pairs="half", eps=1e-6, tied=False)
    model = kit.torch_model(spec)
    with torch.no_grad():
        model.head.weight[8:] *= 1e3
    dst = kit.jax_model(model.float())
    prompt = np.array([[1, 2, 3]])
    loud = jaxmodel.generate(dst, prompt, 8)
    assert (loud[:, 3:] >= 8).any()
    quiet = jaxmodel.generate(dst, prompt, 8, vocab=8)
    assert (quiet < 8).all()
    src = torchref.generate(model, torch.from_numpy(prompt), 8, vocab=8).numpy()
    np.testing.assert_array_equal(quiet, src)
    sampled = jaxmodel.generate(dst, prompt, 8, vocab=8, temperature=1.0)
    assert (sampled < 8).all()
    with pytest.raises(ValueError, match=r"vocab must be in 1 \.\.\. 13, got 14"):
        jaxmodel.generate(dst, prompt, 8, vocab=14)
