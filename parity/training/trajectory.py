"""Trained side by side: AdamW in torch and in optax, from the same weights on the same batches.

The torch side (torch_training.py) shares nothing with `train`; the JAX side is `train`'s optimizer
and loss. This is the accumulated error, after n steps; single_step.py has that of each step alone.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.configs.runs import AdamW
from jaxtwin.parity.compare.tolerances import DRIFT, OPTIMIZER, K
from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.results import Check, worst_first
from jaxtwin.parity.sides.reordering import Reordering
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensor, Tensors, backward, forward, moves
from jaxtwin.parity.training import adam, moments
from jaxtwin.parity.training.adam import Arrays, State
from jaxtwin.parity.training.torch_training import Batch, TorchSide, refuse

DRAWS = ((4, 1), (12, 3))  # of torch and of JAX in a working dtype: at first, and in doubt
SMALL = 1_000_000  # parameters
DTYPES = ("float64", "float32")


Build = Callable[[AdamW, int, Mapping[str, str]], Any]  # config, steps, letters -> an optimizer


def optimizer(config: AdamW, steps: int, letters: Mapping[str, str]) -> Any:
    """The one that is trained with: optax's, as `train` puts it together."""
    from jaxtwin.train import optim

    return optim.build(config, steps, letters)


def _compiled(spec: Model, function: Callable[..., Any]) -> Callable[..., Any]:
    """Jitted; for a small model into machine code that is made quickly and runs slowly."""
    import jax

    size = sum(math.prod(m.dst_shape) for m in moves(decoder_table.rows(spec)))
    quick = {"xla_backend_optimization_level": 0} if size < SMALL else None
    return jax.jit(function, compiler_options=quick)


@functools.cache
def _share(spec: Model, dtype: str, layout: str) -> Callable[..., Any]:
    """The compiled forward and backward, which optimizers share: (parameters, rows, count)."""
    import jax

    from jaxtwin.jaxmodel import abstract, axes
    from jaxtwin.train import loss

    empty = abstract(spec, dtype=dtype, layout=layout)

    @jax.value_and_grad
    def share(params: Any, rows: Any, count: Any) -> Any:
        ids, labels, positions, segments = rows
        model = axes.with_arrays(empty, params)
        logits = model(ids, positions=positions, segments=segments)
        return loss.mean(logits, labels, count)

    return _compiled(spec, share)


class JaxSide:
    """jaxmodel under `train`'s optimizer and loss, or under the optimizer that `build` makes."""

    def __init__(self, spec: Model, tensors: Tensors, config: AdamW, steps: int, dtype: str,
                 layout: str = "scan", build: Build | None = None):  # fmt: skip
        import optax

        from jaxtwin.jaxmodel import abstract, axes

        self.spec, self.layout, self.config = spec, layout, config
        empty = abstract(spec, dtype=dtype, layout=layout)
        self.optimizer = (build or optimizer)(config, steps, axes.letters(empty))
        self.dtype = dtype
        self._start(tensors)

        def update(grads: Any, opt_state: Any, params: Any) -> Any:
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            return updates, opt_state, optax.apply_updates(params, updates)

        self._update = _compiled(spec, update)

    def _start(self, tensors: Tensors) -> None:
        import jax.numpy as jnp

        read = forward(decoder_table.rows(self.spec, self.layout), tensors, "the source")
        self.params = {p: jnp.asarray(t.read()).astype(self.dtype) for p, t in read.items()}
        zeros = {path: np.zeros(x.shape) for path, x in self.params.items()}
        self.opt_state = moments.filled(self.optimizer.init(self.params), zeros, zeros, 0)

    def fresh(self) -> float:
        """The largest thing in the optimizer's own first moments and count: 0, where it is right.

        Its state is filled by name, so that a start that is wrong would never be seen.
        """
        mu, nu, count = moments.from_optax(self.spec, self.optimizer.init(self.params), self.layout)
        kept = [np.abs(np.asarray(x, np.float64)).max() for m in (mu, nu) for x in m.values()]
        return float(np.max([count, *kept]))

    def again(self, tensors: Tensors) -> JaxSide:
        """The same, compiled already, from the start with other tensors."""
        new = copy.copy(self)
        new._start(tensors)
        return new

    def step(self, batch: Batch, accumulate: int = 1) -> dict[str, float]:
        """One step on the batch: "loss", "norm", "clip" and "rate".

        The last two are not asked for but measured, from what went into the first moment and from
        what became of AdamW's direction: so it shows when the optimizer does not do as it says.
        """
        share, value = _share(self.spec, self.dtype, self.layout), 0.0
        grads: dict[str, Any] = {}
        for part in batch.parts(accumulate):
            rows = (part.ids, part.labels, part.positions, part.segments)
            one, some = share(self.params, rows, max(1, batch.tokens))
            value += float(one)
            grads = {p: g + grads[p] for p, g in some.items()} if grads else some
        before = self.state()
        updates, self.opt_state, self.params = self._update(grads, self.opt_state, self.params)
        named = self.named(grads)
        measured = _measured(self.config, named, self.named(updates), before, self.state())
        return {"loss": value, "norm": adam.norm(named), **measured}

    def named(self, tree: Mapping[str, Any]) -> Arrays:
        """Arrays by path as float64 arrays by torch's names."""
        dst = {path: Tensor.of(np.asarray(x)) for path, x in tree.items()}
        src = backward(decoder_table.rows(self.spec, self.layout), dst, "the JAX side")
        return {name: np.asarray(t.read(), np.float64) for name, t in src.items()}

    def state(self) -> State:
        """Everything in float64."""
        mu, nu, count = moments.from_optax(self.spec, self.opt_state, self.layout)
        wide = ({n: np.asarray(x, np.float64) for n, x in m.items()} for m in (mu, nu))
        return State(count, self.named(self.params), *wide)


def _measured(
    config: AdamW, grads: Arrays, updates: Arrays, before: State, after: State
) -> dict[str, float]:
    """The clip factor and the learning rate that make these updates of these gradients."""
    clip = [0.0, 0.0]
    rate = [0.0, 0.0]
    for name, g in grads.items():
        went = (after.mu[name] - config.b1 * before.mu[name]) / (1 - config.b1)
        clip = [clip[0] + (went * g).sum(), clip[1] + (g * g).sum()]
        mu = after.mu[name] / (1 - config.b1**after.count)
        nu = after.nu[name] / (1 - config.b2**after.count)
        turn = mu / (np.sqrt(nu) + config.eps)
        if g.ndim > 1:
            turn = turn + config.weight_decay * before.params[name]
        rate = [rate[0] - (updates[name] * turn).sum(), rate[1] + (turn * turn).sum()]
    return {
        "clip": float(clip[0] / clip[1]) if clip[1] else 1.0,
        "rate": float(rate[0] / rate[1]) if rate[1] else 0.0,
    }


# ---- accumulated -----------------------------------------------------------------------------


Gaps = dict[str, dict[str, float]]  # "loss", "parameters", "mu", "nu"; then by name


@dataclass
class Trajectory:
    """One dict a step (docs/json.md describes them), what they are held to, and the last gaps."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    final_gaps: Gaps = field(default_factory=dict)


StepResult = tuple[dict[str, float], State]  # the numbers of a step, and the state after it


def gaps(
    got: StepResult, want: StepResult, least: Mapping[str, Mapping[str, float]] | None = None
) -> Gaps:
    """Relative errors after a step, by tensor; `least` as in torch_training.TorchSide."""
    least = least or {}
    pairs = {"parameters": "params", "mu": "mu", "nu": "nu"}
    loss = abs(got[0]["loss"] - want[0]["loss"]) / (abs(want[0]["loss"]) or 1.0)
    return {
        "loss": {"loss": loss},
        **{
            what: {
                name: _gap(getattr(got[1], kept)[name], x, least.get(what, {}).get(name, 0.0))
                for name, x in getattr(want[1], kept).items()
            }
            for what, kept in pairs.items()
        },
    }


def _gap(got: np.ndarray, want: np.ndarray, least: float) -> float:
    """The relative L2 error, of something whose size is not taken for less than that."""
    size = float(np.linalg.norm(want))
    if not size < least:
        return metrics.relative_l2(got, want)
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / least)


def trajectory(
    spec: Model,
    tensors: Tensors,
    config: AdamW,
    *,
    steps: int,
    batches: Sequence[Batch],
    accumulate: int = 1,
    dtype: str = "float64",
    layout: str = "scan",
    build: Build | None = None,
    theirs: tuple[Model, Tensors] | None = None,
) -> Trajectory:
    """Both sides trained on the batches, a step on each; `steps` is the schedule's length.

    `theirs` is what the JAX side starts from, where that is something else of the same shapes.
    In float64 they may drift apart by DRIFT, and rates and clip factors by OPTIMIZER (see
    tolerances.py). In float32 the reference is torch in float64 from the same rounded weights, and
    the JAX side may be off it by K times what torch in float32 is. Torch's error is the largest of
    several runs that differ in their roundings alone: the rows of a batch in another order, the
    model's width and hidden width too (reordering.py). Where that is not enough, both sides are
    drawn again, more often; then the smallest of the JAX side's errors counts. All is compared
    after every step, tensor by tensor; a kind's check is the one that used most of its budget.
    """
    import jax

    if dtype not in DTYPES:
        raise BadInput(f"training is compared in {' or '.join(DTYPES)}, not in {dtype}")
    refuse(config, steps, batches, accumulate)
    start = {n: Tensor.of(np.asarray(t.read()).astype(dtype)) for n, t in tensors.items()}
    twin = theirs[0] if theirs else spec
    other = start
    if theirs:
        other = {n: Tensor.of(np.asarray(t.read()).astype(dtype)) for n, t in theirs[1].items()}
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        ours = JaxSide(twin, other, config, steps, dtype, layout, build)
        fresh = Check("training_start", dtype, ours.fresh(), 0.0)
        for torchs, jaxs in [(0, 1)] if dtype == "float64" else DRAWS:
            reference = Draw(TorchSide(spec, start, config, steps, "float64"), spec, 0)
            draws = [
                Draw(TorchSide(spec, reordered, config, steps, dtype), spec, seed)
                for seed in range(torchs)
                for reordered in [Reordering(spec, seed).apply(start)]
            ]
            mine = [Draw(ours.again(Reordering(twin, seed).apply(other)), twin, seed)
                    for seed in range(jaxs)]  # fmt: skip
            out = _side_by_side(reference, draws, mine, batches, accumulate, dtype)
            if all(check.ok for check in out.checks):
                break
    out.checks.insert(0, fresh)
    return out


def _side_by_side(
    reference: Draw,
    draws: Sequence[Draw],
    mine: Sequence[Draw],
    batches: Sequence[Batch],
    accumulate: int,
    dtype: str,
) -> Trajectory:
    """All of them through the batches in step, so that no more than one state of each is held."""
    out, worst = Trajectory(), dict[str, Check]()
    for i, batch in enumerate(batches, 1):
        want = reference.step(batch, accumulate)
        least = reference.side.least if isinstance(reference.side, TorchSide) else {}
        noise = [gaps(draw.step(batch, accumulate), want, least) for draw in draws]
        results = [draw.step(batch, accumulate) for draw in mine]
        found = [gaps(one, want, least) for one in results]
        out.steps.append(_line(i, results[0], want, found[0]))
        for check in _judged(i, results[0], want, found, noise, dtype):
            old = worst.get(check.kind)
            if old is None or worst_first(check) > worst_first(old):
                worst[check.kind] = check
        out.final_gaps = found[0]
    out.checks = list(worst.values())
    return out


class Draw:
    """A side in one of several orders: the same function, other roundings; seed 0 is as it comes.

    It was built from reordered tensors; what comes out is in their own order again.
    """

    def __init__(self, side: TorchSide | JaxSide, spec: Model, seed: int):
        self.side, self.order = side, Reordering(spec, seed)
        self.rng = np.random.default_rng(seed) if seed else None

    def step(self, batch: Batch, accumulate: int) -> StepResult:
        if self.rng is not None:
            batch = batch.rows(self.rng.permutation(len(batch.ids)))
        numbers, state = self.side.step(batch, accumulate), self.side.state()
        params, mu, nu = (self.order.undo(x) for x in (state.params, state.mu, state.nu))
        return numbers, State(state.count, params, mu, nu)


def _line(i: int, got: StepResult, want: StepResult, found: Gaps) -> dict[str, Any]:
    """One step as the report has it."""
    line: dict[str, Any] = {"step": i}
    for key in ("loss", "norm", "clip", "rate"):
        line |= {f"{key}_torch": want[0][key], f"{key}_jax": got[0][key]}
    worst = {what: max(errors, key=_rank(errors)) for what, errors in found.items()}
    line |= {what: found[what][worst[what]] for what in ("parameters", "mu", "nu")}
    most = max(("parameters", "mu", "nu"), key=_rank(line))
    return {**line, "worst": worst[most]}


def _rank(errors: Mapping[str, float]) -> Callable[[str], float]:
    return lambda name: np.inf if np.isnan(errors[name]) else errors[name]


def _judged(
    i: int,
    got: StepResult,
    want: StepResult,
    found: Sequence[Gaps],
    noise: Sequence[Gaps],
    dtype: str,
) -> Iterator[Check]:
    """What one step is held to."""
    if dtype == "float64":
        for key in ("rate", "clip"):
            error = metrics.relative_l2(np.array(got[0][key]), np.array(want[0][key]))
            yield Check(f"training_{key}", dtype, error, OPTIMIZER, f"step {i}")
    for what, names in found[0].items():
        for name in names:
            error = float(np.min([draw[what][name] for draw in found]))  # NaN stays NaN
            budget = DRIFT
            if dtype != "float64":
                # And a unit in the last place: a loss is one number, with no average to go by.
                least = float(np.finfo(dtype).eps)
                budget = K * float(np.max([draw[what][name] for draw in noise])) + least
            at = f"step {i}" if name == what else f"{name}, step {i}"
            yield Check(f"training_{what}", dtype, error, budget, at)
