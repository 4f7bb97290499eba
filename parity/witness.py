"""The third witness: Hugging Face transformers' own model of the same weights, where it has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from configs import BadInput
from parity import settings, sides
from parity.dialects import HF_LLAMA, to_hf
from parity.inputs import Inputs
from parity.sides import Outcome
from parity.tensors import backward

if TYPE_CHECKING:
    from parity.source import Source


@dataclass
class Witness:
    """transformers' own model, made anew for a run; `settings` is what the last one ran with."""

    source: Source
    make: Callable[[], Any]
    settings: settings.Snapshot = field(default_factory=dict)

    def __call__(self, given: Inputs) -> Outcome:
        model = self.make()
        with settings.Calls() as calls:
            out = sides.run_hf(model, HF_LLAMA.rows(self.source.spec), given)
        self.settings = settings.torch_side(model, calls)
        self.settings["attn_implementation"] = model.config._attn_implementation
        return out


def of(source: Source) -> tuple[Witness | None, str]:
    """How transformers runs the source's model in float32, and a note of how it came by it.

    A Hugging Face folder or a GGUF file is read by transformers itself, which also tests our
    reading. Anything else is built from our own export. None where transformers is absent or has
    no such model; the note says which.
    """
    try:
        import transformers
    except ImportError:
        return None, "transformers is not installed: no third witness (pip install 'jaxtwin[hf]')"
    if source.path is not None and source.kind in ("hf", "gguf"):
        gguf = source.kind == "gguf"
        folder = source.path.parent if gguf else source.path
        file = source.path.name if gguf else None
        note = f"transformers {transformers.__version__} read the same file itself"
        return Witness(source, lambda: _read(folder, file)), note
    try:
        config = to_hf(source.spec)
    except BadInput as error:
        return None, f"no third witness: {error}"
    note = f"transformers {transformers.__version__} was given the weights by our own export"
    return Witness(source, lambda: _built(source, config)), note


def _read(folder: Any, file: str | None) -> Any:
    import torch
    import transformers

    extra = {"gguf_file": file} if file else {}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **extra
    )


def _built(source: Source, config: dict[str, Any]) -> Any:
    import torch
    import transformers

    from parity import bridge

    made = transformers.LlamaConfig(**{**config, "attn_implementation": "eager"})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(made)
    named = backward(HF_LLAMA.rows(source.spec), source.tensors, source.name)
    state = {name: bridge.to_torch(tensor.read()).float() for name, tensor in named.items()}
    if source.spec.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    # The rotary table is a buffer outside the state: made anew, for the meta device left it empty.
    model.model.rotary_emb = type(model.model.rotary_emb)(made)
    return model
