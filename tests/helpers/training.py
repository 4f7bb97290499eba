"""What the tests of `train` share: a tiny run, lively parameters, and a batch that sees faults."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.llama import llama
from jaxtwin.configs.runs import AdamW, Data, Mesh, Training
from jaxtwin.jaxmodel import axes
from jaxtwin.tests.helpers import kit
from jaxtwin.train import loss, mesh, optim, step

ROWS, LENGTH = 8, 12


def spec(*, tied: bool = True) -> Model:
    return llama(
        vocab=48,
        d=32,
        layers=2,
        heads=4,
        kv=2,
        hidden=48,
        max_len=2 * LENGTH,
        base=100.0,
        pairs="adjacent",
        eps=1e-6,
        tied=tied,
    )


ADAMW = AdamW(
    peak=1e-2,
    warmup=2,
    schedule="cosine",
    floor=1e-3,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    clip=1.0,
)

RUN = Training(
    model="the test's model",
    folder="nowhere",
    steps=10,
    batch=ROWS,
    length=LENGTH,
    seed=3,
    optimizer=ADAMW,
    data=Data(source="stdlib", max_bytes=40_000),
    save_every=5,
)


def run(shape: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> Training:
    data, fsdp, tensor = shape
    return dataclasses.replace(RUN, mesh=Mesh(data=data, fsdp=fsdp, tensor=tensor), **changes)


def plan(
    shape: tuple[int, int, int] = (1, 1, 1),
    model: Model | None = None,
    dtype: Any = np.float32,
    **changes: Any,
) -> step.Plan:
    config = run(shape, **changes)
    return step.plan(config, model or spec(), mesh.build(config.mesh), dtype=np.dtype(dtype))


def lively(model: Model, layout: str = "scan") -> dict[str, np.ndarray]:
    """float64 parameters at which no part of the model is idle, by path."""
    return kit.to_jax(model, kit.torch_model(model).state_dict(), layout)


def batch(vocab: int = 48, seed: int = 0) -> step.Batch:
    """Random rows of two documents each, with labels to ignore, unevenly over the rows.

    Positions go up in twos: rotary scores see only differences, so places counted from anywhere
    would do as well as the positions given.
    """
    rng = np.random.default_rng(seed)
    ids, labels = loss.shift(rng.integers(0, vocab, (ROWS, LENGTH + 1)).astype(np.int32))
    labels = np.where(rng.random(labels.shape) < np.linspace(0, 0.8, ROWS)[:, None], -100, labels)
    at = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)
    second = at >= rng.integers(1, LENGTH, (ROWS, 1))
    starts = np.where(second, LENGTH - second.sum(1, keepdims=True), 0)
    return step.Batch(
        np.array(ids),
        labels.astype(np.int32),
        (2 * (at - starts)).astype(np.int32),
        second.astype(np.int32),
    )


def on(plan: step.Plan, batch: step.Batch) -> step.Batch:
    return jax.device_put(batch, mesh.rows(plan.mesh))


class Gradients:
    """Loss and gradients as a step computes them: sharded parameters, sharded rows, one jit."""

    def __init__(self, plan: step.Plan):
        def both(params: Any, batch: step.Batch) -> Any:
            with axes.resolving(mesh.activations(plan.mesh)):
                return step.gradients(plan, params, batch)

        self.plan = plan
        # Machine code that is made quickly and runs slowly: the shapes here are tiny.
        self.both = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})

    def __call__(self, params: Any, batch: step.Batch) -> tuple[Any, dict[str, np.ndarray]]:
        params = {path: jax.device_put(x, self.plan.params[path]) for path, x in params.items()}
        return jax.device_get(self.both(params, on(self.plan, batch)))


def gradients(plan: step.Plan, params: Any, batch: step.Batch) -> tuple[Any, dict[str, np.ndarray]]:
    return Gradients(plan)(params, batch)


def same(a: Any, b: Any) -> bool:
    """Bit for bit, over whole trees."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.asarray(x).dtype == np.asarray(y).dtype
        and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in pairs
    )


def rates(config: AdamW, steps: int, count: int) -> list[float]:
    """The learning rate of each of the first `count` steps, by `train`'s own schedule."""
    rate = optim.rate(config, steps)
    return [float(rate(i)) for i in range(count)]
