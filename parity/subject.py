"""The two sides of a diagnosis: a decoder's reference in torch, and whatever claims to be its twin.

Both run on the same input and are seen from inside (see probes.py). Everything is in float64, where
a difference is a fault and not rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from configs import Model
from parity import probes, sides, table
from parity.inputs import Inputs
from parity.probes import Place, Trace
from parity.sides import Wrong
from parity.tensors import Tensor, Tensors, backward, forward

if TYPE_CHECKING:
    from jaxmodel import Decoder
    from parity.causes import Edit


@dataclass(frozen=True)
class Reference:
    """torchref with a spec and weights, on one input, in one dtype."""

    spec: Model
    tensors: Tensors
    given: Inputs
    dtype: str = "float64"

    @cached_property
    def model(self) -> Any:
        """The torch model, made once."""
        return sides.torch_model(self.spec, self.tensors, self.dtype)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Where its probes are."""
        return probes.places(self.spec)

    def run(self, forced: Trace | None = None, edits: Sequence[Edit] = ()) -> Trace:
        """One forward and backward, making the mistakes given."""
        import torch

        if edits:
            from parity.causes import edited

            making = edited(self.model, edits)
        ids, positions, segments = (
            torch.from_numpy(x) for x in (self.given.ids, self.given.positions, self.given.segments)
        )
        with making if edits else nullcontext():
            return probes.run_torch(
                self.model,
                self.places,
                lambda: self.model(ids, positions=positions, segments=segments),
                lambda logits: sides.torch_nll(logits, self.given),
                forced,
            )


@dataclass(frozen=True)
class Subject:
    """The JAX side: a spec, its weights in torch's names and layout, and a run seen from inside."""

    spec: Model
    tensors: Tensors
    run: Callable[..., Trace]  # of probes.jax_runs
    decode: Callable[[np.ndarray, int], np.ndarray] | None = None  # as sides.decode_jax

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The weights, read: only a failure asks for them, and they are as large as the model."""
        return {name: tensor.read() for name, tensor in self.tensors.items()}


def decoder(model: Decoder, layout: str, given: Inputs, *, jit: bool = True) -> Subject:
    """A jaxmodel, as it is: its own spec, its own weights."""
    import jax
    import jax.numpy as jnp

    from jaxmodel import axes

    spec = model.spec
    parameters = table.rows(spec, layout)
    seen = probes.rows(spec, layout, given.ids.shape)
    arrays = axes.arrays(model)
    here = {path: Tensor.of(np.asarray(x)) for path, x in arrays.items()}
    named = backward(parameters, here, "the JAX side")
    at = np.nonzero(given.counted)

    def apply(params: Mapping[str, Any]) -> Any:
        now = axes.with_arrays(model, params)
        return now(given.ids, positions=given.positions, segments=given.segments)

    def score(logits: Any) -> Any:
        wide = logits[:, :-1].astype(jnp.promote_types(logits.dtype, jnp.float32))
        scores = jax.nn.log_softmax(wide, axis=-1)
        return -jnp.take_along_axis(scores, given.ids[:, 1:, None], axis=-1)[..., 0][at]

    run = probes.jax_runs(apply, arrays, score, parameters, seen, jit=jit)

    def decode(ids: np.ndarray, prefill: int) -> np.ndarray:
        with nullcontext() if jit else jax.disable_jit():
            return sides.decode_jax(model, ids, prefill)

    return Subject(spec, named, run, decode)


def wrong_model(
    spec: Model, tensors: Tensors, wrong: Wrong | None, layout: str = "unroll"
) -> Decoder:
    """jaxmodel in float64 with a mistake in it."""
    if wrong is not None and layout != "scan":
        # Faults in the weights are written for stacked layers; they are made there, and unstacked.
        stacked = table.rows(spec, "scan")
        arrays = {path: t.read() for path, t in forward(stacked, tensors, "the source").items()}
        here = {path: Tensor.of(x) for path, x in wrong.weights(arrays).items()}
        tensors = backward(stacked, here, "the faulty weights")
        wrong = replace(wrong, weights=lambda arrays: arrays)
    return sides.jax_model(spec, tensors, "float64", layout, wrong)


def wrong_decoder(spec: Model, tensors: Tensors, given: Inputs, wrong: Wrong | None) -> Subject:
    """The same as a subject that runs operation by operation: for the kill table."""
    return decoder(wrong_model(spec, tensors, wrong), "unroll", given, jit=False)
