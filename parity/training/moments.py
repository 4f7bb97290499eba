"""AdamW's state between torch and optax: the two moments are moved by the table, like weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.parity.table import bridge, decoder_table
from jaxtwin.parity.table.tensors import Tensor, backward, forward

if TYPE_CHECKING:
    import optax

Moments = tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]  # mu, nu, count


def to_optax(
    spec: Model,
    state: Mapping[str, Any],
    optimizer: optax.GradientTransformation,
    layout: str = "scan",
) -> optax.OptState:
    """The state of an optax AdamW that goes on where torch's stopped; every bit of the moments.

    `state` is `torch.optim.AdamW.state_dict()` of an optimizer that was built from *named*
    parameters. BadInput where names are missing, parameters stand at different steps, or the
    moments are not those of the spec.
    """
    import jax.numpy as jnp

    mu, nu, count = from_torch(state)
    dst = [carried(spec, moment, layout) for moment in (mu, nu)]
    mus, nus = ({path: jnp.asarray(x) for path, x in moment.items()} for moment in dst)
    for path, x in mus.items():
        if x.dtype != dst[0][path].dtype:
            raise BadInput(
                f"torch's moment of {path} is {dst[0][path].dtype}, and JAX would make it "
                f"{x.dtype}: convert within jax.enable_x64(True)"
            )
    return filled(optimizer.init(mus), mus, nus, count)


def to_torch(
    spec: Model, state: optax.OptState, like: Mapping[str, Any], layout: str = "scan"
) -> dict[str, Any]:
    """The inverse: a state dict for `torch.optim.AdamW.load_state_dict`.

    `like` is the state_dict() of the torch optimizer that is to go on; its groups are kept.
    """
    import torch

    mu, nu, count = from_optax(spec, state, layout)
    names = _names(like)
    if odd := sorted(set(names) ^ set(mu)):
        raise BadInput(
            f"torch's optimizer and the model differ in {len(odd)} parameters, e.g. {odd[:3]}; "
            "build it from the model's named_parameters()"
        )
    entries = {
        number: {
            "step": torch.tensor(float(count)),
            "exp_avg": bridge.to_torch(mu[name]),
            "exp_avg_sq": bridge.to_torch(nu[name]),
        }
        for name, number in names.items()
    }
    # A torch that has made no step has no state at all.
    return {"state": entries if count else {}, "param_groups": like["param_groups"]}


def from_torch(state: Mapping[str, Any]) -> Moments:
    """Both moments by name, and the count, out of torch's state dict."""
    names, entries = _names(state), state["state"]
    missing = [name for name, number in names.items() if number not in entries]
    if missing:
        raise BadInput(
            f"torch's optimizer has no moments of {len(missing)} parameters, e.g. {missing[:3]}; "
            "make a step first"
        )
    by_name = {name: entries[number] for name, number in names.items()}
    count = _one((int(entry["step"]) for entry in by_name.values()), "torch's parameters")
    mu = {name: bridge.to_numpy(entry["exp_avg"]) for name, entry in by_name.items()}
    nu = {name: bridge.to_numpy(entry["exp_avg_sq"]) for name, entry in by_name.items()}
    return mu, nu, count


def from_optax(spec: Model, state: optax.OptState, layout: str) -> Moments:
    """Both moments by torch's names, and the count, out of an optax state."""
    import optax

    rows = decoder_table.rows(spec, layout)
    found = []
    for moment in ("mu", "nu"):
        trees = [tree for _, tree in optax.tree.get_all_with_path(state, moment)]
        if len(trees) != 1:
            raise BadInput(f"the optax state has {len(trees)} trees called {moment}, not one")
        named = {path: Tensor.of(np.asarray(x)) for path, x in trees[0].items()}
        src = backward(rows, named, f"the optax state's {moment}")
        found.append({name: tensor.read() for name, tensor in src.items()})
    counts = (int(x) for _, x in optax.tree.get_all_with_path(state, "count"))
    return found[0], found[1], _one(counts, "the optax state's parts")


def carried(spec: Model, named: Mapping[str, np.ndarray], layout: str) -> dict[str, np.ndarray]:
    """Arrays by torch's names as arrays by JAX's paths."""
    src = {name: Tensor.of(x) for name, x in named.items()}
    rows = decoder_table.rows(spec, layout)
    return {path: tensor.read() for path, tensor in forward(rows, src, "the moments").items()}


def filled(
    state: optax.OptState, mu: Mapping[str, Any], nu: Mapping[str, Any], count: int
) -> optax.OptState:
    """The state with other moments, in the dtypes that it has, and every count in it.

    Counts are int64 where JAX has it: optax's schedules take their precision from the count, and
    from an int32 they are float32.
    """
    import jax
    import jax.numpy as jnp
    import optax

    number = jnp.asarray(count, jax.dtypes.canonicalize_dtype(np.int64))

    def cast(name: str, new: Mapping[str, Any]) -> dict[str, Any]:
        old = optax.tree.get(state, name)
        return {path: jnp.asarray(x).astype(old[path].dtype) for path, x in new.items()}

    return optax.tree.set(state, mu=cast("mu", mu), nu=cast("nu", nu), count=number)


def _names(state: Mapping[str, Any]) -> dict[str, int]:
    """Torch's numbers by the parameters' names."""
    out: dict[str, int] = {}
    for group in state["param_groups"]:
        if "param_names" not in group:
            raise BadInput(
                "torch's optimizer does not know its parameters' names; build it from "
                "model.named_parameters() instead of model.parameters()"
            )
        out.update(zip(group["param_names"], group["params"], strict=True))
    return out


def _one(counts: Iterable[int], whose: str) -> int:
    found = set(counts)
    if len(found) != 1:
        raise BadInput(f"{whose} stand at different steps: {sorted(found)}; there is one count")
    return found.pop()
