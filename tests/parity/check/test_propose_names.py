"""A naming is proposed; what names and shapes leave open the module settles; nothing guesses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jaxtwin.configs import BadInput, preset
from jaxtwin.parity.check.propose_names import proposed
from jaxtwin.parity.naming.names import Naming, read
from jaxtwin.tests.helpers.levels import slow
from jaxtwin.tests.helpers.own_modules import OWN, Own


def table(naming: Naming, own: Own) -> set[Any]:
    """What a naming says: a set of rows, however it says it."""
    return {
        (m.dst, m.src, m.pattern, str(m.take)) for r in naming.rows(own.spec) for m in r.moves()
    }


@pytest.mark.parametrize("own", [OWN[0], *map(slow, OWN[1:])], ids=lambda own: own.name)
def test_with_the_module_it_is_right(own: Own) -> None:
    answer = proposed(own.module().state_dict(), own.spec, own.reference)
    assert answer.proposal.open == {}
    got, due = answer.proposal.naming(), read(own.names)
    assert table(got, own) == table(due, own)
    assert got.copies(own.spec).keys() | set(got.copies(own.spec).values()) == (
        due.copies(own.spec).keys() | set(due.copies(own.spec).values())
    )
    assert set(got.left_out) == set(due.left_out)


OPEN = {"nano": {"c_attn", "attn.c_proj", "ln_1"}, "renamed": {"p0", "p4", "s0", "e.weight"}}


@pytest.mark.parametrize("own", OWN, ids=lambda own: own.name)
def test_without_it_the_true_names_are_among_the_choices(own: Own) -> None:
    """What is settled is right, and what is open says so with all its choices."""
    found = proposed(own.module().state_dict(), own.spec).proposal
    entries = {e.theirs: e for e in read(own.names).entries}
    for name, choices in found.choices.items():
        entry = entries.get(name)
        ours = () if entry is None else entry.ours
        assert any(choice.ours == ours for choice in choices), name
    for part in OPEN.get(own.name, ()):
        assert any(part in name for name in found.open)
    assert '"?"' in found.toml("x") or not found.open
    if found.open:
        with pytest.raises(BadInput, match="still has a question mark"):
            read(dict.fromkeys(found.open, "?"))


def test_a_spec_of_other_sizes_is_told() -> None:
    state = OWN[1].module().state_dict()
    with pytest.raises(BadInput, match="no naming uses each of them once"):
        proposed(state, OWN[0].spec)


def test_sizes_of_another_model_are_told_first() -> None:
    state = OWN[1].module().state_dict()
    with pytest.raises(BadInput) as caught:
        proposed(state, preset("gpt2"))
    assert "the spec is of other sizes: it has 12 layers, and the names count" in str(caught.value)
    assert "its embedding is (50257, 768), and no tensor has that shape" in str(caught.value)


def test_a_wrong_spec_settles_nothing() -> None:
    own = OWN[3]
    spec = OWN[1].spec
    with pytest.raises(BadInput):
        proposed(own.module().state_dict(), spec, own.reference)
    answer = proposed(own.module().state_dict(), _other_pairs(own), own.reference)
    assert answer.proposal.open
    assert "is the spec right?" in answer.how


def _other_pairs(own: Own) -> Any:
    from jaxtwin.configs.spec import from_json, to_json

    data = to_json(own.spec)
    for block in data["runs"][0]["blocks"]:
        block["attn"]["rope"]["pairs"] = "half"
    return from_json(data, "the test")


def test_integers_are_no_weights() -> None:
    own = OWN[1]
    integers = {name: torch.tensor([3]) for name in ("steps", "more.9.steps")}
    state = {**own.module().state_dict(), **integers}
    found = proposed(state, own.spec).proposal
    assert found.choices["steps"][0].value is None
    assert found.choices["more.9.steps"][0].value is None  # its number is no layer's
