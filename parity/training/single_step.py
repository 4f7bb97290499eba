"""One optimizer step alone: from the reference's parameters, moments, count and gradients.

Nothing has accumulated there, so a wrong optimizer shows at the first step that it gets wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.parity.compare.tolerances import OPTIMIZER
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensor, backward
from jaxtwin.parity.training import adam, moments
from jaxtwin.parity.training.adam import Arrays, ObservedStep

Combine = Callable[[Sequence[Any], Sequence[int]], Any]  # summed gradients, targets -> a gradient


def token_mean(grads: Sequence[Any], tokens: Sequence[int]) -> Any:
    """The mean over all targets, however they fall on the parts (trees of arrays by path)."""
    import jax

    return jax.tree.map(lambda *parts: sum(parts) / max(1, sum(tokens)), *grads)


def local_error(
    spec: Model,
    optimizer: Any,
    reference: Sequence[ObservedStep],
    *,
    layout: str = "scan",
    combine: Combine = token_mean,
) -> list[ObservedStep]:
    """The same steps made by an optax optimizer, each from the reference's state and gradients.

    What the optimizer keeps besides the two moments and the count stays its own from step to step.
    """
    import jax
    import jax.numpy as jnp

    def dst(named: Arrays) -> dict[str, Any]:
        return {p: jnp.asarray(x) for p, x in moments.carried(spec, named, layout).items()}

    def named(tree: Mapping[str, Any]) -> Arrays:
        back = {path: Tensor.of(np.asarray(x, np.float64)) for path, x in tree.items()}
        src = backward(decoder_table.rows(spec, layout), back, "the optimizer")
        return {name: tensor.read() for name, tensor in src.items()}

    out: list[ObservedStep] = []
    with jax.enable_x64(True):
        state = None
        for observed in reference:
            params = dst(observed.before.params)
            state = optimizer.init(params) if state is None else state
            before = observed.before
            state = moments.filled(state, dst(before.mu), dst(before.nu), before.count)
            grads = combine(
                [dst(p.grads) for p in observed.parts], [p.tokens for p in observed.parts]
            )
            updates, state = optimizer.update(grads, state, params)
            mu, nu, _ = moments.from_optax(spec, state, layout)
            wide = [{n: np.asarray(x, np.float64) for n, x in m.items()} for m in (mu, nu)]
            out.append(ObservedStep(before, observed.parts, adam.Step(named(updates), *wide)))
    return out


def differences(got: ObservedStep, want: ObservedStep) -> dict[str, dict[str, tuple[float, float]]]:
    """By "update", "mu", "nu" and by parameter: the relative L2 error, and its band.

    torch's update is the difference of its parameters, which were rounded: a small update of a
    large parameter is known no better than that.
    """
    eps = float(np.finfo(np.float64).eps)
    out: dict[str, dict[str, tuple[float, float]]] = {}
    for what, errors in adam.errors(got.result, want.result).items():
        out[what] = {}
        for name, error in errors.items():
            band = OPTIMIZER
            size = float(np.linalg.norm(want.result.update[name]))
            if what == "update" and size:
                band += eps * float(np.linalg.norm(want.before.params[name])) / size
            out[what][name] = (error, band)
    return out
