"""Reports made up by hand: a model of some layers, and a mistake in one of them."""

from __future__ import annotations

import numpy as np

from jaxtwin.parity.report.results import Cause, Check, Difference, Divergence, Point, Report

PARTS = (
    "pre_attn",
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.mixed",
    "attn",
    "mid",
    "pre_ffn",
    "ffn",
    "out",
)
WEIGHTS = ("pre_attn.weight", "attn.q.weight", "attn.k.weight", "attn.v.weight", "attn.o.weight",
           "pre_ffn.weight", "ffn.gate.weight", "ffn.up.weight", "ffn.down.weight")  # fmt: skip
FAILING = "layers.3.attn.q"
CAUSE = Cause(
    "rope-base",
    "turns the queries with the base 10000",
    "use the base 500000",
    "attn.q",
    (3,),
    1.0,
    True,
)
ENVIRONMENT = {
    "python": "3.11.7",
    "versions": {"jax": "0.10.2", "flax": "0.12.8", "torch": "2.13.0"},
    "jax_devices": ["cpu"],
    "input_sha256": "5f" * 32,
    "source": {"name": "made-up", "kind": "preset"},
}


def failing(layers: int = 6, dtypes: tuple[str, ...] = ("float64", "float32")) -> Report:
    """The queries of layer 3 are wrong, and everything after them is off."""
    rng = np.random.default_rng(0)
    report = Report(
        environment=ENVIRONMENT, divergences=[Divergence("attn.q", (3,), "forward", 2.1e11, CAUSE)]
    )
    for dtype in dtypes:
        report.points += _points(rng, layers, dtype)
        floor = 1e-15 if dtype == "float64" else 1e-7
        budget = 1e-13 if dtype == "float64" else 3e-7
        report.checks += [
            Check("logits", dtype, 3e-3, budget),
            Check("loss", dtype, 2e-3, budget),
        ]
        report.checks += [
            Check(
                "gradient",
                dtype,
                p.accumulated_error,
                10 * floor if p.accumulated_error < 1e-5 else budget,
                p.probe,
            )
            for p in report.points
            if (p.direction, p.dtype) == ("parameter", dtype)
        ]
    late = np.arange(64) / 64
    report.heat = [
        list(
            1e-15 * (1 + rng.random(64)) if i < 3 else 2e-3 * late**2 * (1 + rng.random(64)) + 1e-12
        )
        for i in range(layers)
    ]
    report.trajectory = _trajectory(rng)
    report.blind = ["no document is longer than 64 tokens: a sliding window would not show"]
    report.notes = ["transformers does not know this model"]
    return report


def preflight() -> Difference:
    return Difference(
        "spec",
        "runs.0.blocks.0.attn.rope.base",
        "500000.0",
        "10000.0",
        "the JAX side has the default",
    )


def equal() -> Report:
    checks = [
        Check("logits", "float64", 3e-15, 1e-13),
        Check("gradient", "float32", 0.0, 1e-7, "embed.weight"),
    ]
    return Report(checks=checks, environment=ENVIRONMENT)


def _points(rng: np.random.Generator, layers: int, dtype: str) -> list[Point]:
    exact = dtype == "float64"
    noise, out, grown = (1e-16, [], 1e-16) if exact else (5e-8, [], 5e-8)
    named = [("embed", None, "embed")]
    named += [(f"layers.{i}.{part}", i, part) for i in range(layers) for part in PARTS]
    named += [("norm", None, "norm"), ("head", None, "head")]
    parameters = [("embed.weight", None, "embed.weight")]
    parameters += [(f"layers.{i}.{part}", i, part) for i in range(layers) for part in WEIGHTS]
    for direction, names in {"forward": named, "backward": named, "parameter": parameters}.items():
        band = (1e-13 if direction == "forward" else 1e-12) if exact else 2.5e-7
        for probe, layer, part in names:
            local = noise * (0.5 + rng.random())
            grown = max(grown * 1.02, local)
            if probe == FAILING and direction == "forward":
                local, grown = 2.1e-2, 3e-3
            total = grown if direction == "forward" else 1e-3 * (1 + rng.random())
            out.append(
                Point(
                    probe, layer, part, direction, dtype, total, local, 0 if exact else noise, band
                )
            )
    return out


def _trajectory(rng: np.random.Generator) -> list[dict]:
    steps = []
    for i in range(1, 21):
        loss, drift = 3 * 0.93**i + 0.05 * rng.random(), 2e-8 * i**1.5
        steps.append(
            {
                "step": i, "loss_torch": loss, "loss_jax": loss * (1 + drift), "norm_torch": 1.1,
                "norm_jax": 1.1, "clip_torch": 0.9, "clip_jax": 0.9, "rate_torch": 1e-3,
                "rate_jax": 1e-3, "parameters": drift, "mu": 3 * drift, "nu": 5 * drift,
                "worst": "layers.3.attn.q.weight",
            }
        )  # fmt: skip
    return steps


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)
