"""The sides of a comparison: one run of torchref, of jaxmodel or of transformers, as NumPy.

Every run gives the same three things under torchref's names, so that comparing needs no framework.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.parity.sides import probes, terms
from jaxtwin.parity.sides.hypothesis import PlacedHypothesis, committing
from jaxtwin.parity.sides.inputs import Inputs
from jaxtwin.parity.sides.losses import jax_losses, torch_losses
from jaxtwin.parity.sides.outcome import Outcome, Trace
from jaxtwin.parity.sides.probes import JaxRuns, Place, Scored
from jaxtwin.parity.table import bridge, decoder_table
from jaxtwin.parity.table.tensors import Tensor, Tensors, backward, forward

if TYPE_CHECKING:
    import torch

    from jaxtwin.jaxmodel import Decoder


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A mistake that the JAX side alone makes, to see whether the check notices (selftest/faults).

    What it is in a few words, what a diagnosis has to call it, and how it is made: in the spec, in
    the weights on their way in, or in the finished model. `layered`: in one layer alone, if asked.
    """

    about: str = ""
    cause: str = ""
    layered: bool = True
    spec: Callable[[Model], Model] = lambda spec: spec
    weights: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda arrays: arrays
    edit: Callable[[Decoder], None] = lambda model: None


def torch_model(spec: Model, tensors: Tensors, dtype: str) -> Any:
    import torch

    from jaxtwin import torchref

    with torch.device("meta"):
        model = torchref.Decoder(spec)
    state = {n: bridge.to_torch(t.read()).to(getattr(torch, dtype)) for n, t in tensors.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return model


def run_torch(
    spec: Model,
    tensors: Tensors,
    inputs: Inputs,
    dtype: str,
    built: Callable[[Any], None] = lambda model: None,
) -> Outcome:
    """One forward and backward of torchref in the dtype; `built` is shown the model before."""

    model = torch_model(spec, tensors, dtype)
    built(model)
    with terms.Watch(model) as watch:
        logits, nll, objective = torch_scored(torch_forward(model, inputs), inputs)
        objective.backward()
    grads = {name: bridge.to_numpy(p.grad) for name, p in model.named_parameters()}
    return Outcome(bridge.to_numpy(logits), bridge.to_numpy(nll), grads, terms=watch.terms())


def torch_forward(model: Any, inputs: Inputs) -> Any:
    """torchref's logits on that input, and what its layers say beside (torchref/aux.py)."""
    import torch

    return model.logits_and_aux(
        torch.from_numpy(inputs.ids),
        positions=torch.from_numpy(inputs.positions),
        segments=torch.from_numpy(inputs.segments),
    )


def torch_scored(output: Any, inputs: Inputs) -> Scored:
    """The logits, each counted target's loss, and their mean with the auxiliary losses."""
    logits, aux = output
    nll = torch_nll(logits, inputs)
    return Scored(logits, nll, sum(aux.losses.values(), nll.mean()))


def torch_nll(logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The counted targets' next-token negative log-likelihoods, in float32 at least."""
    import torch

    return torch_losses(logits, inputs.ids)[torch.from_numpy(inputs.counted)]


def jax_model(
    spec: Model,
    tensors: Tensors,
    dtype: str,
    layout: str = "scan",
    injected: InjectedFault | None = None,
    remat: str = "none",
) -> Decoder:
    """jaxmodel filled through the table, with the mistakes of `injected` on the way."""
    import jax.numpy as jnp

    from jaxtwin.jaxmodel import abstract
    from jaxtwin.jaxmodel.axes import with_arrays

    injected = injected or InjectedFault()
    filled = forward(decoder_table.rows(spec, layout), tensors, "the source")
    values = injected.weights({path: tensor.read() for path, tensor in filled.items()})
    model = with_arrays(
        abstract(injected.spec(spec), dtype=dtype, layout=layout, remat=remat),
        {path: jnp.asarray(value).astype(dtype) for path, value in values.items()},
    )
    injected.edit(model)
    return model


@functools.cache
def _jax_step(last: bool) -> Callable[..., Any]:
    """The compiled forward and backward: made once, so that models of one shape share it.

    In a model's `last` run its gradients take the memory of its parameters.
    """
    import jax

    def loss(model: Decoder, ids: Any, positions: Any, segments: Any, targets: Any) -> Any:
        logits, aux = model.logits_and_aux(ids, positions=positions, segments=segments)
        nll = jax_losses(logits, ids)
        mean = (nll * targets).sum() / targets.sum()
        return sum(aux.losses.values(), mean), (logits, nll)

    donated = (0,) if last else ()
    return jax.jit(jax.value_and_grad(loss, has_aux=True), donate_argnums=donated)


def run_jax(
    spec: Model, model: Decoder, inputs: Inputs, layout: str = "scan", *, last: bool = False
) -> Outcome:
    """One forward and backward of jaxmodel, its gradients carried back through the table.

    After its `last` run the model's parameters are gone.
    """
    from jaxtwin.jaxmodel.axes import arrays

    # The input is an argument: baked in, XLA would fold a (b t v) scatter at compile time.
    targets = inputs.counted.astype(np.float32)
    (_, (logits, nll)), grads = _jax_step(last)(
        model, inputs.ids, inputs.positions, inputs.segments, targets
    )
    named = {path: Tensor.of(np.asarray(g)) for path, g in arrays(grads).items()}
    named = backward(decoder_table.rows(spec, layout), named, "the gradients")
    return Outcome(
        np.asarray(logits),
        np.asarray(nll)[inputs.counted],
        {name: tensor.read() for name, tensor in named.items()},
    )


@contextlib.contextmanager
def grads_on() -> Iterator[None]:
    """Within: torch computes gradients, whatever the caller has turned off."""
    import torch

    with torch.inference_mode(False), torch.enable_grad():
        yield


def logits_of_ids(model: Decoder, ids: np.ndarray) -> np.ndarray:
    """The logits (b t v) of ids alone, without positions or segments, as people call it."""
    import jax

    return np.asarray(jax.jit(lambda model: model(ids))(model))


def logits_jax(model: Decoder, inputs: Inputs) -> np.ndarray:
    """The logits (b t v) alone."""
    import jax

    @jax.jit
    def run(model: Decoder) -> Any:
        return model(inputs.ids, positions=inputs.positions, segments=inputs.segments)

    return np.asarray(run(model))


def decode_jax(model: Decoder, ids: np.ndarray, prefill: int) -> np.ndarray:
    """Logits (b v) after the last id, as text is generated: a prefill, then token by token."""
    from jaxtwin.jaxmodel import sample

    read = sample.reader(model, len(ids), ids.shape[1])
    logits = read(ids[:, :prefill])
    for i in range(prefill, ids.shape[1]):
        logits = read(ids[:, i : i + 1])
    return np.asarray(logits, np.float64)


# ---- seen from inside ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """torchref with a spec and weights, on one input, in one dtype."""

    spec: Model
    tensors: Tensors
    inputs: Inputs
    dtype: str = "float64"

    @cached_property
    def model(self) -> Any:
        """The torch model, made once."""
        return torch_model(self.spec, self.tensors, self.dtype)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Where its probes are."""
        return probes.places(self.spec)

    def run(self, patched: Trace | None = None, placed: Sequence[PlacedHypothesis] = ()) -> Trace:
        """One forward and backward, making the mistakes given."""
        with committing(self.model, placed) if placed else nullcontext():
            return probes.run_torch(
                self.model,
                self.places,
                lambda: torch_forward(self.model, self.inputs),
                lambda output: torch_scored(output, self.inputs),
                patched,
            )


@dataclass(frozen=True)
class Subject:
    """The JAX side: a spec, its weights in torch's names and layout, and a run seen from inside."""

    spec: Model
    tensors: Tensors
    run: Callable[..., Trace]  # of probes.JaxRuns
    decode: Callable[[np.ndarray, int], np.ndarray] | None = None  # as sides.decode_jax

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The weights, read: only a failure asks for them, and they are as large as the model."""
        return {name: tensor.read() for name, tensor in self.tensors.items()}


def decoder(model: Decoder, layout: str, inputs: Inputs, *, jit: bool = True) -> Subject:
    """A jaxmodel, as it is: its own spec, its own weights."""
    import jax
    import jax.numpy as jnp

    from jaxtwin.jaxmodel import axes

    spec = model.spec
    parameters = decoder_table.rows(spec, layout)
    seen = probes.rows(spec, layout, inputs.ids.shape)
    arrays = axes.arrays(model)
    dst = {path: Tensor.of(np.asarray(x)) for path, x in arrays.items()}
    named = backward(parameters, dst, "the JAX side")
    at = np.nonzero(inputs.counted)

    def apply(params: Mapping[str, Any]) -> Any:
        now = axes.with_arrays(model, params)
        return now.logits_and_aux(inputs.ids, positions=inputs.positions, segments=inputs.segments)

    def score(output: Any) -> Scored:
        logits, aux = output
        nll = jax_losses(logits, jnp.asarray(inputs.ids))[at]
        return Scored(logits, nll, sum(aux.losses.values(), nll.mean()))

    run = JaxRuns(apply, arrays, score, parameters, seen, jit=jit)

    def decode(ids: np.ndarray, prefill: int) -> np.ndarray:
        with nullcontext() if jit else jax.disable_jit():
            return decode_jax(model, ids, prefill)

    return Subject(spec, named, run, decode)


def faulty_model(
    spec: Model, tensors: Tensors, injected: InjectedFault | None, layout: str = "unroll"
) -> Decoder:
    """jaxmodel in float64 with a mistake in it."""
    if injected is not None and layout != "scan":
        # Faults in the weights are written for stacked layers; they are made there, and unstacked.
        stacked = decoder_table.rows(spec, "scan")
        arrays = {path: t.read() for path, t in forward(stacked, tensors, "the source").items()}
        dst = {path: Tensor.of(x) for path, x in injected.weights(arrays).items()}
        tensors = backward(stacked, dst, "the faulty weights")
        injected = replace(injected, weights=lambda arrays: arrays)
    return jax_model(spec, tensors, "float64", layout, injected)


def faulty_decoder(
    spec: Model, tensors: Tensors, inputs: Inputs, injected: InjectedFault | None
) -> Subject:
    """The same as a subject that runs operation by operation: for the kill table."""
    return decoder(faulty_model(spec, tensors, injected), "unroll", inputs, jit=False)
