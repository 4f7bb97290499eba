"""Torch files that are refused: code in pickles, damage, and odd fields of jaxtwin's own .pt."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jaxtwin.configs import BadInput
from jaxtwin.configs.spec import to_json
from jaxtwin.parity.checkpoints import files
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.tests.helpers.folders import (
    hf_folder,
    pt_file,
    spec_of,
    stored,
    torch_state,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "model")


class Evil:
    """A pickle that runs code when it is loaded: it would leave a file behind."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle 2", "pickle 4"])
def test_code_in_a_pickle_does_not_run(folder: Path, form: str) -> None:
    """Case 46."""
    marker, path = folder / "marker", folder / "pytorch_model.bin"
    bare = {k: torch.from_numpy(v) for k, v in stored(folder).items()}
    (folder / "model.safetensors").unlink()
    state = {**bare, "evil": Evil(marker)}
    if form.startswith("pickle"):
        path.write_bytes(pickle.dumps({"evil": Evil(marker)}, protocol=int(form[-1])))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(BadInput, match="so nothing was loaded"):
        open_source(folder)
    assert not marker.exists()
    ours = folder / "ours.pt"
    torch.save({"format": 1, "spec": {}, "state": state}, ours)
    with pytest.raises(BadInput, match="so nothing was loaded"):
        open_source(ours)
    assert not marker.exists()
    if form == "torch":  # the trap does spring where somebody steps on it
        torch.load(path, weights_only=False)
        assert marker.exists()


@pytest.mark.parametrize("what", [{"a": 1}, {1: torch.ones(2)}, {"i": torch.ones(2).int()}, [1]])
def test_a_torch_file_of_something_else_is_refused(folder: Path, what: Any) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(what, folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"(is not a plain state dict|no dtype of weights)"):
        open_source(folder)


def test_a_damaged_torch_file_is_refused(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    torch.save({"x": torch.ones(1000)}, path)
    (folder / "model.safetensors").unlink()
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(BadInput, match="cannot be read as a torch file"):
        open_source(folder)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A .pt of ours, whose fields a test replaces."""
    return pt_file(tmp_path / "a.pt", spec_of(), torch_state(spec_of(), "float32"))


def replaced(path: Path, **fields: Any) -> Path:
    data = {**torch.load(path), **fields}
    torch.save(data, path)
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": True}, "format True is not known"),
        ({"format": torch.ones(2)}, "format tensor.* is not known"),
        ({"spec": torch.ones(2)}, "spec must be plain data"),
        ({"spec": {"d": torch.ones(2)}}, "spec must be plain data"),
        ({"files": {"a": torch.ones(2, dtype=torch.bfloat16)}}, "files must hold byte tensors"),
        ({"files": {"a": torch.ones(2)}}, "files must hold byte tensors"),
        ({"files": {"a": "text"}}, "files must hold byte tensors"),
        ({"files": [1]}, "files must hold byte tensors"),
        ({3: 1, "x": 2}, "what nothing would read: 3, x"),
    ],
)
def test_an_odd_field_of_a_pt_is_refused(ours: Path, fields: Any, message: str) -> None:
    torch.save({**torch.load(ours), **fields}, ours)
    with pytest.raises(BadInput, match=message):
        open_source(ours)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x: x.to_sparse(), "sparse_coo"),
        (lambda x: x.to("meta"), "on the device meta"),
        (lambda x: torch._neg_view(x), "a view that negates"),
    ],
)
def test_tensors_of_a_pt_are_dense_and_on_the_cpu(
    ours: Path, change: Callable[[torch.Tensor], torch.Tensor], what: str
) -> None:
    state = torch.load(ours)["state"]
    state["norm.weight"] = change(state["norm.weight"])
    with pytest.raises(
        BadInput, match=rf"(?s)dense tensors on the CPU only.*norm\.weight: .*{what}"
    ):
        files.torch_tensors(state, ours)


def test_a_pt_with_a_sparse_tensor_is_refused_when_opened(ours: Path) -> None:
    state = torch.load(ours)["state"]
    replaced(ours, state={**state, "norm.weight": state["norm.weight"].to_sparse()})
    with pytest.raises(BadInput, match="dense tensors on the CPU only"):
        open_source(ours)


def test_files_of_any_plain_name_are_carried(ours: Path) -> None:
    texts = {
        "LICENSE": torch.zeros(3, dtype=torch.uint8),
        "x.md": torch.zeros(1, dtype=torch.uint8),
    }
    opened = open_source(replaced(ours, files=texts))
    assert opened.carry.keys() == {"LICENSE", "x.md"}
    stale = {"model-00001-of-00002.safetensors": torch.zeros(1, dtype=torch.uint8)}
    opened = open_source(replaced(ours, files=stale))
    assert opened.carry == {}
    assert any("do not travel along: model-00001" in note for note in opened.notes)
    for name in ("../x", "/x", "a/b/c", "a/../../x"):
        with pytest.raises(BadInput, match="cannot be carried along"):
            open_source(replaced(ours, files={name: torch.zeros(1, dtype=torch.uint8)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("spec"), "does not say what model its tensors are of"),
        (lambda d: d.update(format=2), "format 2 is not known"),
        (lambda d: d.update(optimizer={}), "holds what nothing would read: optimizer"),
        (lambda d: d.update(files=[1]), "files must hold byte tensors"),
        (lambda d: d.update(files={"x": 1}), "files must hold byte tensors"),
        (lambda d: d["spec"].update(d=25), "embed.weight: shape .* expected .23, 25."),
        (lambda d: d["spec"].update(width=3), "width: Unexpected keyword argument"),
        (lambda d: d["state"].pop("norm.weight"), "norm.weight: missing"),
        (lambda d: d["state"].update(more=torch.ones(1)), "more: unexpected"),
        (lambda d: d["state"].update({"norm.weight": 3}), "is not a plain state dict"),
    ],
)
def test_a_pt_file_that_is_not_ours_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    spec = spec_of()
    data = {"format": 1, "spec": to_json(spec), "state": torch_state(spec, "float32")}
    change(data)
    torch.save(data, tmp_path / "a.pt")
    with pytest.raises(BadInput, match=f"(?s){message}"):
        open_source(tmp_path / "a.pt")
