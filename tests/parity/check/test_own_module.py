"""A person's own module is the truth: proven equal, or the spec's mistake found and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jaxtwin
from jaxtwin.configs import BadInput
from jaxtwin.configs.spec import from_json, to_json
from jaxtwin.parity.naming.names import read
from jaxtwin.parity.report.results import Report
from jaxtwin.parity.sides import own_module
from jaxtwin.tests.helpers.levels import full, slow
from jaxtwin.tests.helpers.own_modules import OWN, Own

NANO, TINY, FUSED, RENAMED = OWN


def saved(own: Own, folder: Path) -> str:
    torch.manual_seed(0)
    path = folder / f"{own.name}.pt"
    torch.save(own.module().state_dict(), path)
    return str(path)


def checked(own: Own, folder: Path, **options: Any) -> Report:
    how = {"names": own.names, "module": own.reference, "witness": False, **options}
    return jaxtwin.check(saved(own, folder), **how)


def label(own: Own) -> str:
    return own.reference.rpartition(":")[2]


@pytest.mark.parametrize("own", [slow(TINY), slow(FUSED), full(NANO), full(RENAMED)], ids=str)
def test_equal_to_the_module_in_float64_and_float32(own: Own, tmp_path: Path) -> None:
    report = checked(own, tmp_path)
    assert report.equal
    theirs = [check for check in report.checks if check.label == label(own)]
    assert {check.dtype for check in theirs} == {"float64", "float32"}
    gradients = {check.place for check in theirs if check.kind == "gradient"}
    assert len(gradients) > 20
    assert not any("only the reading" in note for note in report.notes)


def altered(own: Own, change: Callable[[dict], None]) -> Any:
    data = to_json(own.spec)
    for run in data["runs"]:
        for block in run["blocks"]:
            change(block)
    return from_json(data, "altered")


def eps(block: dict) -> None:
    block["pre_attn"]["eps"] = 1e-6


def base(block: dict) -> None:
    block["attn"]["rope"]["base"] = 12345.0


def pairs(block: dict) -> None:
    block["attn"]["rope"]["pairs"] = "half"


def act(block: dict) -> None:
    block["ffn"]["act"] = "gelu_tanh"


def pairs_and_eps(block: dict) -> None:
    pairs(block)
    block["pre_ffn"]["eps"] = 1e-6


WRONG = [
    full(TINY, eps, [("layers.pre_attn.eps", "1e-05", "1e-06")]),
    full(TINY, base, [("layers.attn.rope.base", "10000.0", "12345.0")]),
    slow(TINY, pairs_and_eps, [("layers.attn.rope.pairs", "adjacent", "half"),
                               ("layers.pre_ffn.eps", "1e-05", "1e-06")]),
    slow(NANO, act, [("layers.ffn.act", "gelu", "gelu_tanh")]),
]  # fmt: skip


@pytest.mark.parametrize(("own", "change", "due"), WRONG, ids=["eps", "base", "two", "act"])
def test_a_wrong_spec_is_caught_and_named(
    own: Own, change: Any, due: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    """Without the module the same check finds nothing: both mirrors are wrong alike."""
    spec = altered(own, change)
    report = checked(own, tmp_path, spec=spec, dtypes=["float64"])
    assert not report.equal
    found = [(d.place, d.torch.removesuffix(f" in {label(own)}"), d.jax) for d in report.preflight]
    assert found == due
    blind = checked(own, tmp_path, spec=spec, module=None, dtypes=["float64"])
    assert blind.equal
    assert any("only the reading of the spec was proven" in note for note in blind.notes)


@pytest.mark.slow
def test_tensors_named_one_for_another_are_caught_and_named(tmp_path: Path) -> None:
    names = {e.theirs: e.ours[0] for e in read(RENAMED.names).entries} | {"turn": None}
    up, gate = "u.{l}.p4.m.weight", "u.{l}.p6.m.weight"
    names[up], names[gate] = names[gate], names[up]
    names["u.{l}.p3.m.weight"] += ".T"
    report = checked(RENAMED, tmp_path, names=names, spec=RENAMED.spec, dtypes=["float64"])
    found = {d.place: d.torch for d in report.preflight}
    assert found == {
        "layers.{l}.attn.o.weight": "its transpose (.T) in Net",
        "layers.{l}.ffn.gate.weight": "what is named ffn.up.weight in Net",
    }


def needs_arguments(width: int) -> torch.nn.Module:
    return torch.nn.Linear(width, width)


def no_logits() -> torch.nn.Module:
    return torch.nn.Embedding(61, 3)


def fails() -> torch.nn.Module:
    raise RuntimeError("no such file")


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    naming = read(TINY.names)
    for thing, message in (
        (needs_arguments, "cannot be called without arguments"),
        (3, "must build a torch module"),
        (str(tmp_path / "none.py:GPT"), "there is no file"),
        (TINY.reference + "s", "has no 'Transformers'; did you mean 'Transformer'"),
    ):
        with pytest.raises(BadInput, match=message):
            own_module.found(thing, TINY.spec, naming)
    for thing, message in (
        (fails, "fails cannot be built: RuntimeError: no such file"),
        (no_logits, "no_logits has other tensors: .* is named and not in the module"),
    ):
        with pytest.raises(BadInput, match=message):
            checked(TINY, tmp_path, module=thing)


def test_float64_is_asked_of_what_narrows_inside() -> None:
    """By hand: under the mode a cast to float32 leaves a float64 as it is."""
    x = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    assert x.float().double() != x
    with own_module.widened() as seen:
        for y in (
            x.float(),
            x.to(torch.float32),
            x.half(),
            torch.tensor([1 + 2.0**-40]),
            x.type(torch.float32),
        ):
            assert y.dtype == torch.float64
            assert torch.equal(y, x)
        assert torch.polar(torch.ones(1), torch.zeros(1)).dtype == torch.complex128
    assert seen.narrow == []
    assert torch.get_default_dtype() == torch.float32


BUILT = TINY.module()


def cached() -> torch.nn.Module:
    return BUILT


@pytest.mark.parametrize("module", [BUILT, cached])
def test_a_module_that_was_there_before_is_never_called_equal(module: Any, tmp_path: Path) -> None:
    """Its tables are rounded to float32, and a wrong eps could hide behind that."""
    with pytest.raises(
        BadInput, match=r"its freqs_cos is torch.float32.*makes the whole module anew"
    ):
        checked(TINY, tmp_path, module=module, dtypes=["float64"])


class Table(torch.nn.Module):
    """A factor that is no buffer, made before anybody asked for float64."""

    gain = torch.ones(1)

    def __init__(self) -> None:
        super().__init__()
        self.inner = TINY.module()

    def forward(self, tokens: torch.Tensor, targets: Any = None) -> torch.Tensor:
        return self.inner(tokens, targets) * self.gain


def test_a_table_that_is_no_buffer_is_seen(tmp_path: Path) -> None:
    names = {f"inner.{e.theirs}": e.ours[0] for e in read(TINY.names).entries}
    torch.save(Table().state_dict(), tmp_path / "table.pt")
    how = {"names": names, "spec": TINY.spec, "module": Table, "witness": False}
    with pytest.raises(BadInput, match=r"mul has a torch.float32"):
        jaxtwin.check(tmp_path / "table.pt", dtypes=["float64"], **how)


def narrowing() -> torch.nn.Module:
    """It goes by way of NumPy, where nobody sees what it asks for."""
    module = TINY.module()
    gain = torch.from_numpy(np.ones(1, np.float32))
    module.norm.register_forward_hook(lambda part, args, out: out * gain[0].clone())
    return module


def test_what_narrows_all_the_same_is_not_compared_in_silence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"computes in less than float64 inside.*--dtype float32"):
        checked(TINY, tmp_path, module=narrowing, dtypes=["float64"])
    assert checked(TINY, tmp_path, module=narrowing, dtypes=["float32"]).equal


def compiled() -> Any:
    return torch.compile(TINY.module())


def test_a_compiled_module_is_the_module(tmp_path: Path) -> None:
    naming, spec = read(TINY.names), TINY.spec
    assert own_module.found(compiled, spec, naming).built().tok_embeddings is not None


@pytest.mark.slow
def test_a_number_that_no_list_has_is_one_line(tmp_path: Path) -> None:
    def wrong(block: dict) -> None:
        block["pre_attn"]["eps"] = block["pre_ffn"]["eps"] = 3e-4

    report = checked(TINY, tmp_path, spec=altered(TINY, wrong), dtypes=["float64"])
    found = {d.place: (d.torch, d.jax) for d in report.preflight}
    assert found == {"every norm's eps": ("1e-05 in Transformer", "0.0003")}
