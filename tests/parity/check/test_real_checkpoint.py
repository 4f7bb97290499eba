"""SmolLM2-135M in full: the same model, by the check and by what it says."""

from __future__ import annotations

import numpy as np
import pytest

import jaxtwin
from jaxtwin import jaxmodel
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.parity.sides.inputs import TEXT

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # up to 10 GB
NAME = "smollm2-135m"


def test_it_is_the_same_model() -> None:
    """Every logit and gradient in float64, then float32 by the budget; transformers agrees."""
    report = jaxtwin.check(NAME, tokens=300)
    assert report.equal, [c for c in report.checks if not c.ok]
    assert report.environment["input_shape"] == [2, 300]
    names = [c.name for c in report.checks]
    assert names.count("logits") == 2  # float64 and float32
    assert "transformers: logits" in names
    assert "JAX against transformers: logits" in names
    for start in ("grad ", "transformers: grad "):
        assert sum(name.startswith(start) for name in names) % 272 == 0
        assert any(name.startswith(start) for name in names)


def test_it_says_what_transformers_says() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    source = open_source(NAME)
    assert source.path is not None
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    prompt = tokenizer.encode(TEXT.read_text()).ids[:40]
    theirs = AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    )
    want = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0].tolist()
    model = jaxtwin.load(NAME, layout="unroll")
    got = jaxmodel.generate(model, np.array([prompt]), 64, eos=source.eos)[0].tolist()
    assert len(want) == len(prompt) + 64
    assert got == want
