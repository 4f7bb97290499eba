"""The run itself: start or resume, step, report, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxtwin.configs import BadInput
from jaxtwin.configs.runs import Training
from jaxtwin.configs.spec import Model
from jaxtwin.jaxmodel import checkpoint as at_rest
from jaxtwin.jaxmodel.lazy import Lazy
from jaxtwin.train import checkpoint, data, mesh, step

CACHE = "tokens"  # the run folder's part that holds the tokenized text
TOLERATED = 10  # steps in a row without a finite gradient before the run gives up


@dataclass(frozen=True)
class Start:
    """What a run starts from; the front door reads it from `run.model`."""

    spec: Model
    # Arrays by path, in the run's layout, read slice by slice; called only if nothing is there to
    # resume from. None: random values from the run's seed.
    arrays: Callable[[], Mapping[str, Lazy | np.ndarray]] | None = None
    carry: Mapping[str, bytes] = field(default_factory=dict)  # tokenizer.json and the like
    eos: Sequence[int] = ()  # the ids that end a text; the first of them ends a document


@dataclass(frozen=True)
class Step:
    """What one step reported, as plain numbers."""

    step: int  # counted from 1
    loss: float  # nats a predicted token, before the update
    norm: float  # of the whole gradient, before clipping
    rate: float  # the learning rate of the update
    tokens: int  # predicted
    finite: bool  # False: the step changed nothing


@dataclass(frozen=True)
class Result:
    """What the run did, from where it started or resumed to its end."""

    folder: Path
    resumed: int  # the step it resumed from; 0 for a fresh start
    steps: list[Step]
    compile_seconds: float
    tokens_per_second: float  # saving included, compiling not; 0 when there was no step to make

    @property
    def skipped(self) -> int:
        return sum(not s.finite for s in self.steps)


def run(
    config: Training,
    start: Start,
    *,
    on_step: Callable[[Step], None] = lambda step: None,
    console: Console | None = None,
) -> Result:
    """Trains to `config.steps`, from the folder's newest complete step if it has one.

    The model is in `config.folder` afterwards, readable like any checkpoint of ours. The step is
    compiled once, ahead of the first, and cannot be compiled again: a batch of another shape would
    be an error. BadInput when model, mesh, data and folder do not go together; nothing has been
    written then. `config.devices` simulates devices, which must come before any other use of JAX.
    """
    if config.devices is not None:
        mesh.simulate(config.devices)
    console = console or Console(stderr=True)
    if jax.process_index() > 0:
        console.quiet = True
    folder = Path(config.folder).absolute()
    _check(config, start, folder)
    plan = step.plan(config, start.spec, mesh.build(config.mesh))
    tokenizer = start.carry.get("tokenizer.json")
    text = data.tokens(config.data, start.spec.vocab, tokenizer, start.eos, folder / CACHE)
    feed = data.Feed(config, text, plan.mesh)
    resumed, state = _state(config, start, plan, folder, feed)
    _introduce(plan, text, resumed, console)
    _begin(config, start, folder, text)  # nothing is written before all that can be wrong
    began = time.perf_counter()
    report = Report(config, resumed, on_step, console)
    compile_seconds = 0.0
    if resumed < config.steps:
        console.print("compiling the step")
        compiled = step.make(plan).lower(state, step.shapes(plan)).compile()
        compile_seconds = time.perf_counter() - began
        console.print(f"compiled in {compile_seconds:.1f} s")
        with report, checkpoint.Saver(folder, config.keep) as saver:
            for number in range(resumed + 1, config.steps + 1):
                state, metrics = compiled(state, next(feed))
                report.add(number, metrics)
                if number % config.save_every == 0 or number == config.steps:
                    saver.save(number, state, feed.state())
    return Result(folder, resumed, report.steps, compile_seconds, report.speed())


class Report:
    """Reads the metrics back every few steps, so that steps queue up without waiting for them."""

    def __init__(
        self,
        config: Training,
        resumed: int,
        on_step: Callable[[Step], None],
        console: Console,
    ):
        self.config = config
        self.on_step = on_step
        self.console = console
        self.steps: list[Step] = []
        self.waiting: list[tuple[int, step.Metrics]] = []
        self.began = self.last = 0.0
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("", total=config.steps, completed=resumed)

    def add(self, number: int, metrics: step.Metrics) -> None:
        self.waiting.append((number, metrics))
        if number % self.config.log_every == 0 or number == self.config.steps:
            self.read()

    def read(self) -> None:
        """Waits for the steps so far and reports them. BadInput when the run has come apart."""
        new = [_plain(number, metrics) for number, metrics in jax.device_get(self.waiting)]
        self.waiting = []
        now = time.perf_counter()
        speed = sum(s.tokens for s in new) / (now - self.last)
        self.last = now
        for one in new:
            self.steps.append(one)
            self.on_step(one)
        end = new[-1]
        line = (
            f"loss {end.loss:.4f}  norm {end.norm:.3f}  rate {end.rate:.2e}  {speed:,.0f} tokens/s"
        )
        skipped = sum(not s.finite for s in self.steps)
        line += f"  {skipped} skipped" if skipped else ""
        if self.console.is_terminal:
            self.progress.update(self.task, completed=end.step, description=line)
        else:
            self.console.print(f"step {end.step}/{self.config.steps}  {line}")
        latest = self.steps[-TOLERATED:]
        if len(latest) == TOLERATED and not any(s.finite for s in latest):
            raise BadInput(
                f"the gradient was not finite {TOLERATED} steps in a row, up to step {end.step}; "
                "lower optimizer.peak, or look at the data and the parameters it started from"
            )

    def speed(self) -> float:
        """Predicted tokens a second over the whole run."""
        return sum(s.tokens for s in self.steps) / (self.last - self.began) if self.steps else 0.0

    def __enter__(self) -> Report:
        self.began = self.last = time.perf_counter()
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()


def _check(config: Training, start: Start, folder: Path) -> None:
    """A BadInput if the model is too short for the rows, or the folder is something else's."""
    if config.length > start.spec.max_len:
        raise BadInput(f"length={config.length} is over the model's {start.spec.max_len}")
    if not (folder / at_rest.HEADER).exists():
        return at_rest.refuse_taken(folder)
    spec, layout = at_rest.header(folder)
    if spec != start.spec:
        raise BadInput(f"{folder} holds a run of another model than {config.model}; name another")
    if layout != config.layout:
        raise BadInput(f"{folder} holds a run with layout {layout!r}; the run file says otherwise")


def _begin(config: Training, start: Start, folder: Path, text: data.Tokens) -> None:
    """The folder with its header and the text, written by the first host alone."""
    if jax.process_index() == 0:
        if not (folder / at_rest.HEADER).exists():
            at_rest.begin(folder, start.spec, config.layout, carry=start.carry)
        data.store(text, folder / CACHE)
    multihost_utils.sync_global_devices("the run's folder")


def _state(
    config: Training, start: Start, plan: step.Plan, folder: Path, feed: data.Feed
) -> tuple[int, step.State]:
    """Where the run goes on from: the newest complete step, or its start."""
    if at_rest.steps(folder):
        resumed, state, place = checkpoint.restore(folder, plan)
        if resumed > config.steps:
            raise BadInput(f"{folder} is at step {resumed} already, beyond steps={config.steps}")
        feed.restore(place)
        return resumed, state
    if start.arrays is None:
        return 0, step.fresh(plan)
    return 0, step.placed(plan, start.arrays())


def _introduce(plan: step.Plan, text: data.Tokens, resumed: int, console: Console) -> None:
    config = plan.run
    sizes = " x ".join(f"{axis} {n}" for axis, n in plan.mesh.shape.items())
    kind = plan.mesh.devices.flat[0].device_kind
    total = sum(x.size for x in plan.masters.values())
    console.print(f"{config.model}: {total:,} parameters on {sizes} ({kind})")
    for note in plan.notes:
        console.print(note)
    console.print(f"{len(text.ids):,} tokens of text, {config.batch} x {config.length} a step")
    if resumed == config.steps:
        console.print(f"complete already, at step {resumed}: give more steps to go on")
    else:
        console.print(f"resuming from step {resumed}" if resumed else "starting at step 0")


def _plain(number: int, metrics: step.Metrics) -> Step:
    return Step(
        number,
        float(metrics.loss),
        float(metrics.norm),
        float(metrics.rate),
        int(metrics.tokens),
        bool(metrics.finite),
    )
