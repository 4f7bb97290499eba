"""A Hugging Face folder, exported again: does transformers take the export for the original?

The folder is converted into a new one, and transformers loads both by itself: every key must be
used and none missing, every tensor and the logits the same to the bit, and the config the same
field by field.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.opened import Source
from jaxtwin.parity.report.results import Check
from jaxtwin.parity.sides import witness
from jaxtwin.parity.sides.inputs import Inputs

LOADING_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
ORIGIN = ("_name_or_path",)  # where it was loaded from


@dataclass(frozen=True)
class Loaded:
    """What transformers makes of a folder: keys it misses or does not use, and sha256 by name."""

    odd: list[str]
    tensors: Mapping[str, str]
    logits: np.ndarray
    config: Mapping[str, Any]


def checks(
    source: Source, inputs: Inputs, progress: Callable[[str], None] = lambda step: None
) -> Iterator[Check]:
    """The comparisons; `source` was opened from a Hugging Face folder."""
    assert source.path is not None
    with tempfile.TemporaryDirectory(prefix="jaxtwin-export-") as folder:
        progress("export: writing a Hugging Face folder")
        copy = Path(folder) / "export"
        convert(source, copy, "hf")
        progress("export: transformers reads the original")
        try:
            want = _loaded(source.path, inputs)
        except Exception as error:  # whatever transformers' classes stumble over
            raise witness.refused(source.name, error) from None
        progress("export: transformers reads the export")
        got = _loaded(copy, inputs)
    new = sorted(set(got.odd) - set(want.odd))
    yield _counted("export_keys", new)
    odd = [n for n in {**want.tensors, **got.tensors} if want.tensors.get(n) != got.tensors.get(n)]
    yield _counted("export_tensors", sorted(odd))
    same = want.logits.shape == got.logits.shape and want.logits.tobytes() == got.logits.tobytes()
    yield Check("export_logits", "as stored", float(not same), 0.0)
    fields = [k for k in {**want.config, **got.config} if want.config.get(k) != got.config.get(k)]
    yield _counted("export_config", sorted(fields))


def _counted(kind: str, names: list[str]) -> Check:
    return Check(kind, "as stored", float(len(names)), 0.0, names[0] if names else "")


def _loaded(folder: Path, inputs: Inputs) -> Loaded:
    import torch
    import transformers

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    model, info = loaded
    with torch.no_grad():
        logits = model(torch.from_numpy(inputs.ids), use_cache=False).logits
    config = {k: v for k, v in model.config.to_dict().items() if k not in ORIGIN}
    return Loaded(
        [f"{kind}: {name}" for kind in LOADING_INFO for name in info.get(kind) or ()],
        {name: _sha256(x) for name, x in model.state_dict().items()},
        logits.float().numpy(),
        config,
    )


def _sha256(x: Any) -> str:
    import torch

    raw = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode() + raw.tobytes()).hexdigest()
