"""Saving and resuming a run, in the folder that `jaxmodel.checkpoint` describes.

Beside a step's "params" stand "opt_state" (by name, as the parameters are by path), "counts" and
"data". So a run's folder is a model like any other, and a converted model is a run at step 0 whose
optimizer state is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from jaxtwin.configs import BadInput
from jaxtwin.jaxmodel import checkpoint as at_rest
from jaxtwin.train.step import Plan, State, start


def named(tree: Any) -> dict[str, Any]:
    """A tree's leaves by name, e.g. "1/0/mu/embed/weight"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def parts(state: State) -> dict[str, dict[str, Any]]:
    """The state as it is stored: named arrays in groups."""
    return {
        at_rest.PARAMS: dict(state.params),
        "opt_state": named(state.opt_state),
        "counts": {"step": state.step, "skipped": state.skipped},
    }


class Saver:
    """Writes steps in the background, one at a time, and keeps the newest few.

    An older step is deleted only once a newer one is durable. What went wrong in the background is
    raised by the next `save` or by `wait`. Leave it as a context manager to wait for the last one.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int):
        self.folder = Path(folder).absolute()
        self.keep = keep
        self.pending: ocp.AsyncResponse[None] | None = None
        if jax.process_index() == 0:
            _clear_half_written(self.folder)

    def save(self, step: int, state: State, data: dict[str, Any]) -> None:
        """Starts to write that step. The state may be donated as soon as this returns."""
        self.wait()
        groups = parts(state)
        # From an accelerator Orbax copies to the host before it returns; CPU arrays it reads in
        # place while it writes, and a donated buffer would be overwritten or kept from donation.
        if jax.devices()[0].platform == "cpu":
            groups = jax.tree.map(jnp.copy, groups)
        with at_rest.storage():
            self.pending = ocp.save_checkpointables_async(
                self.folder / str(step), {**groups, "data": data}
            )

    def wait(self) -> None:
        """Until the step being written is durable; then older ones go."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        pending.result()
        if jax.process_index() == 0:
            for step in at_rest.steps(self.folder)[: -self.keep]:
                _remove(self.folder / str(step))

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.wait()


def restore(folder: str | os.PathLike[str], plan: Plan) -> tuple[int, State, dict[str, Any]]:
    """The newest complete step, its state where the plan wants it, and its place in the data.

    The plan's mesh may differ from the one that saved. BadInput when names, shapes or dtypes are
    not exactly the plan's: nothing is cast, filled in or left out.
    """
    folder = Path(folder).absolute()
    step = at_rest.describe(folder).step
    where = folder / str(step)
    abstract = jax.eval_shape(lambda masters: start(plan.optimizer, masters), plan.masters)
    target = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract,
        plan.state,
    )
    wanted = parts(target)
    _prove(wanted, at_rest.contents(where), where)
    with at_rest.readable(where), at_rest.storage():
        found = ocp.load_checkpointables(where, {**wanted, "data": None})
    names = named(target.opt_state)
    shape = jax.tree.structure(target.opt_state)
    opt_state = jax.tree.unflatten(shape, [found["opt_state"][name] for name in names])
    counts = found["counts"]
    state = State(found[at_rest.PARAMS], opt_state, counts["step"], counts["skipped"])
    return step, state, found["data"]


def _prove(
    wanted: Mapping[str, Mapping[str, Any]], stored: Mapping[str, Mapping[str, Any]], where: Path
) -> None:
    """A BadInput with every difference between what is stored and what the run needs."""
    if "opt_state" not in stored:
        raise BadInput(
            f"{where} holds a model and no run; name it as `model` and give the run another folder"
        )
    problems = []
    for group, due in wanted.items():
        held = stored.get(group, {})
        for name in sorted(due.keys() | held.keys()):
            if name not in held:
                problems.append(f"  {group} {name}: missing")
            elif name not in due:
                problems.append(f"  {group} {name}: unexpected")
            elif (have := _kind(held[name])) != (need := _kind(due[name])):
                problems.append(f"  {group} {name}: {have} is stored, the run needs {need}")
    if problems:
        shown = problems[:20] + [f"  and {len(problems) - 20} more"] * (len(problems) > 20)
        raise BadInput(f"{where} is not of this run:\n" + "\n".join(shown))


def _kind(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _remove(step: Path) -> None:
    """Deletes a step, its commit marker first: never does half a step read as a whole one."""
    (step / at_rest.COMMITTED).unlink(missing_ok=True)
    shutil.rmtree(step)


def _clear_half_written(folder: Path) -> None:
    """Deletes what a killed save or deletion left: steps, by their names, that are not complete."""
    complete = {str(step) for step in at_rest.steps(folder)}
    for path in folder.iterdir():
        step = path.name.removesuffix(".orbax-checkpoint-tmp")
        if path.is_dir() and step.isdigit() and path.name not in complete:
            shutil.rmtree(path)
