"""A naming proposed for a state dict; what names and shapes leave open, the module settles.

Three things of the module tell: the classes of its parts (an nn.Linear holds (out, in)), which of
them read the same input (queries, keys and values do), and, for what is left, its logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.parity.checkpoints import state_dict
from jaxtwin.parity.compare.tolerances import AGREES
from jaxtwin.parity.naming.names import Naming, read
from jaxtwin.parity.naming.propose import (
    UNKNOWN,
    Choice,
    Proposal,
    propose,
    templates,
)
from jaxtwin.parity.report import metrics
from jaxtwin.parity.sides import own_module, runs
from jaxtwin.parity.sides.own_module import OwnModule

if TYPE_CHECKING:
    import torch

TRIED = 2_000  # runs of the module's spec under another naming, at most
TOGETHER = (("attn.q", "attn.k", "attn.v"), ("ffn.gate", "ffn.up"))  # what reads one input


@dataclass(frozen=True)
class Answer:
    """The proposal, and in a sentence how far the module settled it."""

    proposal: Proposal
    how: str


def proposed(
    state: Mapping[str, Any],
    spec: Model,
    module: Any = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Answer:
    """The naming of a state dict's tensors (arrays of any kind) as this spec's.

    BadInput where no naming uses each of them once, or where the module cannot be run.
    """
    state = {name: value for name, value in state.items() if hasattr(value, "shape")}
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    integers = [name for name, value in state.items() if "float" not in str(value.dtype)]
    if module is None:
        found = propose(shapes, spec, no_weights=integers)
        return Answer(found, "names and shapes alone were looked at")
    user_module = own_module.found(module, spec, Naming("none yet", ()))
    built = user_module.built()
    buffers = [name for name, _ in built.named_buffers() if name in shapes]
    progress(f"looking at the parts of {user_module.name}")
    found = propose(shapes, spec, no_weights=[*integers, *buffers], stored=_stored(built))
    inputs = _inputs(built, spec)
    groups = (some for some in found.complete() if _reads_alike(some, inputs, shapes, spec))
    return _tried(found, user_module, spec, state, groups, progress)


def _tried(
    found: Proposal,
    user_module: OwnModule,
    spec: Model,
    state: Mapping[str, Any],
    groups: Iterator[dict[str, Choice]],
    progress: Callable[[str], None],
) -> Answer:
    """The complete namings under which torchref gives the module's logits."""
    ids = np.arange(min(8, spec.max_len))[None] * 7 % spec.vocab
    values = _random(state)
    want = user_module.logits_of(values, ids)
    agreeing, least = [], np.inf
    known = (some for some in groups if UNKNOWN not in some.values())
    for i, some in enumerate(itertools.islice(known, TRIED)):
        if i % 20 == 0:
            progress(f"the logits under naming {i + 1}")
        error = metrics.relative_l2(_logits(some, spec, values, ids), want)
        least = min(least, error)
        if error <= AGREES:
            agreeing.append(some)
    name = user_module.name
    if not agreeing:
        how = f"under no naming does the spec give the logits of {name} (the nearest is off by"
        return Answer(found, f"{how} {least:.1g}): is the spec right?")
    settled = {
        theirs: [c for c in some if any(each[theirs] == c for each in agreeing)]
        for theirs, some in found.choices.items()
    }
    how = f"the spec gives the logits of {name} with it"
    return Answer(Proposal(spec, settled, found.copies), how)


def _logits(
    some: Mapping[str, Choice], spec: Model, values: Mapping[str, np.ndarray], ids: np.ndarray
) -> np.ndarray:
    import torch

    naming: Naming = read({name: choice.value for name, choice in some.items()})
    tensors, _ = state_dict.mapped(dict(values), spec, naming, "the module", [])
    model = runs.torch_model(spec, tensors, "float64")
    with torch.no_grad():
        out: np.ndarray = model(torch.from_numpy(ids)).numpy()
    return out


def _random(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Weights that leave no part idle: fresh ones may be zeros and ones. Copies stay copies."""
    rng = np.random.default_rng(0)
    seen: dict[Any, np.ndarray] = {}
    out = {}
    for name, value in state.items():
        key = value.data_ptr() if hasattr(value, "data_ptr") and value.numel() else name
        key = (key, tuple(value.shape))
        if key not in seen:
            seen[key] = rng.normal(size=tuple(value.shape)) * 0.3
        out[name] = seen[key]
    return out


def _stored(module: torch.nn.Module) -> dict[str, str]:
    """How the classes of its parts hold a matrix, by the parameter's name."""
    known = {"Linear": "(out, in)", "Conv1D": "(in, out)", "Embedding": "embedding"}
    return {
        f"{name}.weight": known[type(part).__name__]
        for name, part in module.named_modules()
        if type(part).__name__ in known
    }


def _inputs(module: torch.nn.Module, spec: Model) -> dict[str, int]:
    """Which input each part read, by the names of its parameters: the same number, the same one."""
    import torch

    seen: dict[int, int] = {}
    kept: list[Any] = []  # or an id would be given again
    out: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        def call(part: Any, args: Any, result: Any) -> None:
            if args and isinstance(args[0], torch.Tensor):
                kept.append(args[0])
                number = seen.setdefault(id(args[0]), len(seen))
                out.update({f"{name}.{p}": number for p, _ in part.named_parameters(recurse=False)})

        return call

    handles = [part.register_forward_hook(hook(name)) for name, part in module.named_modules()]
    try:
        with torch.no_grad():
            module.eval()(torch.arange(min(8, spec.max_len))[None] % spec.vocab)
    except Exception:  # the logits will tell
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return out


def _reads_alike(
    some: Mapping[str, Choice],
    inputs: Mapping[str, int],
    shapes: Mapping[str, Any],
    spec: Model,
) -> bool:
    """Whether what must read one input does, and nothing else reads it too."""
    of = {choice.ours[0]: name for name, choice in some.items() if len(choice.ours) == 1}
    members = templates(shapes, len(spec.layers))

    def number(part: str) -> int | None:
        name = of.get(f"layers.{{l}}.{part}.weight")
        return None if name is None else inputs.get(members[name][0])

    for parts in TOGETHER:
        if len({n for part in parts if (n := number(part)) is not None}) > 1:
            return False
    singles = [n for part in ("attn.o", "ffn.down") if (n := number(part)) is not None]
    shared = [n for part in ("attn.q", "ffn.gate", "ffn.up") if (n := number(part)) is not None]
    return not set(singles) & set(shared)
