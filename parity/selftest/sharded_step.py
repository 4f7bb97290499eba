"""A training step over pretended devices, right and wrong: what sharding_faults.py is made of.

In JAX the devices are a mapped axis with real collectives over it. In torch and NumPy the same
wrong numbers are worked out from what torch makes of a batch in one piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxtwin.configs import Model
from jaxtwin.parity.compare.tolerances import BACKWARD, FORWARD
from jaxtwin.parity.report import metrics
from jaxtwin.parity.selftest.optimizer_faults import CONFIG, lively, tiny
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.tensors import Tensor, Tensors, backward
from jaxtwin.parity.training import adam, moments
from jaxtwin.parity.training.adam import Arrays
from jaxtwin.parity.training.torch_training import IGNORE, Batch, TorchSide, random_batches

DEVICES = 4
COPIED = ("attn.k.weight", "attn.v.weight")  # in torch


@dataclass(frozen=True)
class Outcome:
    """What a step knows after its backward pass, by torch's names."""

    loss: float
    grads: Arrays
    norm: float

    @staticmethod
    def of(loss: float, grads: Arrays) -> Outcome:
        return Outcome(float(loss), grads, adam.norm(grads))

    def off(self, want: Outcome) -> dict[str, float]:
        """The errors, in units of what they may be."""
        loss, norm = (
            metrics.relative_l2(np.array(a), np.array(b))
            for a, b in ((self.loss, want.loss), (self.norm, want.norm))
        )
        grads = {f"grad {n}": metrics.relative_l2(self.grads[n], g) for n, g in want.grads.items()}
        return {
            "loss": loss / FORWARD,
            **{name: error / BACKWARD for name, error in grads.items()},
            "norm": norm / BACKWARD,
        }


# ---- what the devices are given ------------------------------------------------------------------


@functools.cache
def batch() -> Batch:
    """Eight rows of one document, with very different numbers of targets."""
    result = random_batches(tiny(), 1, rows=2 * DEVICES, length=8)[0]
    # In two documents, too few places would be far enough apart for a wrong position to show.
    positions = np.tile(np.arange(result.ids.shape[1]), (len(result.ids), 1))
    return replace(result, positions=positions, segments=np.ones_like(result.segments))


def split() -> list[Batch]:
    """Two rows a device."""
    return [batch().rows(slice(2 * i, 2 * i + 2)) for i in range(DEVICES)]


def ignoring(drop: Callable[[np.ndarray], None]) -> list[Batch]:
    """The same, with fewer targets: `drop` writes into all labels (b t)."""
    labels = batch().labels.copy()
    drop(labels)
    rows = replace(batch(), labels=labels)
    return [rows.rows(slice(2 * i, 2 * i + 2)) for i in range(DEVICES)]


def last_row(labels: np.ndarray) -> None:
    labels[-1] = IGNORE


def last_of_each_half(labels: np.ndarray) -> None:
    labels[:, labels.shape[1] // 2 - 1 :: labels.shape[1] // 2] = IGNORE


def counted_anew() -> list[Batch]:
    """The sequence in two shards, each of which counts its positions from 0."""
    half = batch().ids.shape[1] // 2
    return [replace(part, positions=part.positions % half) for part in split()]


def copies() -> tuple[Model, Tensors]:
    """The model with every K/V head twice, H0 H0 H1 H1: the same function, a device for each."""
    kv = tiny().layers[0].attn.kv

    def twice(x: np.ndarray) -> np.ndarray:
        return np.repeat(x.reshape(kv, -1, x.shape[-1]), 2, axis=0).reshape(-1, x.shape[-1])

    return tiny(kv=2 * kv), {
        name: Tensor.of(twice(t.read())) if name.endswith(COPIED) else t
        for name, t in lively(tiny()).items()
    }


# ---- in JAX --------------------------------------------------------------------------------------

Join = Callable[[Any, Any, Any], tuple[Any, Any]]  # a device's loss, gradient, targets: the mean's


@functools.cache
def _each(spec: Model) -> Any:
    """The compiled forward and backward of every device: sums of losses, and their gradients."""
    import jax

    from jaxtwin.jaxmodel import abstract, axes

    empty = abstract(spec, dtype="float64", layout="unroll")

    @jax.value_and_grad
    def total(params: Any, ids: Any, labels: Any, positions: Any, segments: Any) -> Any:
        logits = axes.with_arrays(empty, params)(ids, positions=positions, segments=segments)
        scores = jax.nn.log_softmax(logits, axis=-1)
        chosen = jax.numpy.take_along_axis(scores, labels.clip(0)[..., None], axis=-1)[..., 0]
        return -jax.numpy.where(labels >= 0, chosen, 0).sum()

    # Machine code that is made quickly and runs slowly: the shapes here are tiny.
    return jax.jit(
        jax.vmap(total, in_axes=(None, 0, 0, 0, 0)),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def right(loss: Any, grads: Any, tokens: Any) -> tuple[Any, Any]:
    """Sums over all devices, divided by the targets of all."""
    import jax

    count = jax.lax.psum(tokens, "data")
    return jax.tree.map(lambda x: jax.lax.psum(x, "data") / count, (loss, grads))


def mean_of_means(loss: Any, grads: Any, tokens: Any) -> tuple[Any, Any]:
    import jax

    return jax.tree.map(lambda x: jax.lax.pmean(x / tokens, "data"), (loss, grads))


def summed(loss: Any, grads: Any, tokens: Any) -> tuple[Any, Any]:
    """Scaled for a mean over the devices, and then summed."""
    import jax

    share = DEVICES / jax.lax.psum(tokens, "data")
    return jax.lax.pmean(loss * share, "data"), jax.tree.map(
        lambda g: jax.lax.psum(g * share, "data"), grads
    )


def averaged(loss: Any, grads: Any, tokens: Any) -> tuple[Any, Any]:
    """Scaled for a sum over the devices, and then averaged."""
    import jax

    count = jax.lax.psum(tokens, "data")
    return jax.lax.psum(loss / count, "data"), jax.tree.map(
        lambda g: jax.lax.pmean(g / count, "data"), grads
    )


def in_jax(
    parts: Sequence[Batch],
    join: Join,
    *,
    model: tuple[Model, Tensors] | None = None,
    merge: Callable[[Any], Any] | None = None,
    norm: Callable[[Mapping[str, Any]], Any] | None = None,
) -> Outcome:
    """Every part on a device, joined by collectives; device 0's results are what is looked at.

    `merge` makes one gradient (d k h) of the copies' (d k copy h); `norm` takes gradients by path.
    """
    import jax

    spec, tensors = model or (tiny(), lively(tiny()))
    with jax.enable_x64(True):
        weights = {name: t.read() for name, t in tensors.items()}
        params = moments.carried(spec, weights, "unroll")
        fields = ("ids", "labels", "positions", "segments")
        rows = (np.stack([getattr(part, field) for part in parts]) for field in fields)
        sums, grads = _each(spec)(params, *rows)
        tokens = np.array([float(part.tokens) for part in parts])
        loss, grads = jax.vmap(join, axis_name="data")(sums, grads, tokens)
        grads = {path: g[0] for path, g in grads.items()}
        if merge is not None:
            grads = {
                p: _merged(g, merge) if p[-2:] in ("/k", "/v") else g for p, g in grads.items()
            }
        size = None if norm is None else float(norm(grads))
    dst = {path: Tensor.of(np.asarray(g)) for path, g in grads.items()}
    src = backward(decoder_table.rows(tiny(), "unroll"), dst, "the gradient")
    result = Outcome.of(float(loss[0]), {name: t.read() for name, t in src.items()})
    return result if size is None else replace(result, norm=size)


def _merged(grad: Any, merge: Callable[[Any], Any]) -> Any:
    d, heads, width = grad.shape
    return merge(grad.reshape(d, heads // 2, 2, width))


def on_devices(grads: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Matrices cut along d, a part for each device in front; scales as they are, on every one."""
    import jax.numpy as jnp

    cut, kept = {}, {}
    for path, g in grads.items():
        if g.ndim == 1:
            kept[path] = g
        else:
            axis = g.shape.index(tiny().d)
            cut[path] = jnp.stack(jnp.split(g, DEVICES, axis=axis))
    return cut, kept


def norm_of_shard(grads: Mapping[str, Any]) -> Any:
    import jax
    import optax

    cut, kept = on_devices(grads)
    return jax.vmap(lambda shard: optax.tree.norm((shard, kept)))(cut)[0]


def norm_all_summed(grads: Mapping[str, Any]) -> Any:
    """Every device's squares summed, those of scales with them, which all devices hold."""
    import jax
    import optax

    cut, kept = on_devices(grads)

    def one(shard: Any) -> Any:
        return jax.lax.psum(optax.tree.norm((shard, kept), squared=True), "fsdp") ** 0.5

    return jax.vmap(one, axis_name="fsdp")(cut)[0]


# ---- in torch and NumPy --------------------------------------------------------------------------


def in_torch(part: Batch, model: tuple[Model, Tensors] | None = None) -> Outcome:
    """The mean loss of the rows and its gradient."""
    spec, tensors = model or (tiny(), lively(tiny()))
    side = TorchSide(spec, tensors, CONFIG, 100, "float64")
    loss = side.backward(part, 1)
    grads = {n: np.array(p.grad.numpy()) for n, p in side.model.named_parameters()}
    return Outcome.of(loss, grads)


@functools.cache
def whole_batch() -> Outcome:
    """What is right: the batch in one piece."""
    return in_torch(batch())


def together(parts: Sequence[Batch]) -> Batch:
    """The parts' rows as one batch."""
    fields = ("ids", "labels", "positions", "segments")
    rows = {field: np.concatenate([getattr(p, field) for p in parts]) for field in fields}
    return replace(parts[0], **rows)


def multiplied(outcome: Outcome, by: float) -> Outcome:
    return Outcome.of(outcome.loss, {name: by * g for name, g in outcome.grads.items()})


def averages() -> Outcome:
    """The mean of the devices' means."""
    each = [in_torch(part) for part in split()]
    grads = {n: np.mean([one.grads[n] for one in each], axis=0) for n in each[0].grads}
    return Outcome.of(float(np.mean([one.loss for one in each])), grads)


def repeated() -> Outcome:
    """Every device on the first one's rows: as if there were no others."""
    return in_torch(split()[0])


def merged(merge: Callable[[np.ndarray], np.ndarray]) -> Outcome:
    """The copies' gradients (k copy h d) made one (k h d)."""
    attn = tiny().layers[0].attn
    out = in_torch(batch(), copies())
    grads = {
        n: merge(g.reshape(attn.kv, 2, attn.width, -1)).reshape(attn.kv * attn.width, -1)
        if n.endswith(COPIED)
        else g
        for n, g in out.grads.items()
    }
    return Outcome.of(out.loss, grads)


def other_norm(replicas: int, share: Callable[[str, np.ndarray], np.ndarray]) -> Outcome:
    """The norm of share(name, matrix) and of scales that count `replicas` times."""
    squares = sum(
        replicas * (g * g).sum() if g.ndim == 1 else (share(n, g) ** 2).sum()
        for n, g in whole_batch().grads.items()
    )
    return replace(whole_batch(), norm=float(np.sqrt(squares)))


def first_share(name: str, g: np.ndarray) -> np.ndarray:
    """The first device's part of a matrix, which is cut along d."""
    axis = 0 if name.endswith(("attn.o.weight", "ffn.down.weight")) else 1
    return np.split(g, DEVICES, axis=axis)[0]
