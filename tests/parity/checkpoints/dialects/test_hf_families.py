"""Every Hugging Face family against transformers' own class: the same function, and back again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jaxtwin.configs.spec import LN
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.dialects import FAMILIES, from_hf, to_hf
from jaxtwin.parity.checkpoints.dialects.base import differences
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.compare import budgets
from jaxtwin.parity.sides import runs, witness
from jaxtwin.parity.sides.inputs import check_inputs
from jaxtwin.tests.helpers import hf_models
from jaxtwin.tests.helpers.folders import digests
from jaxtwin.tests.helpers.levels import full

FAST = [case for case in hf_models.CASES if case[1] == "plain"]
# Of each family the variant with every choice but the usual one; the others take minutes together.
SAMPLE = {(kind, list(variants)[:2][-1]) for kind, (_, variants) in hf_models.VARIANTS.items()}
SAMPLE_AND_FULL = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.full)
    for case in hf_models.CASES
]
TOKENS = 300  # past every window and every scaling's original length
FEWER = 100  # so is this, where time is short


def test_every_family_has_a_case() -> None:
    assert hf_models.VARIANTS.keys() == FAMILIES.keys()


def loaded(folder: Path) -> Any:
    """As transformers reads it, which must miss nothing and find nothing too much."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model.eval()


def fields(model: Any) -> dict[str, Any]:
    """Every field of its config, but where it was read from."""
    return {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}


def same_model(one: Any, other: Any) -> None:
    """The same config field by field, the same bytes of every tensor, the very same logits."""
    assert fields(other) == fields(one)
    assert other.dtype == one.dtype
    assert digests(other.state_dict()) == digests(one.state_dict())
    ids = np.random.default_rng(0).integers(0, one.config.vocab_size, (2, TOKENS))
    with torch.no_grad():
        assert torch.equal(other(torch.from_numpy(ids)).logits, one(torch.from_numpy(ids)).logits)


def goes_round(tmp_path: Path, kind: str, variant: str, dtype: str) -> None:
    source = hf_models.folder(tmp_path / "a", kind, variant, dtype)
    src = convert(source, tmp_path / "b", "hf", sha256=True)
    jax = convert(source, tmp_path / "jax", "jax", sha256=True)
    back = convert(tmp_path / "jax", tmp_path / "c", "hf", sha256=True)
    assert src["sha256"] == jax["sha256"] == back["sha256"]
    assert not [note for note in back["notes"] if "not kept" in note]
    first = loaded(source)
    for folder in (tmp_path / "b", tmp_path / "c"):
        same_model(first, loaded(folder))


@pytest.mark.parametrize(("kind", "variant"), FAST)
def test_a_family_goes_to_jax_and_back_unchanged(tmp_path: Path, kind: str, variant: str) -> None:
    goes_round(tmp_path, kind, variant, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", full("float32")])
@pytest.mark.parametrize(("kind", "variant"), SAMPLE_AND_FULL)
def test_every_variant_goes_to_jax_and_back_unchanged(
    tmp_path: Path, kind: str, variant: str, dtype: str
) -> None:
    goes_round(tmp_path, kind, variant, dtype)


@pytest.mark.parametrize(("kind", "variant"), FAST)
def test_transformers_computes_what_the_spec_says(tmp_path: Path, kind: str, variant: str) -> None:
    """Its logits against torchref's in float64, within what float32 costs torchref."""
    source = open_source(hf_models.folder(tmp_path / "a", kind, variant))
    batch = check_inputs(source.spec, FEWER)
    third, _ = witness.find(source)
    assert third is not None
    reference, single = (
        runs.run_torch(source.spec, source.tensors, batch, d) for d in ("float64", "float32")
    )
    errors = [budgets.errors(run, reference) for run in (third(batch), single)]
    noise = budgets.rounding(reference, "float32")
    found = budgets.budgeted(errors[:1], errors[1:], noise, "float32")
    logits = [check for check in found if check.name in ("logits", "loss, per target")]
    assert len(logits) == 2
    assert all(check.ok for check in logits), logits


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "variant"), SAMPLE_AND_FULL)
def test_the_check_holds_on_every_variant(tmp_path: Path, kind: str, variant: str) -> None:
    """jaxmodel, torchref and transformers: logits and every gradient, within measured budgets."""
    source = open_source(hf_models.folder(tmp_path / "a", kind, variant))
    third, _ = witness.find(source)
    report = decoder_check.check(
        source.spec, source.tensors, tokens=TOKENS, witness=third, diagnose=False
    )
    assert report.equal, [check for check in report.checks if not check.ok]
    names = {check.name for check in report.checks}
    assert {f"transformers: grad {name}" for name in source.tensors} <= names
    assert "transformers: logits" in names


@pytest.mark.parametrize(("kind", "variant"), hf_models.CASES)
def test_a_spec_alone_is_written_for_its_family(kind: str, variant: str) -> None:
    """Without the config that it came with: another reader of it finds the same decisions."""
    theirs = hf_models.config(kind, variant)
    spec = from_hf({**theirs.to_dict(), "architectures": None})
    config = to_hf(spec)
    assert not differences(from_hf(config), spec)
    again = transformers.AutoConfig.for_model(**config)
    assert not differences(from_hf(again.to_dict()), spec)
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    assert not differences(from_hf(old), from_hf(new))
    # A Qwen without windows in any layer, say, is what its own family says first.
    same = {"gemma2": "gemma2", "gemma3_text": "gemma3_text", "mistral": "mistral"}
    if variant == "plain":
        assert config["model_type"] == same.get(kind, kind)
    if isinstance(spec.norm, LN):
        assert config["model_type"] == kind
