"""The reference for training: torchref under torch.optim.AdamW, and the batches it is given.

Written out with torch's own parts, and it shares nothing with `train`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.configs.runs import AdamW
from jaxtwin.parity.sides import runs, terms
from jaxtwin.parity.table.tensors import Tensors
from jaxtwin.parity.training import adam
from jaxtwin.parity.training.adam import ObservedStep, Part, State

IGNORE = -100  # a label that predicts nothing


@dataclass(frozen=True)
class Batch:
    """Rows (b t) of ids, what each place is to predict (or IGNORE), positions and segments."""

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    segments: np.ndarray

    @property
    def tokens(self) -> int:
        """How many places are to predict something."""
        return int((self.labels != IGNORE).sum())

    def rows(self, at: Any) -> Batch:
        """Some of the rows, in that order."""
        return Batch(self.ids[at], self.labels[at], self.positions[at], self.segments[at])

    def parts(self, k: int) -> list[Batch]:
        """Every k-th row, k times."""
        return [self.rows(slice(i, None, k)) for i in range(k)]


def random_batches(
    spec: Model, count: int, *, rows: int = 4, length: int = 8, seed: int = 0
) -> list[Batch]:
    """Random ids in two documents a row; the rows predict from all of their places to a fifth.

    So parts of a batch have very different numbers of targets, as packed text has.
    """
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        tokens = rng.integers(0, spec.vocab, (rows, length + 1))
        ignored = rng.random((rows, length)) < np.linspace(0, 0.8, rows)[:, None]
        ignored[:, 0] = False  # no row is without a target
        at = np.arange(length)
        second = at >= rng.integers(1, length, (rows, 1))
        starts = np.where(second, length - second.sum(1, keepdims=True), 0)
        labels = np.where(ignored, IGNORE, tokens[:, 1:])
        out.append(Batch(tokens[:, :-1], labels, at - starts, second.astype(np.int64)))
    return out


class TorchSide:
    """torchref under torch.optim.AdamW: the reference.

    Two groups: matrices and the embedding decay, norm scales and biases do not. The rate is set
    before every step. The clip factor is clip / norm: torch.nn.utils.clip_grad_norm_ divides by
    norm + 1e-6, so the norm that it is given here is that much smaller.
    """

    def __init__(self, spec: Model, tensors: Tensors, config: AdamW, steps: int, dtype: str):
        import torch

        self.config, self.steps, self.count = config, steps, 0
        self.dtype = dtype
        self.model = runs.torch_model(spec, tensors, dtype)
        named = dict(self.model.named_parameters())  # a tied weight is there once
        groups = [
            {
                "params": [(name, p) for name, p in named.items() if (p.ndim > 1) == matrix],
                "weight_decay": config.weight_decay if matrix else 0.0,
            }
            for matrix in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.peak,
            betas=(config.b1, config.b2),
            eps=config.eps,
            foreach=False,
        )
        self.decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        # What gaps in a bias are relative to, at least: its gradient may be nothing but rounding
        # (terms.py), and so may its moments and what it moved by.
        self.least: dict[str, dict[str, float]] = {"parameters": {}, "mu": {}, "nu": {}}
        self.terms: dict[str, float] = {}

    def loss(self, rows: Batch) -> Any:
        """The sum of the targets' losses, in nats."""
        import torch

        ids, labels, positions, segments = (
            torch.from_numpy(np.ascontiguousarray(x)).long()
            for x in (rows.ids, rows.labels, rows.positions, rows.segments)
        )
        logits = self.model(ids, positions=positions, segments=segments)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )

    def backward(self, batch: Batch, accumulate: int) -> float:
        """Leaves the gradient of the mean over the batch's targets in .grad; returns that mean."""
        self.optimizer.zero_grad()
        total = 0.0
        with terms.Watch(self.model) as watch:
            for part in batch.parts(accumulate):
                loss = self.loss(part) / max(1, batch.tokens)
                loss.backward()
                total += float(loss.detach())
        self.terms = {name: known.size for name, known in watch.terms().items()}
        return total

    def apply(self) -> dict[str, float]:
        """Clips what is in .grad and makes one step; the norm, the clip factor and the rate."""
        import torch

        params = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm(p.grad for p in params if p.grad is not None)
        clip = self.config.clip
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(params, clip, norm - 1e-6)
        rate = adam.rate(self.config, self.steps, self.count)
        first, second = self._corrections()
        for group, decay in zip(self.optimizer.param_groups, self.decays, strict=True):
            group["lr"] = rate * math.sqrt(second) / first
            group["eps"] = self.config.eps * math.sqrt(second)
            group["weight_decay"] = decay * first / math.sqrt(second)
        self.optimizer.step()
        self.count += 1
        factor = 1.0 if clip is None or float(norm) <= clip else clip / float(norm)
        self._follow(factor, rate)
        return {"norm": float(norm), "clip": factor, "rate": rate}

    def _follow(self, factor: float, rate: float) -> None:
        """The moments that the terms' sizes have by now, and how far Adam may have moved a bias."""
        b1, b2 = self.config.b1, self.config.b2
        for name, p in self.model.named_parameters():
            if name in self.terms:
                size = factor * self.terms[name]
                grown = {
                    "mu": (b1, (1 - b1) * size),
                    "nu": (b2, (1 - b2) * size**2),
                    "parameters": (1.0, rate * p.numel() ** 0.5),
                }
                for kind, (kept, new) in grown.items():
                    self.least[kind][name] = kept * self.least[kind].get(name, 0.0) + new

    def _corrections(self) -> tuple[float, float]:
        """What float32 makes of 1 - b^count, over what it is; 1 in float64.

        torch computes them in double and optax in the moments' dtype, where with b2 = 0.999 the
        first of them have five digits left. So that the budget knows what that costs, the float32
        reference has them in float32 as well.
        """
        if self.dtype == "float64":
            return 1.0, 1.0
        count, one = self.count + 1, np.float32(1)
        first, second = (
            float(one - np.power(np.float32(b), np.float32(count))) / (1 - b**count)
            for b in (self.config.b1, self.config.b2)
        )
        return first, second

    def step(self, batch: Batch, accumulate: int = 1) -> dict[str, float]:
        """One step on the batch: "loss", "norm" (before clipping), "clip" and "rate"."""
        return {"loss": self.backward(batch, accumulate), **self.apply()}

    def parts(self, batch: Batch, accumulate: int = 1) -> tuple[Part, ...]:
        """Each micro-batch's summed gradient; .grad and the parameters stay as they are."""
        import torch

        named = dict(self.model.named_parameters())
        out = []
        for part in batch.parts(accumulate):
            grads = torch.autograd.grad(self.loss(part), list(named.values()))
            out.append(Part(dict(zip(named, map(_wide, grads), strict=True)), part.tokens))
        return tuple(out)

    def state(self) -> State:
        """Everything in float64."""
        named = dict(self.model.named_parameters())
        kept = self.optimizer.state
        params = {name: _wide(p) for name, p in named.items()}
        if not self.count:
            zeros = {name: np.zeros_like(x) for name, x in params.items()}
            return State(0, params, zeros, zeros)
        mu = {name: _wide(kept[p]["exp_avg"]) for name, p in named.items()}
        nu = {name: _wide(kept[p]["exp_avg_sq"]) for name, p in named.items()}
        return State(self.count, params, mu, nu)


def _wide(x: Any) -> np.ndarray:
    return np.array(x.detach().double().numpy())


def observe(
    spec: Model,
    tensors: Tensors,
    config: AdamW,
    *,
    steps: int,
    batches: Sequence[Batch],
    accumulate: int = 1,
    scales: Sequence[float] | None = None,
) -> list[ObservedStep]:
    """The reference's own steps in float64: each from where it stood, with what it made.

    `scales` multiply the batches' losses, so that some gradients are clipped and others are not.
    """
    import torch

    refuse(config, steps, batches, accumulate)
    side = TorchSide(spec, tensors, config, steps, "float64")
    out = []
    for batch, scale in zip(batches, scales or [1.0] * len(batches), strict=True):
        before = side.state()
        parts = tuple(
            Part({n: g * scale for n, g in part.grads.items()}, part.tokens)
            for part in side.parts(batch, accumulate)
        )
        tokens = max(1, sum(part.tokens for part in parts))
        for name, p in side.model.named_parameters():
            p.grad = torch.from_numpy(sum(part.grads[name] for part in parts) / tokens)
        side.apply()
        after = side.state()
        update = {name: x - before.params[name] for name, x in after.params.items()}
        out.append(ObservedStep(before, parts, adam.Step(update, after.mu, after.nu)))
    return out


def refuse(config: AdamW, steps: int, batches: Sequence[Batch], accumulate: int) -> None:
    """A BadInput unless there is something to train on, and it divides."""
    if not batches:
        raise BadInput("training side by side needs at least one batch")
    if config.warmup >= steps:
        raise BadInput(f"warmup={config.warmup} leaves no step of steps={steps}")
    for i, batch in enumerate(batches):
        if accumulate < 1 or len(batch.ids) % accumulate:
            raise BadInput(
                f"batch {i} has {len(batch.ids)} rows, which do not divide by "
                f"accumulate={accumulate}"
            )
