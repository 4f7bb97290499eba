"""A whole run: interrupted or not it ends the same, and what is wrong is said before it writes."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxtwin.configs import BadInput, Model
from jaxtwin.configs.llama import llama
from jaxtwin.configs.runs import Training
from jaxtwin.jaxmodel import axes
from jaxtwin.jaxmodel import checkpoint as at_rest
from jaxtwin.tests.helpers import kit, training
from jaxtwin.train import checkpoint, loop, mesh, step

BYTES = llama(  # 256 bytes and the end of a document, and a few ids for the mesh's sake
    vocab=264,
    d=16,
    layers=1,
    heads=2,
    kv=2,
    hidden=24,
    max_len=16,
    base=100.0,
    pairs="half",
    eps=1e-6,
    tied=True,
)


def config(folder: Path, **changes: Any) -> Training:
    return training.run((2, 2, 2), **{"folder": str(folder), **changes})


def run(run: Training, start: loop.Start | None = None, **more: Any) -> loop.Result:
    console = more.pop("console", Console(file=io.StringIO()))
    return loop.run(run, start or loop.Start(BYTES), console=console, **more)


def stored(folder: Path, run: Training, model: Model = BYTES) -> step.State:
    plan = step.plan(run, model, mesh.build(run.mesh))
    return jax.device_get(checkpoint.restore(folder, plan)[1])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, loop.Result, str]:
    """Ten steps in one go, and what was printed."""
    said = Console(file=io.StringIO(), width=120)
    settings = config(tmp_path_factory.mktemp("straight") / "run")
    result = loop.run(settings, loop.Start(BYTES), console=said)
    return settings, result, said.file.getvalue()  # type: ignore[attr-defined]


def test_ten_steps_straight_and_five_and_five(straight: Any, tmp_path: Path) -> None:
    """Bit for bit: parameters, moments, counts, losses and the rate of every step."""
    settings, due, _ = straight
    folder = tmp_path / "run"

    def stop(done: loop.Step) -> None:
        if done.step == 7:  # two steps after the save: they are done again
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config(folder), on_step=stop)
    assert at_rest.steps(folder) == [5]
    result = run(config(folder))
    assert result.resumed == 5
    assert result.steps == due.steps[5:]
    assert training.same(stored(folder, settings), stored(due.folder, settings))


def test_what_is_reported(straight: Any) -> None:
    _, result, said = straight
    assert [s.step for s in result.steps] == list(range(1, 11))
    assert result.steps[0].loss == pytest.approx(np.log(264), rel=0.01)
    assert result.steps[-1].loss < result.steps[0].loss
    assert all(s.finite for s in result.steps)
    assert result.skipped == 0
    assert result.steps[0].rate == 0
    assert result.tokens_per_second > 0
    lines = said.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 10
    assert "parameters on data 2 x fsdp 2 x tensor 2" in said
    assert "step 10/10  loss " in said
    assert "tokens/s" in said


def test_a_finished_run_is_left_alone(straight: Any) -> None:
    settings, due, _ = straight
    before = (due.folder / "10" / "_CHECKPOINT_METADATA").stat().st_mtime_ns
    result = run(settings)
    assert (result.resumed, result.steps, result.compile_seconds) == (10, [], 0.0)
    assert (due.folder / "10" / "_CHECKPOINT_METADATA").stat().st_mtime_ns == before


def test_the_run_is_a_model_with_its_files(tmp_path: Path) -> None:
    """Given values come out as they went in where nothing is learnt; carried files too."""
    still = dataclasses.replace(training.ADAMW, peak=1e-30, floor=0.0, warmup=0)
    settings = config(tmp_path / "run", steps=1, optimizer=still)
    arrays = {path: x.astype("f4") for path, x in training.lively(BYTES).items()}
    files = {"generation_config.json": b"{}"}
    said = io.StringIO()
    terminal = Console(file=said, width=120, force_terminal=True)
    run(settings, loop.Start(BYTES, lambda: arrays, files), console=terminal)
    assert "step 1/1" in said.getvalue()
    found = axes.arrays(at_rest.load(tmp_path / "run"))
    assert all(np.asarray(found[path]) == pytest.approx(x, rel=1e-6) for path, x in arrays.items())
    assert at_rest.carried(tmp_path / "run") == files
    run(settings, loop.Start(BYTES, lambda: pytest.fail("read though there is a step")))


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    narrow = dataclasses.replace(BYTES, vocab=256)
    odd = dataclasses.replace(BYTES, vocab=259)
    tiny = dataclasses.replace(training.RUN.data, max_bytes=10)
    wrong = {path: np.ones((3,), "f4") for path in training.lively(BYTES)}
    cases = [
        ({"length": 17}, loop.Start(BYTES), "length=17 is over the model's 16"),
        ({}, loop.Start(narrow), "id 256, but the model's vocabulary ends at 255"),
        ({}, loop.Start(odd), "embed/weight: vocabulary v=259 is not divisible by tensor=2"),
        ({"data": tiny}, loop.Start(BYTES), "max_bytes allows not one file"),
        ({}, loop.Start(BYTES, lambda: wrong), "norm/weight: shape"),
        ({}, loop.Start(BYTES, None, {"tokenizer.json": b"{}"}, (1,)), "tokenizer.json cannot"),
    ]
    for changes, start, said in cases:
        with pytest.raises(BadInput, match=said):
            run(config(tmp_path / "run", **changes), start)
        assert not any(tmp_path.iterdir())
    (tmp_path / "mine").write_text("not a run")
    with pytest.raises(BadInput, match="exists and is not empty"):
        run(config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_of_another_run_is_refused(straight: Any) -> None:
    settings, due, _ = straight
    other = dataclasses.replace(BYTES, init_std=0.03)
    with pytest.raises(BadInput, match="holds a run of another model"):
        run(settings, loop.Start(other))
    for changes, said in [
        ({"layout": "unroll"}, "holds a run with layout 'scan'"),
        ({"seed": 4}, "seed was 3, is 4"),
        ({"steps": 9}, "is at step 10 already, beyond steps=9"),
    ]:
        with pytest.raises(BadInput, match=said):
            run(dataclasses.replace(settings, **changes))
    assert at_rest.steps(due.folder) == [5, 10]


@pytest.mark.slow
def test_a_run_that_never_saved_starts_again(straight: Any, tmp_path: Path) -> None:
    _, due, _ = straight
    at_rest.begin(tmp_path / "run", BYTES, "scan")
    said = io.StringIO()
    result = run(config(tmp_path / "run", log_every=4), console=Console(file=said, width=120))
    assert result.steps == due.steps
    lines = [line.split()[1] for line in said.getvalue().splitlines() if line.startswith("step ")]
    assert lines == ["4/10", "8/10", "10/10"]


def test_a_run_that_comes_apart_gives_up(tmp_path: Path) -> None:
    arrays = {path: x.astype("f4") * 1e20 for path, x in training.lively(BYTES).items()}
    with pytest.raises(BadInput, match="not finite 10 steps in a row, up to step 10"):
        run(config(tmp_path / "run", steps=30), loop.Start(BYTES, lambda: arrays))


WORKER = """
import dataclasses, io, json, sys
given = json.loads(sys.argv[1])
if given["port"]:
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"localhost:{given['port']}", 2, given["process"])
from jaxtwin.train import loop, mesh
from jaxtwin.configs.runs import Mesh
from jaxtwin.tests.train import test_loop as here
changes = {**given["changes"], "mesh": Mesh(**given["mesh"])}
settings = dataclasses.replace(here.config(given["folder"]), **changes)
def on_step(step):
    print(json.dumps(dataclasses.asdict(step)), flush=True)
here.run(settings, on_step=on_step)
"""


def worker(
    folder: Path, shape: dict[str, int], port: int = 0, process: int = 0, **changes: Any
) -> Any:
    """A run in a process of its own, which prints every step."""
    given = {
        "folder": str(folder),
        "mesh": shape,
        "port": port,
        "process": process,
        "changes": changes,
    }
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_the_same(tmp_path: Path) -> None:
    """SIGKILL again and again, saves of every step under way; then the end is bitwise the same."""
    shape = {"data": 2, "fsdp": 2}
    changes = {"steps": 30, "save_every": 1, "devices": 4}
    settings = dataclasses.replace(config(tmp_path / "x"), mesh=training.Mesh(**shape), **changes)
    due = run(dataclasses.replace(settings, folder=str(tmp_path / "straight")))
    folder = tmp_path / "killed"
    moments = random.Random(0)
    resumed = []
    for _ in range(4):
        process = worker(folder, shape, **changes)
        lines = [process.stdout.readline() for _ in range(moments.randint(2, 6))]
        assert all(lines), process.stderr.read()
        resumed.append(json.loads(lines[0])["step"] - 1)
        time.sleep(moments.uniform(0, 0.1))  # somewhere within a save
        process.send_signal(signal.SIGKILL)
        process.wait()
        if folder.exists() and at_rest.steps(folder):
            stored(folder, settings)  # the newest complete step is whole
    assert resumed == sorted(resumed)
    assert 0 < resumed[-1] < 25  # it was killed after saves, and before the end
    run(dataclasses.replace(settings, folder=str(folder)))
    assert training.same(stored(folder, settings), stored(due.folder, settings))


@pytest.mark.slow
def test_two_hosts_are_one_run(tmp_path: Path) -> None:
    """Two processes of two devices: the same batches and, within rounding, the same parameters."""
    shape = {"data": 4}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    hosts = [worker(tmp_path / "two", shape, port, i, save_every=5) for i in range(2)]
    outputs = [host.communicate(timeout=280) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    lines = [[x for x in out.splitlines() if x.startswith("{")] for out, _ in outputs]  # and gloo's
    said = [[json.loads(line) for line in some] for some in lines]
    assert said[0] == said[1]
    settings = dataclasses.replace(config(tmp_path / "one"), mesh=training.Mesh(**shape))
    one = run(settings)
    alone = dataclasses.replace(settings, folder=str(tmp_path / "alone"), mesh=training.Mesh())
    lone = run(alone)
    assert [s["tokens"] for s in said[0]] == [s.tokens for s in one.steps]
    two, due = stored(tmp_path / "two", settings), stored(one.folder, settings)
    other = stored(lone.folder, alone)
    for path, x in two.params.items():
        budget = 2 * kit.apart(other.params[path], due.params[path]) + 2**-24
        assert kit.apart(x, due.params[path]) <= budget, path
