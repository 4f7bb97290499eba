"""GGUF files of the architecture "gemma3".

They store the scale of a norm itself, 1 + w, where Hugging Face's files store w. A conversion
changes no value, so the spec read from one scales by what is stored: RMS without offset. That is
the same function; but w is not the stored value less 1 once 1 + w has been rounded, and so such a
model cannot be written as a Hugging Face Gemma.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtwin.configs import GQA, RMS, Linear, Model, QKNorm, Rope
from jaxtwin.configs.gemma import gemma, interleaved
from jaxtwin.configs.spec import MOST
from jaxtwin.parity.checkpoints.dialects import gguf_base
from jaxtwin.parity.checkpoints.dialects.base import Dialect, Fields, build_spec

GGUF_GEMMA = Dialect(name="gguf-gemma", pairs="half", naming=gguf_base.NAMING)

FIXED = {k: v for k, v in gguf_base.FIXED.items() if not k.startswith("rope.scaling.")}
EVERY, LOCAL_BASE = 6, 10_000.0  # what llama.cpp takes for a Gemma 3 whose file does not say
LARGEST = 62  # layers of the 27B, the one Gemma 3 whose scale is not its head's width ^ -0.5


def from_gguf_gemma3(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str, notes: list[str]
) -> Model:
    """The spec of a gemma3 GGUF; `notes` gets what the file does not say itself.

    A BadInput names every setting that is missing, unknown or not supported.
    """
    fields = gguf_base.settings(metadata, "gemma3", where, notes, fixed=FIXED)
    sizes = gguf_base.sizes(fields, metadata, tensors)
    window = fields.positive_int("attention.sliding_window")
    scaling = _scaling(fields)
    local_base = gguf_base.decimal(fields.number("rope.freq_base_swa", absent=None))
    every = _every(fields, sizes["layers"], notes)
    fields.finish()
    if local_base is None:
        local_base = LOCAL_BASE
        notes.append(f"no rope.freq_base_swa: local layers have base {LOCAL_BASE}, as in llama.cpp")
    if largest := sizes["layers"] == LARGEST:
        notes.append(f"{LARGEST} layers: scores are scaled by (d / heads)^-0.5, as in llama.cpp")
    notes.append(
        "scales of norms are stored as 1 + w and kept so; they are not turned back into w, which "
        "would change values, and so the model cannot be exported as a Hugging Face Gemma 3"
    )

    def build(
        layers: int, heads: int, kv: int, width: int | None, base: float, eps: float, **rest: Any
    ) -> Model:
        norm = RMS(eps=eps, cast="after")
        width = width or rest["d"] // heads
        shared: dict[str, Any] = {
            "heads": heads,
            "kv": kv,
            "width": width,
            "qk_norm": QKNorm(norm=norm, over="head"),
            "scale": (rest["d"] / heads) ** -0.5 if largest else None,
        }
        plain = Rope(base=local_base, pairs="half")
        local = GQA(**shared, rope=plain, window=window)
        global_ = GQA(**shared, rope=Rope(base=base, pairs="half", scaling=scaling))
        attention = interleaved(local, global_, layers, every)
        return gemma(attention=attention, sandwich=True, norm=norm, **rest)

    return build_spec(build, where, **sizes)


def _scaling(fields: Fields) -> Linear | None:
    """The global layers' scaling; local ones have none (llama.cpp's scale for them is 1)."""
    kind = fields.settings.get("rope.scaling.type", "none")
    fields.taken.add("rope.scaling.type")
    factor = fields.number("rope.scaling.factor", absent=None)
    if kind == "linear" and factor:
        return Linear(factor=factor)
    if kind not in ("none", "linear") or factor not in (None, 1.0):
        fields.problems.append(
            f"rope.scaling: type {kind!r} with factor {factor} is not supported, only 'linear'"
        )
    return None


def _every(fields: Fields, layers: int | None, notes: list[str]) -> int:
    """Every how many layers one is global: from a number, or from a list with a flag a layer."""
    key = "attention.sliding_window_pattern"
    value = fields.settings.get(key)
    if not isinstance(value, list):
        every = fields.positive_int(key, absent=None) or EVERY
        if value is None:
            notes.append(f"no {key}: every {EVERY}th layer is global, as in llama.cpp")
        if every > MOST:  # a pattern is written out layer by layer
            fields.problems.append(f"{key}: {every} is more than {MOST} layers")
        return every
    fields.taken.add(key)
    every = 1 + next((i for i, slides in enumerate(value) if not slides), len(value))
    if len(value) != layers or value != [(i + 1) % every != 0 for i in range(len(value))]:
        fields.problems.append(f"{key}: {value} is no pattern that repeats, a flag for each layer")
    return every
