"""What several tests need: the golden files, and one model on both sides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxtwin import jaxmodel, torchref
from jaxtwin.configs import Model
from jaxtwin.configs.llama import llama
from jaxtwin.jaxmodel import axes
from jaxtwin.parity.table import bridge, decoder_table, tensors
from jaxtwin.tests.helpers import ROOT
from jaxtwin.torchref.norm import RMSNorm, unit_offset

DATA = ROOT / "tests" / "golden"
GOLDEN = ("reference_gqa_tied", "reference_mqa_untied")


@dataclass(frozen=True)
class Golden:
    """A recorded model: see golden/README.md. Names are the reference's own."""

    name: str
    path: Path
    config: Mapping[str, Any]
    spec: Model
    data: Mapping[str, np.ndarray]  # ids, logits, loss, generate/...
    weights: Mapping[str, np.ndarray]
    grads: Mapping[str, np.ndarray]

    @staticmethod
    def load(name: str) -> Golden:
        path = DATA / f"{name}.npz"
        with np.load(path) as file:
            data = {key: file[key] for key in file.files}
        config = json.loads(str(data.pop("config")))
        spec = llama(
            vocab=config["vocab"],
            d=config["width"],
            layers=config["layers"],
            heads=config["heads"],
            kv=config["kv_heads"],
            hidden=config["hidden"],
            max_len=config["context"],
            base=config["theta"],
            eps=config["eps"],
            tied=config["tied"],
            pairs="adjacent",
        )
        weights = {k.removeprefix("weight/"): data.pop(k) for k in list(data) if "weight/" in k}
        grads = {k.removeprefix("grad/"): data.pop(k) for k in list(data) if "grad/" in k}
        return Golden(name, path, config, spec, data, weights, grads)


def reference_names(src: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The reference's tensors under torchref's names."""
    new = {".n1.": ".pre_attn.", ".n2.": ".pre_ffn.", "blocks.": "layers."}
    new |= {f".{part}.": f".ffn.{part}." for part in ("gate", "up", "down")}
    out = {}
    for name, value in src.items():
        for old, ours in new.items():
            name = name.replace(old, ours)
        out[name] = value
    return out


def torch_model(spec: Model, values: Mapping[str, np.ndarray] | None = None, seed: int = 0) -> Any:
    """torchref in float64, with the given values or with lively ones of a seed.

    A fresh model's small matrices hide faults (attention is nearly uniform), and scales of one hide
    a swapped norm: so matrices are drawn with unit gain, and scales around one.
    """
    model = torchref.Decoder(spec, seed=seed).double()
    if values is not None:
        model.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in values.items()})
        return model
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.uniform_(0.5, 1.5, generator=noise)
            else:
                param.normal_(0, param.shape[1] ** -0.5, generator=noise)
        for module in model.modules():
            if isinstance(module, RMSNorm) and module.scale is unit_offset:
                module.weight -= 1  # the scale is 1 + w; at two, rounding doubles in every layer
    return model


def to_jax(spec: Model, state: Mapping[str, Any], layout: str = "scan") -> dict[str, np.ndarray]:
    """torchref's tensors (weights or gradients) as jaxmodel's, through the table."""
    src = bridge.from_state(state)
    dst = tensors.forward(decoder_table.rows(spec, layout), src, "the test's model")
    return {name: tensor.read() for name, tensor in dst.items()}


def jax_model(model: Any, layout: str = "scan") -> jaxmodel.Decoder:
    """The jaxmodel with a torchref model's values, in its dtype."""
    values = to_jax(model.spec, model.state_dict(), layout)
    dtype = next(iter(values.values())).dtype
    empty = jaxmodel.abstract(model.spec, dtype=dtype, layout=layout)
    return axes.with_arrays(empty, {k: jnp.asarray(v) for k, v in values.items()})


def torch_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def jax_loss(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token."""
    scores = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return -jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1).mean()


def torch_run(model: Any, ids: np.ndarray, **more: Any) -> tuple[np.ndarray, float, dict]:
    """Logits, loss and every gradient by name."""
    model.zero_grad()
    at = torch.from_numpy(ids)
    logits = model(at, **{k: torch.from_numpy(v) for k, v in more.items()})
    loss = torch_loss(logits, at)
    loss.backward()
    grads = {name: param.grad.numpy() for name, param in model.named_parameters()}
    return logits.detach().numpy(), float(loss.detach()), grads


@jax.jit
def _jax_run(model: jaxmodel.Decoder, ids: jax.Array, more: dict[str, jax.Array]) -> Any:
    def loss(model: jaxmodel.Decoder) -> Any:
        logits = model(ids, **more)
        return jax_loss(logits, ids), logits

    (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(model)
    return logits, value, axes.arrays(grads)


def jax_run(model: jaxmodel.Decoder, ids: np.ndarray, **more: Any) -> tuple[Any, float, dict]:
    """Logits, loss and every gradient by path."""
    logits, loss, grads = _jax_run(model, jnp.asarray(ids), more)
    return np.asarray(logits), float(loss), {k: np.asarray(v) for k, v in grads.items()}


def apart(a: Any, b: Any) -> float:
    """Relative L2 distance of a from b; infinite where either is not finite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    error = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return error if np.isfinite(error) else float("inf")
