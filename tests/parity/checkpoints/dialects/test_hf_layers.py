"""Which layers slide, how they are put into runs, and what a window is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from jaxtwin.configs import BadInput, preset
from jaxtwin.configs.spec import Run
from jaxtwin.parity.checkpoints.dialects import from_hf
from jaxtwin.parity.checkpoints.dialects.hf_keys import runs
from jaxtwin.tests.helpers import hf_models
from jaxtwin.tests.helpers.hf_models import json_config as config


def letters(layers: str) -> list[Any]:
    """A layer for each letter, l with a window."""
    blocks = {"l": preset("gemma3-tiny").layers[0], "g": preset("gemma3-tiny").layers[5]}
    return [blocks[letter] for letter in layers]


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ("lllll", [(1, 5)]),
        ("lllllg" * 4 + "ll", [(6, 4), (1, 2)]),
        ("lllllgl", [(6, 1), (1, 1)]),
        ("lg" * 3, [(2, 3)]),
        ("lgl", [(2, 1), (1, 1)]),
        ("ggll", [(1, 2), (1, 2)]),
        ("gl", [(1, 1), (1, 1)]),
        ("g", [(1, 1)]),
    ],
)
def test_layers_are_written_as_the_smallest_pattern(
    layers: str, wanted: list[tuple[int, int]]
) -> None:
    found = runs(letters(layers))
    assert [(len(run.blocks), run.repeats) for run in found] == wanted
    flat = [block for run in found for block in run.blocks * run.repeats]
    assert flat == letters(layers)
    assert all(isinstance(run, Run) for run in found)


def seen(config: dict[str, Any]) -> list[int | None]:
    return [block.attn.window for block in from_hf(config).layers]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_which_layers_slide(kind: str) -> None:
    """Case 8: from number max_window_layers on, where use_sliding_window is true."""
    four = {"num_hidden_layers": 4, "sliding_window": 8, "max_window_layers": 2}
    four |= {"use_sliding_window": True, "layer_types": ...}
    assert seen(config(kind, **four)) == [None, None, 8, 8]
    assert seen(config(kind, **{**four, "max_window_layers": 0})) == [8] * 4
    assert seen(config(kind, **{**four, "max_window_layers": 4})) == [None] * 4
    assert seen(config(kind, **{**four, "use_sliding_window": False})) == [None] * 4
    assert seen(config(kind, **{**four, "use_sliding_window": ...})) == [None] * 4
    assert seen(config(kind, **{**four, "sliding_window": None})) == [None] * 4
    assert seen(config(kind, **{**four, "max_window_layers": ...})) == [None] * 4  # 28
    assert seen(config(kind, **{**four, "sliding_window": ...})) == [None, None, 4096, 4096]
    types = ["sliding_attention", "full_attention"] * 2
    assert seen(config(kind, **{**four, "layer_types": types})) == [8, None, 8, None]
    with pytest.raises(BadInput, match="some are sliding_attention, and no sliding_window"):
        from_hf(config(kind, **{**four, "layer_types": types, "use_sliding_window": False}))
    with pytest.raises(BadInput, match="layer_types: 4 words for 3 layers"):
        from_hf(config(kind, **{**four, "layer_types": types, "num_hidden_layers": 3}))
    with pytest.raises(BadInput, match="layer_types: must be a list of"):
        from_hf(config(kind, **{**four, "layer_types": ["chunked_attention"] * 4}))
    theirs = getattr(transformers, hf_models.VARIANTS[kind][0])(
        num_hidden_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=2
    )
    assert theirs.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2


def test_which_layers_of_a_gemma_slide() -> None:
    """Every other one, the first among them; or five of six; or as layer_types says."""
    assert seen(config("gemma2", layer_types=...)) == [17, None, 17]
    types = ["full_attention", "full_attention", "sliding_attention"]
    assert seen(config("gemma2", layer_types=types)) == [None, None, 17]
    seven = [*[17] * 5, None, 17]
    assert seen(config("gemma3_text", layer_types=..., sliding_window_pattern=6)) == seven
    assert seen(config("gemma3_text", sliding_window_pattern=6)) == seven
    assert seen(config("gemma3_text", layer_types=..., sliding_window_pattern=7)) == [17] * 6 + [
        None
    ]
    with pytest.raises(BadInput, match="layer_types has other layers slide"):
        from_hf(config("gemma3_text", sliding_window_pattern=2))
    with pytest.raises(BadInput, match="use_bidirectional_attention: true is not supported"):
        from_hf(config("gemma3_text", use_bidirectional_attention=True))
    with pytest.raises(BadInput, match=r"attn_logit_softcapping: 50.0 is not supported, only null"):
        from_hf(config("gemma3_text", attn_logit_softcapping=50.0))


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_a_window_counts_the_token_itself(kind: str, window: int) -> None:
    """Case 69, against transformers' own mask."""
    from transformers.masking_utils import create_sliding_window_causal_mask

    from jaxtwin.torchref.attention import Window

    theirs = hf_models.config(kind, sliding_window=window, attn_implementation="eager")
    x = torch.zeros(1, 6, 1)
    mask = create_sliding_window_causal_mask(theirs, x, attention_mask=None, cache=None)
    spec = from_hf({**theirs.to_dict(), "architectures": None})
    assert spec.layers[0].attn.window == window
    ours = Window(window)(torch.ones(1, 6, 6, dtype=torch.bool).tril())
    assert torch.equal(ours[:, None], mask == 0)
    assert ours[0].sum(-1).tolist() == [min(i + 1, window) for i in range(6)]


def test_a_mistral_slides_throughout_or_nowhere() -> None:
    assert seen(config("mistral")) == [17] * 3
    assert seen(config("mistral", sliding_window=None)) == [None] * 3
    with pytest.raises(BadInput, match="layer_types"):
        from_hf(config("mistral", layer_types=["sliding_attention"] * 3))
