"""The sides of a comparison: one run of torchref, of jaxmodel or of transformers, as NumPy.

Every run gives the same three things under torchref's names, so that comparing needs no framework.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from configs import Model
from parity import bridge, table, terms
from parity.inputs import Inputs
from parity.tensors import Tensor, Tensors, backward, forward
from parity.terms import Terms

if TYPE_CHECKING:
    import torch

    from jaxmodel import Decoder


@dataclass(frozen=True)
class Outcome:
    """logits (b t v); the counted targets' negative log-likelihoods, one after another; the
    gradient of their mean for every parameter, and what those of biases are sums of (terms.py)."""

    logits: np.ndarray
    nll: np.ndarray
    grads: dict[str, np.ndarray]
    terms: Mapping[str, Terms] = field(default_factory=dict, kw_only=True)

    def off(self, name: str, grad: np.ndarray) -> float:
        """How far another's gradient of that parameter is off this one, relatively."""
        return terms.relative(grad, self.grads[name], self.terms.get(name))


@dataclass(frozen=True)
class Wrong:
    """What is done to the JAX side alone, to see whether the check notices (see faults.py)."""

    spec: Callable[[Model], Model] = lambda spec: spec
    weights: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda arrays: arrays
    edit: Callable[[Decoder], None] = lambda model: None


def torch_model(spec: Model, tensors: Tensors, dtype: str) -> Any:
    import torch

    import torchref

    with torch.device("meta"):
        model = torchref.Decoder(spec)
    state = {n: bridge.to_torch(t.read()).to(getattr(torch, dtype)) for n, t in tensors.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return model


def run_torch(
    spec: Model,
    tensors: Tensors,
    given: Inputs,
    dtype: str,
    built: Callable[[Any], None] = lambda model: None,
) -> Outcome:
    """One forward and backward of torchref in the dtype; `built` is shown the model before."""
    import torch

    model = torch_model(spec, tensors, dtype)
    built(model)
    with terms.Watch(model) as watch:
        logits = model(
            torch.from_numpy(given.ids),
            positions=torch.from_numpy(given.positions),
            segments=torch.from_numpy(given.segments),
        )
        nll = torch_nll(logits, given)
        nll.mean().backward()
    grads = {name: _wide(p.grad) for name, p in model.named_parameters()}
    return Outcome(_wide(logits), _wide(nll), grads, terms=watch.terms())


def torch_nll(logits: torch.Tensor, given: Inputs) -> torch.Tensor:
    """The counted targets' next-token negative log-likelihoods, in float32 at least."""
    import torch

    wide = torch.promote_types(logits.dtype, torch.float32)
    scores = logits[:, :-1].to(wide).log_softmax(dim=-1)
    nll = -scores.gather(-1, torch.from_numpy(given.ids[:, 1:, None]))[..., 0]
    return nll[torch.from_numpy(given.counted)]


def jax_model(
    spec: Model,
    tensors: Tensors,
    dtype: str,
    layout: str = "scan",
    wrong: Wrong | None = None,
    remat: str = "none",
) -> Decoder:
    """jaxmodel filled through the table; `wrong` makes mistakes on the way."""
    import jax.numpy as jnp

    from jaxmodel import abstract
    from jaxmodel.axes import with_arrays

    wrong = wrong or Wrong()
    filled = forward(table.rows(spec, layout), tensors, "the source")
    values = wrong.weights({path: tensor.read() for path, tensor in filled.items()})
    model = with_arrays(
        abstract(wrong.spec(spec), dtype=dtype, layout=layout, remat=remat),
        {path: jnp.asarray(value).astype(dtype) for path, value in values.items()},
    )
    wrong.edit(model)
    return model


@functools.cache
def _jax_step() -> Callable[..., Any]:
    """The compiled forward and backward: made once, so that models of one shape share it."""
    import jax
    import jax.numpy as jnp

    def loss(model: Decoder, ids: Any, positions: Any, segments: Any, targets: Any) -> Any:
        logits = model(ids, positions=positions, segments=segments)
        scores = logits[:, :-1].astype(jnp.promote_types(logits.dtype, jnp.float32))
        scores = jax.nn.log_softmax(scores, axis=-1)
        nll = -jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1)[..., 0]
        return (nll * targets).sum() / targets.sum(), (logits, nll)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def run_jax(spec: Model, model: Decoder, given: Inputs, layout: str = "scan") -> Outcome:
    """One forward and backward of jaxmodel, its gradients carried back through the table."""
    from jaxmodel.axes import arrays

    # The input is an argument: baked in, XLA would fold a (b t v) scatter at compile time.
    targets = given.counted.astype(np.float32)
    (_, (logits, nll)), grads = _jax_step()(
        model, given.ids, given.positions, given.segments, targets
    )
    named = {path: Tensor.of(np.asarray(g)) for path, g in arrays(grads).items()}
    named = backward(table.rows(spec, layout), named, "the gradients")
    return Outcome(
        np.asarray(logits, np.float64),
        np.asarray(nll, np.float64)[given.counted],
        {name: np.asarray(tensor.read(), np.float64) for name, tensor in named.items()},
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


def logits_jax(model: Decoder, given: Inputs) -> np.ndarray:
    """The logits (b t v) alone."""
    import jax

    @jax.jit
    def run(model: Decoder) -> Any:
        return model(given.ids, positions=given.positions, segments=given.segments)

    return np.asarray(run(model))


def decode_jax(model: Decoder, ids: np.ndarray, prefill: int) -> np.ndarray:
    """Logits (b v) after the last id, as text is generated: a prefill, then token by token."""
    from jaxmodel import sample

    read = sample.reader(model, len(ids), ids.shape[1])
    logits = read(ids[:, :prefill])
    for i in range(prefill, ids.shape[1]):
        logits = read(ids[:, i : i + 1])
    return np.asarray(logits, np.float64)


def _wide(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()
