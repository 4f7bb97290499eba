"""Golden .npz files that are refused: missing, damaged or impossible records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.tests.helpers.kit import DATA


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("logits"), "logits missing or not known"),
        (lambda d: d.pop("weight/norm.weight"), "norm.weight: missing"),
        (lambda d: d.pop("grad/norm.weight"), "the gradients of .* norm.weight: missing"),
        (lambda d: d.update(extra=np.ones(2)), "extra missing or not known"),
        (lambda d: d.update({"other/x": np.ones(2)}), "'other/x' is not known"),
        (lambda d: d.update({"weight/norm.weight": np.ones(24, int)}), "int64, no dtype of weigh"),
        (lambda d: d.update(config=np.array("[1]")), "must hold a JSON object"),
        (lambda d: d.update(config=np.array("{")), "cannot be read as JSON"),
        (lambda d: d.update(ids=np.array([{}], object)), "pickled objects, which are never loaded"),
    ],
)
def test_a_golden_file_that_lacks_something_is_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    from jaxtwin.tests.helpers.kit import DATA

    with np.load(DATA / "reference_mqa_untied.npz") as file:
        data = dict(file)
    change(data)
    path = tmp_path / "x.npz"
    np.savez(path, **data)
    with pytest.raises(BadInput, match=f"(?s){message}"):
        open_source(path)


def test_a_damaged_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(b"PK nonsense")
    with pytest.raises(BadInput, match="cannot be read as an"):
        open_source(path)


def spoiled(tmp_path: Path, **arrays: np.ndarray) -> Path:
    with np.load(DATA / "reference_gqa_tied.npz") as file:
        data = dict(file) | {name.replace("__", "/"): x for name, x in arrays.items()}
    np.savez(tmp_path / "x.npz", **data)
    return tmp_path / "x.npz"


def golden_cases() -> list[Any]:
    with np.load(DATA / "reference_gqa_tied.npz") as file:
        d = dict(file)
    eight, full = d["generate/greedy8_from_first4"], d["generate/greedy_to_context"]
    other = (eight + 1) % 23
    return [
        ("loss", np.ones(2), "one float"),
        ("loss", np.array(3), "one float"),
        ("loss", np.array("x"), "one float"),
        ("config", np.array([1.0]), "one string"),
        ("ids", d["ids"][0], r"integers \(batch, time\)"),
        ("ids", d["ids"] * 1.0, r"integers \(batch, time\)"),
        ("ids", d["ids"] - 23, "ids from 0 to 22"),
        ("ids", d["ids"] + 23, "ids from 0 to 22"),
        ("ids", np.concatenate([d["ids"], d["ids"]], 1), r"\(batch, 4 to 16\)"),
        ("ids", d["ids"][:, :3], r"\(batch, 4 to 16\)"),
        ("ids", d["ids"][:0], r"\(batch, 4 to 16\)"),
        ("logits", d["logits"][:, :-1], r"floats \(2, 16, 23\)"),
        ("logits", d["logits"].astype(int), r"floats \(2, 16, 23\)"),
        ("generate__eos_id", np.array(23), "one integer"),
        ("generate__eos_id", np.array([2]), "one integer"),
        ("generate__eos_id", np.array(2.0), "one integer"),
        ("generate__greedy8_from_first4", eight[:, :-1], r"\(2, 12\), the prompt included"),
        ("generate__greedy8_with_eos", eight[:, :-1], r"\(2, 12\), the prompt included"),
        ("generate__greedy8_from_first4", eight[:1], r"\(2, 12\), the prompt included"),
        ("generate__greedy_to_context", full[:, :-1], r"\(2, 16\), the prompt included"),
        ("generate__greedy8_with_eos", other, "a continuation of the first 4 ids"),
        ("generate__greedy8_with_eos", eight * 1.0, r"integers \(batch, time\)"),
        ("generate__greedy_to_context", full + 23, "ids from 0 to 22"),
        ("generate__greedy_to_context", full[0], r"integers \(batch, time\)"),
    ]


@pytest.mark.parametrize(("name", "array", "message"), golden_cases())
def test_a_record_that_its_model_cannot_have_is_refused(
    tmp_path: Path, name: str, array: np.ndarray, message: str
) -> None:
    with pytest.raises(BadInput, match=rf"{name.replace('__', '/')} must be .*{message}.*; it is"):
        open_source(spoiled(tmp_path, **{name: array}))


def test_a_gradient_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"(?s)the gradients of .*norm\.weight: shape \(31,\)"):
        open_source(spoiled(tmp_path, **{"grad__norm.weight": np.ones(31)}))


def test_a_loss_that_is_not_finite_is_a_record(tmp_path: Path) -> None:
    opened = open_source(spoiled(tmp_path, loss=np.array(np.inf)))
    assert opened.golden is not None
    assert opened.golden["loss"] == np.inf
