"""A person's own torch module, run on the same ids as the mirrors: the torch side of the proof.

A state dict has no forward, and both mirrors are built from what somebody says that the model is.
Only the module itself tells whether that is so.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import BadInput, Model, user_code
from jaxtwin.parity.checkpoints import state_dict
from jaxtwin.parity.naming.names import Naming
from jaxtwin.parity.sides import runs
from jaxtwin.parity.sides.inputs import Inputs
from jaxtwin.parity.sides.outcome import Outcome
from jaxtwin.parity.table import bridge
from jaxtwin.parity.table.tensors import Tensor, Tensors, forward

if TYPE_CHECKING:
    import torch

CASTS = {
    "torch.float64": "double",
    "torch.float32": "float",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "half",
}
TARGETS = ("targets", "labels", "target")  # what a forward may ask for before it gives all logits


@dataclass
class OwnModule:
    """`make` builds the module anew, untrained; `naming` says which of its tensors is which.

    `narrow` is what computed in float32 though float64 was asked for, as far as it was seen.
    """

    name: str
    make: Callable[[], torch.nn.Module]
    spec: Model
    naming: Naming
    narrow: list[str] = field(default_factory=list)

    def run(self, tensors: Tensors, inputs: Inputs, dtype: str) -> Outcome:
        """One forward and backward on rows of plain text; gradients under torchref's names.

        In float64 whatever its code narrows to float32 is computed in float64 too. BadInput where
        the module does not take the tensors or the ids, or gives no logits (b t v).
        """
        import torch

        with widened() if dtype == "float64" else nullcontext() as seen:
            model = self._filled(tensors, getattr(torch, dtype))
            if seen is not None:
                seen.narrow = self.narrow  # of what was built; from here on, of what computes
            logits = self._logits(model, torch.from_numpy(inputs.ids))
            nll = runs.torch_nll(logits, inputs)
            nll.mean().backward()
        grads = forward(self.naming.rows(self.spec), self._grads(model), f"{self.name}'s gradients")
        return Outcome(_wide(logits), _wide(nll), {n: g.read() for n, g in grads.items()})

    def logits(self, tensors: Tensors, ids: np.ndarray) -> np.ndarray:
        """The logits (b t v) in float64, without gradients."""
        import torch

        with widened(), torch.no_grad():
            model = self._filled(tensors, torch.float64)
            return _wide(self._logits(model, torch.from_numpy(ids)))

    def logits_of(self, state: Mapping[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
        """The same, of values under the module's own names, whatever they are of."""
        import torch

        with widened(), torch.no_grad():
            model = self.built().double().eval()
            known = {n for n, _ in model.named_parameters(remove_duplicate=False)}
            values = {n: torch.from_numpy(np.array(x)) for n, x in state.items() if n in known}
            model.load_state_dict(values, strict=False)
            return _wide(self._logits(model, torch.from_numpy(ids)))

    def built(self) -> torch.nn.Module:
        """The module as its own code makes it."""
        import torch

        try:
            model = self.make()
        except Exception as error:
            raise BadInput(f"{self.name} cannot be built: {user_code.told(error)}") from error
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        if not isinstance(model, torch.nn.Module):
            raise BadInput(f"{self.name} must give a torch module, and gives a {type(model)}")
        return _copy(model)  # it may be one that its owner goes on with

    def _filled(self, tensors: Tensors, dtype: torch.dtype) -> torch.nn.Module:
        import torch

        model = self.built()
        self.narrow = []
        if dtype == torch.float64:  # what `widened` did not make so was made before, or unseen
            low = (torch.float32, torch.complex64, torch.float16, torch.bfloat16)
            held = model.named_buffers()
            self.narrow = [f"its {name} is {x.dtype}" for name, x in held if x.dtype in low]
        model = getattr(model, CASTS[str(dtype)])().eval()  # `.to` would make complex buffers real
        named = state_dict.released(tensors, self.spec, self.naming, self.name)
        state = {name: bridge.to_torch(tensor.read()).to(dtype) for name, tensor in named.items()}
        try:
            found = model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise BadInput(f"{self.name} does not take the tensors: {error}") from None
        lacking = [n for n in found.missing_keys if n in dict(model.named_parameters())]
        copies = self.naming.copies(self.spec)
        spare = [n for n in found.unexpected_keys if n not in copies]
        problems = [f"{name} is named and not in the module" for name in spare]
        problems += [f"{name} is in the module and not named" for name in lacking]
        if problems:
            raise BadInput(f"{self.name} has other tensors: {'; '.join(problems[:8])}")
        return model

    def _logits(self, model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """The forward's logits, from whatever it returns them in."""
        wanted = (*ids.shape, self.spec.vocab)
        try:
            logits = logits_in(model(ids))
            if tuple(logits.shape) != wanted and (name := _asks(model)):
                logits = logits_in(model(ids, **{name: ids}))
        except BadInput as error:
            raise BadInput(f"{self.name}: {error}") from None
        except Exception as error:
            told = user_code.told(error)
            raise BadInput(f"{self.name} fails on ids {tuple(ids.shape)}: {told}") from error
        if tuple(logits.shape) != wanted:
            raise BadInput(
                f"{self.name} gives {tuple(logits.shape)} for ids {tuple(ids.shape)}, and must "
                f"give logits {wanted}; name a function that builds a module which does"
            )
        return logits

    def _grads(self, model: torch.nn.Module) -> Mapping[str, Tensor]:
        """The gradient of each named tensor; of one that the module holds twice, the sum."""
        every = dict(model.named_parameters(remove_duplicate=False))
        copies = self.naming.copies(self.spec)
        sums: dict[str, dict[int, Any]] = {}
        for name, parameter in every.items():
            sums.setdefault(copies.get(name, name), {})[id(parameter)] = parameter
        out = {}
        for name, parameters in sums.items():
            grads = [
                np.zeros(tuple(p.shape)) if p.grad is None else _wide(p.grad)
                for p in parameters.values()
            ]
            out[name] = Tensor.of(np.sum(grads, axis=0))
        return out


def found(module: Any, spec: Model, naming: Naming) -> OwnModule:
    """From FILE.py:NAME, a class or function that builds it, or a module that there is already.

    What takes arguments is no builder: BadInput then says how to write one.
    """
    import torch

    text = os.fspath(module) if isinstance(module, (str, os.PathLike)) else ""
    thing = user_code.named(text) if text else module
    name = text.rpartition(":")[2] or getattr(thing, "__name__", type(thing).__name__)
    if isinstance(thing, torch.nn.Module):
        return OwnModule(name, lambda: thing, spec, naming)
    if not callable(thing):
        raise BadInput(f"{name} must build a torch module, and is a {type(thing).__name__}")
    try:
        inspect.signature(thing).bind()
    except TypeError as error:
        raise BadInput(
            f"{name} cannot be called without arguments ({error}); write a function beside it, "
            f"such as `def build(): return {name}(...)`, and name that"
        ) from None
    except ValueError:  # it has no signature to look at
        pass
    return OwnModule(name, thing, spec, naming)


def _copy(module: torch.nn.Module) -> torch.nn.Module:
    """Its copy, made outside of `widened`: what it holds stays as it is."""
    import torch

    with torch._C.DisableTorchFunction():
        return copy.deepcopy(module)


def logits_in(output: Any) -> torch.Tensor:
    """The logits in what a forward returns: itself, the first of several, or called logits."""
    import torch

    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, Sequence) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise BadInput(f"its forward gives no logits but a {type(output).__name__}")
    return output


def _asks(model: torch.nn.Module) -> str:
    """The argument without which a forward gives the last position's logits alone."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in TARGETS if name in names), "")


@contextmanager
def widened() -> Any:
    """Within: whatever torch code asks to be float32 (or complex64) is float64 (complex128).

    People's modules narrow inside, in `x.float()` or a table of cosines, and are right to. In
    float64 that is a rounding of 1e-8, under which a wrong eps could hide.
    """
    import torch

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _mode() as mode:
            yield mode
    finally:
        torch.set_default_dtype(default)


def _mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    wider = {
        torch.float32: torch.float64,
        torch.bfloat16: torch.float64,
        torch.float16: torch.float64,
        torch.complex64: torch.complex128,
    }
    casts = {
        torch.Tensor.float: torch.float64,
        torch.Tensor.half: torch.float64,
        torch.Tensor.bfloat16: torch.float64,
        torch.Tensor.cfloat: torch.complex128,  # type: ignore[attr-defined]
    }

    def wide(value: Any) -> Any:
        return wider.get(value, value) if isinstance(value, torch.dtype) else value

    class Widened(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.narrow: list[str] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
            args = tuple(wide(value) for value in args)
            if func in casts:
                return args[0].to(casts[func])
            out = func(*args, **kwargs)
            for x in (out, *args):  # a table that is no buffer comes as an argument
                if isinstance(x, torch.Tensor) and x.dtype in wider and len(self.narrow) < 8:
                    self.narrow.append(f"{getattr(func, '__name__', func)} has a {x.dtype}")
            return out

    return Widened()


def _wide(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()
