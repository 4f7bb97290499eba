"""The settings of a decoder's two mirrors on one input: flags, masks, positions and scalars.

Masks and positions are those that the first layer's attention really gets, and scalars are
those of the built modules: neither is taken from the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxtwin.configs.dataflow import NORM_PARTS
from jaxtwin.parity.report import results
from jaxtwin.parity.report.results import Difference, Report
from jaxtwin.parity.sides import settings
from jaxtwin.parity.sides.inputs import Inputs
from jaxtwin.parity.sides.probes import layer, part
from jaxtwin.parity.sides.settings import Calls, Snapshot

Attended = dict[str, np.ndarray]  # "mask" (b t s) and "positions" (b t)


@dataclass
class Sides:
    """Collects both sides' settings, dtype by dtype, and tells a report what differs."""

    inputs: Inputs
    report: Report
    seen: dict[tuple[str, str], tuple[Snapshot, Attended, dict[str, Any]]] = field(
        default_factory=dict
    )

    def torch(self, dtype: str) -> Callable[[Any], None]:
        """What `sides.run_torch` calls with its model."""

        def read(model: Any) -> None:
            if ("torch", dtype) in self.seen:  # the same again, with its weights in another order
                return
            with Calls() as calls:
                attended = torch_attended(model, self.inputs)
            snapshot = settings.torch_side(model, calls)
            self._keep("torch", dtype, snapshot, attended, torch_scalars(model))

        return read

    def jax(self, dtype: str, model: Any) -> None:
        from jaxtwin.jaxmodel import axes

        def apply() -> Any:
            g = self.inputs
            return model(g.ids, positions=g.positions, segments=g.segments)

        snapshot = settings.jax_side(axes.arrays(model).values(), apply, model)
        # What is attended to is the same in every dtype, and to run it is the slow part.
        first = not any(side == "jax" for side, _ in self.seen)
        attended = jax_attended(model, self.inputs) if first else {}
        self._keep("jax", dtype, snapshot, attended, jax_scalars(model))

    def witness(self, dtype: str, run: Any) -> None:
        """The third witness's, once it has run; whatever keeps none has none to tell."""
        if found := getattr(run, "settings", None):
            kept = self.report.environment.setdefault("settings", {})
            kept.setdefault(dtype, {})["transformers"] = found

    def _keep(
        self, side: str, dtype: str, snapshot: Snapshot, attended: Attended, scalars: dict[str, Any]
    ) -> None:
        self.seen[side, dtype] = (snapshot, attended, scalars)
        shown = {**snapshot, "scalars": _short(scalars)}
        if "mask" in attended:
            shown["mask_pairs"] = [int(attended["mask"].sum()), int(attended["mask"].size)]
        if "positions" in attended:
            extremes = (attended["positions"].min(), attended["positions"].max())
            shown["positions"] = [int(x) for x in extremes]
        kept = self.report.environment.setdefault("settings", {})
        kept.setdefault(dtype, {})[side] = shown
        both = [self.seen.get((side, dtype)) for side in ("torch", "jax")]
        if both[0] and both[1]:
            settings.tell(self.report, self._differences(both[0], both[1], dtype))

    def _differences(self, torch: Any, jax: Any, dtype: str) -> list[Difference]:
        return [
            *settings.differences(torch[0], jax[0], dtype),
            *_attended(torch[1], jax[1]),
            *_scalars(torch[2], jax[2]),
        ]


# ---- masks and positions ------------------------------------------------------------------------


class Stop(Exception):
    """Raised inside a forward pass that has shown what was asked."""


def torch_attended(model: Any, inputs: Inputs) -> Attended:
    """What torchref's first attention gets; that attention is run, and nothing after it."""
    import torch

    caught: Attended = {}
    attn = model.layers[0].attn

    def attention(module: Any, args: Any) -> None:
        caught["mask"] = args[2].numpy()

    def rotation(module: Any, args: Any) -> None:
        caught.setdefault("positions", args[1].numpy())

    def stop(module: Any, args: Any, out: Any) -> None:
        raise Stop

    hooks = [
        attn.register_forward_pre_hook(attention),
        attn.rotate.register_forward_pre_hook(rotation),
        attn.register_forward_hook(stop),
    ]
    ids, positions, segments = (
        torch.from_numpy(x) for x in (inputs.ids, inputs.positions, inputs.segments)
    )
    try:
        with torch.no_grad(), suppress(Stop):
            model(ids, positions=positions, segments=segments)
    finally:
        for hook in hooks:
            hook.remove()
    return caught


def jax_attended(model: Any, inputs: Inputs) -> Attended:
    """The same of jaxmodel, as its first layer's probes show it."""
    import jax

    from jaxtwin.jaxmodel.probe import probing

    @jax.jit
    def first_layer(model: Any) -> dict[str, Any]:
        with probing({}) as probes:
            model(inputs.ids, positions=inputs.positions, segments=inputs.segments)
        out: dict[str, Any] = {}
        for name in ("mask", "positions"):
            paths = [path for path in probes.values if path.endswith(f"attn/{name}")]
            if paths:
                x = probes.values[paths[0]]
                stacked = paths[0].startswith("stack/runs/")
                out[name] = x[0] if stacked else x
        return out

    return {name: np.asarray(x) for name, x in first_layer(model).items()}


def _attended(torch: Attended, jax: Attended) -> Iterator[Difference]:
    words = {"mask": ("attention mask", "pairs"), "positions": ("rotary positions", "positions")}
    for name, (what, unit) in words.items():
        if name not in torch or name not in jax:
            continue
        src, dst = torch[name], np.broadcast_to(jax[name], torch[name].shape)
        odd = src != dst
        if not odd.any():
            continue
        at = tuple(int(i) for i in np.unravel_index(np.argmax(odd), odd.shape))
        letters = ("sequence", "token", "key token")
        where = ", ".join(f"{w} {i}" for w, i in zip(letters, at, strict=False))
        about = f"{int(odd.sum())} of {odd.size} {unit} differ, the first at {where}"
        if name == "mask":
            one, other = (f"{int(x.sum())} pairs seen" for x in (src, dst))
        else:
            one, other = (f"{x[at]} there" for x in (src, dst))
        yield Difference("setting", what, one, other, about)


# ---- scalars ------------------------------------------------------------------------------------


def torch_scalars(model: Any) -> dict[str, Any]:
    """What torchref's modules carry beside their weights, by name."""
    found: dict[str, Any] = {}
    for i, block in enumerate(model.layers):
        found |= {f"layers.{i}.{n}": x for n, x in _block(block).items()}
    return found | _outside(model)


def jax_scalars(model: Any) -> dict[str, Any]:
    """The same of jaxmodel, in either layout."""
    found: dict[str, Any] = {}
    for i, block in enumerate(_blocks(model)):
        found |= {f"layers.{i}.{n}": x for n, x in _block(block).items()}
    return found | _outside(model)


def _blocks(model: Any) -> list[Any]:
    """One block for each layer: a scanned one stands for all its repeats."""
    if hasattr(model.stack, "layers"):
        return list(model.stack.layers)
    both = zip(model.stack.runs, model.spec.runs, strict=True)
    return [block for blocks, run in both for _ in range(run.repeats) for block in blocks]


def _block(block: Any) -> dict[str, Any]:
    attn = block.attn
    found: dict[str, Any] = {"attn.scale": float(attn.scale)}
    for name in NORM_PARTS:
        found |= _norm(name, getattr(block, name, None))
    for name, norm in (("q_norm", attn.q_norm), ("k_norm", attn.k_norm)):
        found |= _norm(f"attn.{name}", getattr(norm, "norm", None))
    rotate = attn.rotate
    if hasattr(rotate, "frequency"):
        # torchref's are a function of the length, jaxmodel's those of a short text.
        plain = rotate.frequency(1) if callable(rotate.frequency) else rotate.frequency
        found["attn.rotate.frequency"] = [float(x) for x in plain]
        found["attn.rotate.pairs"] = rotate.split.__name__
        found["attn.rotate.magnitude"] = float(rotate.magnitude)
    more = {
        "attn.cap": getattr(attn.cap, "cap", None),
        "attn.window": getattr(attn.window, "size", None),
        "alpha": getattr(block, "alpha", None),
    }
    return found | {name: float(x) for name, x in more.items() if x is not None}


def _outside(model: Any) -> dict[str, Any]:
    """Of what is not in a layer."""
    found = _norm("embed_norm", model.embed_norm) | _norm("norm", model.norm)
    more = {
        "embed_scale": getattr(model.scale, "scale", None),
        "cap": getattr(model.cap, "cap", None),
    }
    return found | {name: float(x) for name, x in more.items() if x is not None}


def _norm(name: str, norm: Any) -> dict[str, Any]:
    return {f"{name}.eps": float(norm.eps)} if hasattr(norm, "eps") else {}


def _scalars(torch: dict[str, Any], jax: dict[str, Any]) -> Iterator[Difference]:
    """Those that are not the same, layers that differ in the same way together."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for name in dict.fromkeys([*torch, *jax]):
        src, dst = torch.get(name, "absent"), jax.get(name, "absent")
        if _alike(src, dst):
            continue
        sides, about = _worded(src, dst)
        groups.setdefault((part(name), *sides, about), []).extend(
            [] if layer(name) is None else [layer(name) or 0]
        )
    for (what, src, dst, about), layers in groups.items():
        yield Difference("setting", results.place(what, layers), src, dst, about)


def _short(scalars: dict[str, Any]) -> dict[str, Any]:
    """By part: the one value of all layers, or each that there is."""
    found: dict[str, list[Any]] = {}
    for name, x in scalars.items():
        values = found.setdefault(part(name), [])
        values += [] if x in values else [x]
    return {name: x[0] if len(x) == 1 else x for name, x in found.items()}


def _alike(src: Any, dst: Any) -> bool:
    if isinstance(src, str) or isinstance(dst, str):
        return bool(src == dst)
    x, y = np.atleast_1d(src), np.atleast_1d(dst)
    return x.shape == y.shape and bool(np.allclose(x, y, rtol=1e-15, atol=0))


def _worded(src: Any, dst: Any) -> tuple[tuple[str, str], str]:
    if isinstance(src, list) and isinstance(dst, list) and len(src) == len(dst):
        i = int(np.argmax(~np.isclose(src, dst, rtol=1e-15, atol=0)))
        return (f"{src[i]:.17g}", f"{dst[i]:.17g}"), f"the first that differs is pair {i}"
    sides = (f"{len(x)} of them" if isinstance(x, list) else str(x) for x in (src, dst))
    first, second = sides
    return (first, second), ""
