"""Decoding token by token is the whole text at once, whatever positions and windows there are."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch

from jaxtwin import jaxmodel, torchref
from jaxtwin.configs import (
    GQA,
    Alibi,
    DynamicNTK,
    Learned,
    LongRope,
    Model,
    Rope,
    Run,
    Sinusoidal,
    T5Bias,
)
from jaxtwin.jaxmodel import sample
from jaxtwin.parity.selftest.tiny_models import shapes
from jaxtwin.tests.helpers import kit
from jaxtwin.tests.helpers.levels import full

BASE = replace(shapes()["pre-norm"], max_len=24)
(BLOCK,) = BASE.runs[0].blocks
ROPE = BLOCK.attn.rope
assert isinstance(ROPE, Rope)


def of(*attns: GQA, **changes: object) -> Model:
    blocks = tuple(replace(BLOCK, attn=attn) for attn in attns)
    return replace(BASE, runs=(Run(blocks=blocks, repeats=2),), **changes)


def scaled(scaling: DynamicNTK | LongRope) -> Model:
    return of(replace(BLOCK.attn, rope=replace(ROPE, scaling=scaling)))


LOCAL = replace(BLOCK.attn, window=4)
LONG = LongRope(short=(1.0, 1.1), long=(2.0, 3.0), original=10, magnitude=1.1)
SPECS = {
    "local and global": of(LOCAL, BLOCK.attn),
    "learned": of(replace(BLOCK.attn, rope=None), position=Learned()),
    "sinusoidal": of(LOCAL, position=Sinusoidal(), embed_scale=2.0),
    "ALiBi": of(replace(LOCAL, rope=None, relative=Alibi())),
    "T5": of(replace(BLOCK.attn, rope=None, relative=T5Bias(buckets=4, longest=6))),
    "dynamic NTK": scaled(DynamicNTK(factor=2.0, original=6)),
    "LongRoPE": scaled(LONG),
}
IDS = np.random.default_rng(0).integers(0, BASE.vocab, (2, 14))


@functools.cache
def sides(name: str) -> tuple[torchref.Decoder, jaxmodel.Decoder]:
    model = kit.torch_model(SPECS[name])
    with jax.enable_x64(True):
        return model, kit.jax_model(model)


LIGHT = ("local and global", "LongRoPE")
NAMES = [pytest.param(n, marks=() if n in LIGHT else pytest.mark.slow) for n in SPECS]


# A window of 4: prompts that stop before it, at it and after it, then chunks (case 138).
@pytest.mark.parametrize(("prompt", "chunk"), [full(3, 1), (4, 2), full(5, 5), (9, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_in_chunks_as_at_once(name: str, prompt: int, chunk: int) -> None:
    src, dst = sides(name)
    with jax.enable_x64(True):
        read = sample.reader(dst, 2, IDS.shape[1])
        starts = [0, *range(prompt, IDS.shape[1], chunk), IDS.shape[1]]
        for start, end in itertools.pairwise(starts):
            got = np.asarray(read(IDS[:, start:end]))
            with torch.no_grad():
                want = src(torch.from_numpy(IDS[:, :end])).numpy()[:, -1]
            assert kit.apart(got, want) <= 1e-13


@pytest.mark.parametrize("name", NAMES)
def test_generates_what_torch_generates(name: str) -> None:
    src, dst = sides(name)
    with jax.enable_x64(True):
        got = jaxmodel.generate(dst, IDS[:, :5], 12)
    want = torchref.generate(src, torch.from_numpy(IDS[:, :5]), 12).numpy()
    np.testing.assert_array_equal(got, want)


def test_no_cache_is_made_where_none_holds() -> None:
    _, dst = sides("LongRoPE")
    assert dst.max_cacheable_len == 10
    with pytest.raises(ValueError, match="past 10 tokens the rotary frequencies"):
        dst.start(1, 11)


def test_a_text_read_anew_compiles_once() -> None:
    """Whatever its length by now."""
    _, dst = sides("dynamic NTK")
    with jax.enable_x64(True):
        read = sample.reader(dst, 2, 20)
        read(IDS[:, :5])
        before = sample.logits_uncached._cache_size()
        for i in range(5, 14):
            read(IDS[:, i : i + 1])
        assert sample.logits_uncached._cache_size() == before
