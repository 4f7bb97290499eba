"""One training step: loss, gradients, update; one jit with every sharding given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int

from jaxtwin.configs import BadInput
from jaxtwin.configs.runs import Training
from jaxtwin.configs.spec import Model
from jaxtwin.jaxmodel import axes
from jaxtwin.jaxmodel.checkpoint import prove
from jaxtwin.jaxmodel.lazy import Lazy
from jaxtwin.jaxmodel.model import Decoder
from jaxtwin.jaxmodel.sharding import from_slices
from jaxtwin.train import loss, mesh, optim

Params = dict[str, jax.Array]  # by path, as `jaxmodel.axes.arrays` names them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of tokens and what each place is to predict. A token sees its own segment alone."""

    ids: Int[Array, "b t"]
    labels: Int[Array, "b t"]  # shifted already; loss.IGNORE predicts nothing
    positions: Int[Array, "b t"]  # from 0 in every segment
    segments: Int[Array, "b t"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that a step changes. The parameters are the masters: float32, whatever computes."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]  # batches seen
    skipped: Int[Array, ""]  # of those, batches whose loss or gradient was not finite


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """What one step reports."""

    loss: Float[Array, ""]  # nats a predicted token
    norm: Float[Array, ""]  # of the whole gradient, before clipping
    rate: Float[Array, ""]  # the learning rate of this update
    tokens: Int[Array, ""]  # predicted
    finite: Bool[Array, ""]  # False: nothing was applied


@dataclass(frozen=True)
class Plan:
    """All that is settled before the first step, without any array being made."""

    run: Training
    model: Decoder  # shapes alone; gives the forward its structure
    optimizer: optax.GradientTransformation
    rate: optax.Schedule
    mesh: Mesh
    params: dict[str, NamedSharding]
    state: Any  # State of shardings
    compute: Any
    notes: list[str]

    @property
    def masters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every parameter's shape and dtype by its path."""
        return axes.arrays(self.model)


def plan(run: Training, spec: Model, devices: Mesh, *, dtype: Any = jnp.float32) -> Plan:
    """The run's plan for that model on that mesh. BadInput when they do not fit.

    `dtype` is the masters' and for tests alone: float64 masters compute in float64 too.
    """
    model = nnx.eval_shape(
        lambda: Decoder(spec, rngs=nnx.Rngs(0), dtype=dtype, layout=run.layout, remat=run.remat)
    )
    masters = axes.arrays(model)
    letters = axes.letters(model)
    shardings, notes = mesh.parameters(letters, {p: x.shape for p, x in masters.items()}, devices)
    optimizer = optim.build(run.optimizer, run.steps, letters)
    state = jax.eval_shape(lambda params: start(optimizer, params), masters)
    return Plan(
        run=run,
        model=model,
        optimizer=optimizer,
        rate=optim.rate(run.optimizer, run.steps),
        mesh=devices,
        params=shardings,
        state=mesh.like(state, devices, shardings),
        compute=jnp.dtype(run.compute) if dtype == jnp.float32 else jnp.dtype(dtype),
        notes=notes,
    )


def start(optimizer: optax.GradientTransformation, params: Params) -> State:
    """The state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    return State(params, optimizer.init(params), zero, zero)


def fresh(plan: Plan) -> State:
    """Random parameters from the run's seed, made where they will live; the same on any mesh."""

    def make() -> State:
        model = Decoder(
            plan.model.spec,
            rngs=nnx.Rngs(plan.run.seed),
            dtype=plan.model.embed.weight.dtype,
            layout=plan.run.layout,
        )
        return start(plan.optimizer, axes.arrays(model))

    return jax.jit(make, out_shardings=plan.state)()


def placed(plan: Plan, arrays: Mapping[str, Lazy | np.ndarray]) -> State:
    """Given parameters by path, of which each device's slice alone is read.

    Narrower ones are widened to the masters' dtype, which changes no value. BadInput when they are
    not the model's, or wider.
    """
    where = f"what {plan.run.model} gave"
    prove(plan.model.spec, plan.run.layout, {path: x.shape for path, x in arrays.items()}, where)
    masters = plan.masters
    for path, x in arrays.items():
        if jnp.promote_types(x.dtype, masters[path].dtype) != masters[path].dtype:
            raise BadInput(
                f"{where}: {path} is {x.dtype}, which {masters[path].dtype} would narrow"
            )
    params = {
        path: from_slices(x, plan.params[path], masters[path].dtype) for path, x in arrays.items()
    }
    return jax.jit(lambda params: start(plan.optimizer, params), out_shardings=plan.state)(params)


def gradients(plan: Plan, params: Params, batch: Batch) -> tuple[Float[Array, ""], Params]:
    """The mean loss over the batch's predicted tokens, and its gradient in the masters' dtype.

    With accumulation the rows pass in parts. Every part is divided by the whole batch's count, so
    the sum of the parts is the mean over all tokens, however unevenly they fall.
    """
    count = loss.predicted(batch.labels)

    @jax.value_and_grad
    def part(params: Params, rows: Batch) -> Float[Array, ""]:
        # The cast is inside: what is differentiated are the masters, so parts add up in float32.
        model = axes.with_arrays(
            plan.model, {path: x.astype(plan.compute) for path, x in params.items()}
        )
        logits, aux = model.logits_and_aux(
            rows.ids, positions=rows.positions, segments=rows.segments
        )
        total = loss.mean(logits, rows.labels, count)
        for auxiliary in aux.losses.values():  # each the mean of its rows
            total = total + auxiliary / plan.run.accumulate
        return total

    k = plan.run.accumulate
    if k == 1:
        return part(params, batch)
    # Every k-th row, so that each device keeps its own rows and none travel.
    parts = jax.tree.map(lambda x: x.reshape(-1, k, *x.shape[1:]).swapaxes(0, 1), batch)

    def add(sums: Any, rows: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, part(params, rows)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, params, batch))
    return jax.lax.scan(add, zeros, parts)[0]


def shapes(plan: Plan) -> Batch:
    """What a batch will look like, to compile for."""
    shape = (plan.run.batch, plan.run.length)
    rows: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=mesh.rows(plan.mesh))
    return Batch(rows, rows, rows, rows)


def make(plan: Plan) -> jax.stages.Wrapped:
    """The jitted step: State, Batch -> State, Metrics. The state given is gone afterwards.

    A step whose loss or gradient is not finite changes nothing but the counts: no parameter, no
    moment, no place in the schedule.
    """

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        with axes.resolving(mesh.activations(plan.mesh)):
            value, grads = gradients(plan, state.params, batch)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        updates, opt_state = plan.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params, opt_state = optim.unless(
            ~finite, (params, opt_state), (state.params, state.opt_state)
        )
        rate = plan.rate(state.step - state.skipped)
        metrics = Metrics(value, norm, rate, loss.predicted(batch.labels), finite)
        return State(params, opt_state, state.step + 1, state.skipped + ~finite), metrics

    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(plan.state, mesh.rows(plan.mesh)),
        out_shardings=(plan.state, mesh.replicated(plan.mesh)),
    )
