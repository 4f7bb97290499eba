"""The kill table: every known fault made, and the diagnosis held to catch it and call it by name.

Equal models of every shape are the control: there nothing may be found. Everything is tiny and in
float64, and the JAX side runs operation by operation, since nothing runs twice.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from jaxtwin.configs import BadInput, Model
from jaxtwin.configs.errors import nearest
from jaxtwin.parity.selftest.faults import FAULTS
from jaxtwin.parity.selftest.faults.base import NoPlace
from jaxtwin.parity.selftest.tiny_models import arbitrary, shapes, weights
from jaxtwin.parity.sides.inputs import check_inputs
from jaxtwin.parity.sides.runs import InjectedFault

TOKENS = 24
CONTROLS, PAIRS = 200, 50
MODELS = 3  # in which a fault is tried
KEPT = 100  # pieces of work whose compiled operations a process keeps; to make them anew takes long
UNCHANGED = InjectedFault.__module__  # of the changes that change nothing
_COUNT = itertools.count(1)


@dataclass(frozen=True)
class Outcome:
    """One fault in one model: was it caught, where, and by what name."""

    name: str
    shape: str
    caught: bool
    where: str
    cause: str
    named: bool


def judge(spec: Model, seed: int, make: Callable[[Any, Any], Any] | None) -> Any:
    """The diagnosis of a subject; `make(tensors, inputs)` builds it, the right one by default."""
    from jaxtwin.parity.diagnose.search import diagnose
    from jaxtwin.parity.sides.runs import Reference, faulty_decoder

    tensors, inputs = weights(spec, seed), check_inputs(spec, TOKENS, seed)
    subject = make(tensors, inputs) if make else faulty_decoder(spec, tensors, inputs, None)
    return diagnose(Reference(spec, tensors, inputs), subject)


def fault(name: str, shape: str, spec: Model) -> Outcome | None:
    """One fault in one model; None where the model has no place for it."""
    from jaxtwin.parity.sides.runs import faulty_decoder

    known = FAULTS[name]
    try:
        found = judge(spec, 3, lambda t, g: faulty_decoder(spec, t, g, known))
    except NoPlace:
        return None
    causes = {s.cause.name for s in found.divergences if s.cause and s.cause.proven}
    where = found.divergences[0].part if found.divergences else ""
    cause = ", ".join(sorted(causes))
    return Outcome(name, shape, not found.equal, where, cause, causes == {known.cause})


def in_models(name: str) -> list[Outcome]:
    """One fault in each of the first few models that have a place for it."""
    tried = (fault(name, shape, spec) for shape, spec in shapes().items())
    return list(itertools.islice((found for found in tried if found is not None), MODELS))


def sample() -> list[str]:
    """One fault of each kind: what it changes, in which file, and whether in one layer."""
    kinds: dict[tuple[object, ...], str] = {}
    for name, known in FAULTS.items():
        changes = {f.name: getattr(known, f.name) for f in fields(known) if callable(f.default)}
        made_in = {(what, how.__module__) for what, how in changes.items()}
        kind = sorted(pair for pair in made_in if pair[1] != UNCHANGED)
        kinds.setdefault((known.layered, *kind), name)
    return [*kinds.values(), "optimizer/eps", "sharding/same-rows"]


def training() -> dict[str, str | None]:
    """The faults that no forward shows, of the optimizer and of the split over devices: causes."""
    from jaxtwin.parity.selftest.optimizer_faults import OPTIMIZER_FAULTS
    from jaxtwin.parity.selftest.sharding_faults import SHARDING_FAULTS

    optimizer = {f"optimizer/{name}": known.cause for name, known in OPTIMIZER_FAULTS.items()}
    return optimizer | {f"sharding/{name}": name for name in SHARDING_FAULTS}


def trained(name: str) -> Outcome:
    """One of them."""
    from jaxtwin.parity.selftest import optimizer_faults, sharding_faults

    kind, short = name.split("/")
    found = {"optimizer": optimizer_faults, "sharding": sharding_faults}[kind].run(short)
    named = found.named is not None and found.named == training()[name]
    return Outcome(name, kind, found.caught, found.where, found.named or "", named)


def training_control() -> str:
    """The right optimizer and the right split: what was found, or "" where nothing was."""
    from jaxtwin.parity.selftest import optimizer_faults, sharding_faults

    found = {"optimizer": optimizer_faults.control(), "sharding": sharding_faults.control()}
    return "; ".join(f"{name}: {x.where}" for name, x in found.items() if x.caught)


def spec_in(model: str) -> Model:
    """A person's own spec, or a preset; the tiny twin of either."""
    from jaxtwin.configs.shrink import shrunk
    from jaxtwin.parity.naming.names import spec_named

    if model.startswith("tiny:"):
        return shrunk(spec_named(model.removeprefix("tiny:")))
    return spec_named(model)


def control(seed: int, spec: Model | None = None) -> str:
    """A random model against itself: what was found, or "" where nothing was."""
    from jaxtwin.configs.spec import to_json

    spec = spec or arbitrary(seed)
    found = judge(spec, seed, None)
    if found.equal:
        return ""
    divergences = [(s.part, s.layers, s.direction, s.worst) for s in found.divergences]
    return f"seed {seed}: error {found.error:.2f}, {divergences}, {to_json(spec)}"


# ---- two at once --------------------------------------------------------------------------------


def pair(seed: int) -> dict[str, Any]:
    """Two random faults in two layers of one model: were both located, and both named?"""
    rng = np.random.default_rng((seed, 50))
    spec = shapes()["pre-norm"]
    names = [name for name, known in FAULTS.items() if known.layered]
    while True:
        one, two = (names[i] for i in rng.choice(len(names), 2, replace=False))
        i, j = (int(x) for x in rng.choice(len(spec.layers), 2, replace=False))
        at = {i: one, j: two}
        try:
            found = judge(spec, seed, functools.partial(two_faults, spec, at))
            break
        except NoPlace:  # a model of RMS norms has none for a LayerNorm's faults: two others
            continue
    got = {
        (layer, s.cause.name if s.cause else "") for s in found.divergences for layer in s.layers
    }
    want = {(i, FAULTS[one].cause), (j, FAULTS[two].cause)}
    return {
        "faults": {one: i, two: j},
        "located": {i, j} <= {layer for layer, _ in got},
        "named": want <= got,
        "found": sorted(map(list, got)),
    }


def two_faults(spec: Model, at: dict[int, str], tensors: Any, inputs: Any) -> Any:
    """jaxmodel with another fault in each of these layers, and nothing wrong elsewhere."""
    from jaxtwin.parity.sides.runs import decoder, faulty_model

    model: Any = faulty_model(spec, tensors, InjectedFault())
    for layer, name in at.items():
        bad: Any = faulty_model(spec, tensors, FAULTS[name])
        model.stack.layers[layer] = bad.stack.layers[layer]
    return decoder(model, "unroll", inputs, jit=False)


# ---- all of it ----------------------------------------------------------------------------------


KINDS = ("training", "fault", "control", "pair", "alone", "in")  # of work


def run(
    *,
    names: Sequence[str] = (),
    controls: int = CONTROLS,
    pairs: int = PAIRS,
    workers: int = 2,
    model: str | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """The whole table as plain data (docs/json.md), over a few processes.

    `model` is a spec (a preset, FILE.py:NAME, or either with "tiny:" before it) that the faults are
    made in, in place of the models kept for it; then it alone is the control, and there are no
    pairs and no faults of training.
    """
    known = [*FAULTS, *([] if model else training())]
    unknown = sorted(set(names) - set(known))
    if unknown:
        near = nearest(unknown[0], known)
        raise BadInput(f"no such fault: {', '.join(unknown)}; {near}")
    started = time.monotonic()
    chosen = names or known
    # In one process: the reference's steps, which all of them share, are made once.
    work: list[tuple[str, Any]] = [("training", [n for n in chosen if n not in FAULTS])]
    work += [("pair", seed) for seed in range(pairs)]
    work += [("control", seed) for seed in range(controls)]
    work += [("fault", name) for name in chosen if name in FAULTS]
    if model is not None:
        spec_in(model)  # an error in it is told at once
        work = [("training", []), ("alone", model)]
        work += [("in", (model, name)) for name in chosen]
    done: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for kind, result in _spread(work, workers, progress):
        done[kind].append(result)
    outcomes = [outcome for found in (*done["fault"], *done["in"]) for outcome in found]
    done["control"] += done["alone"]
    of_training, alarm = done["training"][0]
    outcomes = sorted(outcomes + of_training, key=lambda o: known.index(o.name))
    alarms = [text for text in [*done["control"], alarm] if text]
    return {
        "faults": _table(outcomes),
        "false_alarms": len(alarms),
        "controls": len(done["control"]),
        "alarms": alarms,
        "pairs": {
            "tried": len(done["pair"]),
            "located": sum(p["located"] for p in done["pair"]),
            "named": sum(p["named"] for p in done["pair"]),
            "missed": [p for p in done["pair"] if not p["named"]],
        },
        "seconds": round(time.monotonic() - started, 1),
    }


def passed(table: dict[str, Any]) -> bool:
    """Everything caught, nothing else reported. Naming is counted, and is not the gate."""
    return not table["false_alarms"] and all(f["caught"] for f in table["faults"])


def _table(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One entry a fault: caught and named only where it is so in every model that has it."""
    by_name: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_name.setdefault(outcome.name, []).append(outcome)
    return [
        {
            "name": name,
            "caught": all(o.caught for o in found),
            "named": all(o.named for o in found),
            "where": found[0].where,
            "cause": found[0].cause,
            "runs": [asdict(o) for o in found],
        }
        for name, found in by_name.items()
    ]


def _spread(
    work: Sequence[tuple[str, Any]], workers: int, progress: Callable[[str], None]
) -> Iterator[tuple[str, Any]]:
    if workers < 2 or len(work) < 8:
        results = map(_one, work)
        yield from _told(results, len(work), progress)
        return
    # Not forked: JAX and torch have threads of their own.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start) as pool:
        waiting = [pool.submit(_one, each) for each in work]
        try:
            yield from _told((f.result() for f in as_completed(waiting)), len(work), progress)
        except BrokenProcessPool:
            raise BadInput(
                f"one of the {workers} processes was killed, as a system does that runs out of "
                "memory; try fewer with --workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _told(results: Any, total: int, progress: Callable[[str], None]) -> Iterator[Any]:
    for i, result in enumerate(results, 1):
        if i % 10 == 0 or i == total:
            progress(f"{i} of {total} models")
        yield result


def _start() -> None:
    """Once in each process, for tiny models whose operations mostly run once.

    One thread, for there is no work for more; and compiled quickly rather than well.
    """
    import torch

    torch.set_num_threads(1)
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()


def _one(work: tuple[str, Any]) -> tuple[str, Any]:
    import jax

    kind, what = work
    if next(_COUNT) % KEPT == 0:  # 20 MB each
        jax.clear_caches()
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        if kind == "training":
            return kind, ([trained(name) for name in what], training_control() if what else "")
        if kind == "pair":
            return kind, pair(what)
        if kind == "control":
            return kind, control(what)
        if kind == "alone":
            return kind, control(0, spec_in(what))
        if kind == "in":
            found = fault(what[1], what[0], spec_in(what[0]))
            return kind, [] if found is None else [found]
        return kind, in_models(what)
