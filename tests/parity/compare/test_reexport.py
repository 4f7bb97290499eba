"""A folder exported again: transformers takes the one for the other, or the check says what not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jaxtwin.parity.check import source_check
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.source import Source, open_source
from jaxtwin.parity.compare import reexport
from jaxtwin.parity.sides.inputs import check_inputs
from jaxtwin.tests.helpers.folders import edit_config, hf_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(hf_folder(tmp_path_factory.mktemp("exported") / "hf"))


def checks(source: Source) -> dict[str, float]:
    found = reexport.checks(source, check_inputs(source.spec, 16))
    return {check.name.removeprefix("exported: "): check.error for check in found}


def test_an_export_is_the_original(source: Source) -> None:
    assert checks(source) == {
        "keys missing or not used": 0,
        "tensors that differ": 0,
        "logits that differ": 0,
        "fields of the config that differ": 0,
    }


def _without_a_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})


def _one_bit(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = {name: x.copy() for name, x in load_file(file).items()}
    tensors["model.norm.weight"].view("uint8")[0] ^= 1
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (_without_a_tensor, "keys missing or not used"),
        (_one_bit, "tensors that differ"),
        (lambda folder: edit_config(folder, rms_norm_eps=1e-4), "fields of the config"),
        (lambda folder: edit_config(folder, rms_norm_eps=1e-1), "logits that differ"),
    ],
)
def test_what_an_export_gets_wrong_is_seen(
    source: Source, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], seen: str
) -> None:
    def wrong(source: Source, dst: Path, to: str) -> None:
        convert(source, dst, to)
        damage(dst)

    monkeypatch.setattr(reexport, "convert", wrong)
    found = checks(source)
    assert any(error > 0 and name.startswith(seen) for name, error in found.items()), found


@pytest.mark.slow
def test_a_folder_that_transformers_refuses_is_checked_without_it(tmp_path: Path) -> None:
    """It is stricter with some fields than its models need; that is no fault of the model."""
    folder = edit_config(hf_folder(tmp_path / "hf"), use_cache=None)
    report = source_check.check(str(folder), dtypes=["float64"], tokens=16, export=True)
    assert report.equal
    said = [note for note in report.notes if "use_cache" in note]
    assert len(said) == 2
    assert not any(check.kind.startswith("export_") for check in report.checks)
