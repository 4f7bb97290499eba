"""The third witness: Hugging Face transformers' own model of the same weights, where it has one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import BadInput
from jaxtwin.parity.checkpoints.dialects import family_of, from_hf, is_float8, to_hf
from jaxtwin.parity.checkpoints.dialects.base import differences
from jaxtwin.parity.checkpoints.readers import gguf_reader
from jaxtwin.parity.sides import runs, settings
from jaxtwin.parity.sides.inputs import Inputs
from jaxtwin.parity.sides.outcome import Outcome
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor, backward, forward

if TYPE_CHECKING:
    from jaxtwin.parity.checkpoints.opened import Source


@dataclass
class Witness:
    """transformers' own model, made anew for a run; `settings` is what the last one ran with."""

    source: Source
    make: Callable[[], Any]
    settings: settings.Snapshot = field(default_factory=dict)

    def __call__(self, inputs: Inputs) -> Outcome:
        try:
            model = self.make()
        except Exception as error:  # whatever its classes stumble over
            raise refused(self.source.name, error) from None
        family = family_of(model.config.to_dict(), "transformers' config")
        # A LayerNorm's gradients in float32 are sums of torch's own that lose more than torchref's.
        narrow = getattr(model.config, "reorder_and_upcast_attn", False)  # refuses float64
        model = model.double() if family.wide and not narrow else model
        with settings.Calls() as calls:
            out = run(model, family.dialect.rows(self.source.spec), inputs)
        self.settings = settings.torch_side(model, calls)
        self.settings["attn_implementation"] = model.config._attn_implementation
        return out


def find(source: Source) -> tuple[Witness | None, str]:
    """How transformers runs the source's model in float32, and a note of how it came by it.

    A Hugging Face folder (not in float8) or a GGUF file is read by transformers itself, which also
    tests our reading. Anything else is built from our own export. None where transformers is absent
    or has no such model; the note says which.
    """
    try:
        import transformers  # noqa: F401
    except ImportError:
        return None, "transformers is not installed: no third witness (pip install 'jaxtwin[hf]')"
    float8 = is_float8(source.config or {})  # transformers computes with it on a GPU alone
    if source.kind == "hf" and source.path and (odd := refuses(source.path)):
        return None, f"no third witness: transformers does not read the folder: {odd}"
    if source.path is not None and source.kind in ("hf", "gguf") and not float8:
        gguf = source.kind == "gguf"
        folder = source.path.parent if gguf else source.path
        file = source.path.name if gguf else None
        if gguf and (other := _misread(source, folder, file)):
            return None, f"no third witness: transformers reads the file differently: {other}"
        note = _note("read the same file itself", source.config)
        return Witness(source, lambda: _read(folder, file)), note
    try:
        config = to_hf(source.spec, original=source.config)
    except BadInput as error:
        return None, f"no third witness: {error}"
    note = _note("was given the weights by our own export", config)
    return Witness(source, lambda: _built(source, config)), note


def _note(how: str, config: Mapping[str, Any] | None) -> str:
    """The note of how it ran: a class that runs in float64 shows the function, and no rounding."""
    import transformers

    wide = config is not None and family_of(config, "its config").wide
    return f"transformers {transformers.__version__} {how}" + (", in float64" if wide else "")


def refuses(folder: Any) -> str:
    """What transformers has against the config.json of a folder; "" where it has nothing."""
    import transformers

    try:
        transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:  # it checks fields more strictly than its models need
        return _line(error)
    return ""


def refused(name: str, error: Exception) -> BadInput:
    """The error for what transformers stumbles over."""
    return BadInput(
        f"transformers does not read {name}: {_line(error)}; --no-witness --no-export checks it "
        "without"
    )


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def _misread(source: Source, folder: Any, file: str | None) -> str:
    """The first setting that transformers reads differently from the file, if there is one.

    Of a GGUF it leaves several unread, such as a qwen3's head width and a gemma3's second base.
    """
    import transformers

    with _read_once():
        config = transformers.AutoConfig.from_pretrained(folder, gguf_file=file).to_dict()
    public = {key: value for key, value in config.items() if not key.startswith("_")}
    try:
        theirs = from_hf(public, "transformers' config", [])
    except BadInput:
        return ""  # nothing to tell by; the comparison itself will
    for ours, other in differences(source.spec, theirs):
        name, one = ours.rsplit(" = ", 1)
        two = other.rsplit(" = ", 1)[1]
        rounded = name.endswith(".eps") and np.float32(one) == np.float32(two)
        if not (rounded or name.endswith((".offset", "init_std"))):  # it stores w, and we 1 + w
            return f"expected {name} = {one}, got {two}"
    return ""


def _read(folder: Any, file: str | None) -> Any:
    import torch
    import transformers

    extra = {"gguf_file": file} if file else {}
    with _read_once():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", **extra
        )


@contextmanager
def _read_once() -> Iterator[None]:
    """Within: transformers shares our reading of a GGUF file, and reads its table of names once.

    It reads the file three times, four seconds each, and makes the table for every submodule.
    """
    import gguf

    kept = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}

    def reader(path: str) -> Any:
        return gguf_reader(os.fspath(path), os.stat(path).st_mtime_ns)

    try:
        vars(gguf).update(GGUFReader=reader, get_tensor_name_map=cache(kept["get_tensor_name_map"]))
        yield
    finally:
        vars(gguf).update(kept)


def _built(source: Source, config: dict[str, Any]) -> Any:
    import transformers
    from transformers.initialization import no_init_weights

    from jaxtwin.parity.table import bridge

    family = family_of(config, "the config to be written")
    keys = {**config, "attn_implementation": "eager"}
    built = transformers.CONFIG_MAPPING[family.model_type](**keys)
    with no_init_weights():
        model = getattr(transformers, family.architecture)(built)
    named = backward(family.dialect.rows(source.spec), source.tensors, source.name)
    state = {name: bridge.to_torch(tensor.read()).float() for name, tensor in named.items()}
    if source.spec.tied:
        names = family.dialect.published
        state[names("head.weight")] = state[names("embed.weight")]
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    return model.eval()


def run(model: Any, rows: Sequence[Row], inputs: Inputs) -> Outcome:
    """One forward and backward of a transformers model (with eager attention) on the same rows.

    `rows` are its dialect's, through which its gradients come back to torchref's names and layout.
    """
    import torch

    from jaxtwin.parity.table import bridge

    model.get_input_embeddings().padding_idx = None  # else the row of padding has no gradient
    logits = model(
        torch.from_numpy(inputs.ids),
        attention_mask=_masks(model, inputs),  # ready made: taken as they are
        use_cache=False,
        **_positions(model, inputs),
    ).logits
    nll = runs.torch_nll(logits, inputs)
    nll.mean().backward()
    theirs = {name: Tensor.of(bridge.to_numpy(p.grad)) for name, p in model.named_parameters()}
    ours = forward(rows, theirs, "transformers' gradients")
    grads = {name: grad.read() for name, grad in ours.items()}
    return Outcome(bridge.to_numpy(logits), bridge.to_numpy(nll), grads)


def _masks(model: Any, inputs: Inputs) -> Any:
    """transformers' own masks for its config, windows and all, within the segments of the inputs.

    One for each layer type where the model keeps several, else the one that all layers have.
    """
    import torch
    from transformers import masking_utils

    segments = torch.from_numpy(inputs.segments)
    how = {
        "config": model.config,
        "inputs_embeds": torch.zeros(*inputs.ids.shape, 1, dtype=model.dtype),
        "attention_mask": None,
        "cache": None,
        "and_mask_function": lambda b, n, t, s: segments[b, t] == segments[b, s],
    }
    full = masking_utils.create_causal_mask(**how)
    if getattr(model.config, "sliding_window", None) is None:
        local = None
    else:
        local = masking_utils.create_sliding_window_causal_mask(**how)
    if getattr(model.config, "layer_types", None) is not None:
        return {"full_attention": full, "sliding_attention": local}
    return full if local is None else local


def _positions(model: Any, inputs: Inputs) -> dict[str, Any]:
    """The positions as the class takes them.

    BLOOM counts them itself, from a mask of 2 axes, so the mask's bias is made here of its slopes:
    as distances, which a softmax does not tell from the class's own positions of keys.
    """
    import torch

    positions = torch.from_numpy(inputs.positions)
    if model.config.model_type != "bloom":
        return {"position_ids": positions}
    from transformers.models.bloom import modeling_bloom

    def counted(mask: Any, heads: int, dtype: Any) -> Any:
        slopes = modeling_bloom._get_alibi_slopes(heads, positions.device).to(dtype)
        query_key_distance = positions[:, None, :, None] - positions[:, None, None, :]
        return (-slopes[:, None, None] * query_key_distance).flatten(0, 1)

    model.transformer.build_alibi_tensor = counted
    return {}
