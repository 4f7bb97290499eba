"""Odd state dicts and odd names: one clear error each or a model, and never a traceback."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.naming.names import read
from jaxtwin.parity.naming.propose import propose
from jaxtwin.tests.helpers.own_modules import OWN

TINY = OWN[1]
ODD_VALUES: list[Any] = [
    None,
    3,
    "text",
    [1, 2],
    {},
    torch.tensor(1.0),
    torch.zeros(0),
    torch.zeros(3, 3, 3),
    torch.zeros(32, dtype=torch.complex64),
    torch.zeros(32, dtype=torch.int64),
    torch.zeros(32, dtype=torch.bool),
    torch.zeros(32, 32).to_sparse(),
    torch.zeros(32, 32, device="meta"),
    torch.zeros(32, 32, dtype=torch.float8_e4m3fn),
    torch.zeros(32, 1).expand(32, 32),
    torch.zeros(32, 32).T,
]
ODD_NAMES: list[Any] = [
    "",
    "model",
    "module.",
    "layers.0",
    "layers.{l}.x",
    "..",
    "a/b",
    7,
    "e" * 999,
]


def mutated(state: dict[Any, Any], rng: random.Random) -> Any:
    """One to three changes, each of a kind that a file was seen to have or could."""
    out: Any = dict(state)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(out))
        change = rng.randrange(6)
        if change == 0:
            out[name] = rng.choice(ODD_VALUES)
        elif change == 1:
            out[rng.choice(ODD_NAMES)] = out.pop(name)
        elif change == 2:
            del out[name]
        elif change == 3:
            out = {rng.choice(["module.", "_orig_mod.", "x."]) + str(n): v for n, v in out.items()}
        elif change == 4:
            out[rng.choice(ODD_NAMES)] = rng.choice(ODD_VALUES)
        else:
            out = {rng.choice(["model", "state_dict", "ema", 3]): out, "step": 1}
        if not out or not isinstance(next(iter(out.values())), torch.Tensor):
            break
    return rng.choice([out, out, out, [out], list(out.items())])


def test_two_hundred_odd_state_dicts(tmp_path: Path) -> None:
    state, refused = TINY.module().state_dict(), 0
    path = tmp_path / "odd.pt"
    for seed in range(200):
        torch.save(mutated(state, random.Random(seed)), path)
        try:
            open_source(path, names=TINY.names)
        except BadInput:
            refused += 1
    assert 100 < refused < 200


ODD_OURS: list[Any] = [
    *(None, "", "?", 3, [], [[]], {}, {"of": []}, {"of": ["norm.weight"], "axes": 3}, "x", "norm"),
    *(
        "norm.weight.T",
        "norm.weight.T.T",
        ".T",
        "{l}",
        "{x}",
        "{",
        "layers.{l}",
        "layers.{l}.",
        "}",
    ),
    *(["norm.weight"] * 3, ["norm.weight", None], {"of": ["norm.weight"], "axes": "(k j) ) ("}),
    *({"of": ["embed.weight", "norm.weight"], "axes": "j"}, {"axes": "j d", "of": "norm.weight"}),
    *({"of": ["embed.weight"], "axes": "j"}, {"of": ["norm.weight"], "axes": "d j j"}),
]


def test_two_hundred_odd_namings() -> None:
    rng = random.Random(0)
    names = {entry.theirs: entry.ours[0] for entry in read(TINY.names).entries}
    refused = 0
    for _ in range(200):
        changed: dict[Any, Any] = dict(names)
        for _ in range(rng.randint(1, 2)):
            changed[rng.choice([*names, *ODD_NAMES])] = rng.choice(ODD_OURS)
        try:
            read(changed).rows(TINY.spec)
        except BadInput:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("seed", range(20))
def test_a_proposal_of_odd_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = {n: tuple(x.shape) for n, x in TINY.module().state_dict().items()}
    for name in rng.choice(list(shapes), 2):
        shapes[str(name)] = tuple(int(n) for n in rng.integers(0, 64, rng.integers(0, 4)))
    try:
        assert propose(shapes, TINY.spec).toml("x")
    except BadInput:
        assert shapes != {n: tuple(x.shape) for n, x in TINY.module().state_dict().items()}
