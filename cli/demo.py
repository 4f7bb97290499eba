"""The demo: the whole job on a real checkpoint, in six stages."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

MODEL = "smollm2-135m"
# Tells what is being done while a block runs: see `around.working`.
Working = Callable[[], contextlib.AbstractContextManager[Callable[[str], None]]]


def demonstrate(out: Path, steps: int, working: Working) -> None:
    """The demo: six stages, each announced before it starts and timed, and a summary at the end."""
    import time

    from rich.table import Table

    from jaxtwin.configs import BadInput
    from jaxtwin.parity.report.console import printer

    if out.exists() and any(out.iterdir()):
        raise BadInput(f"{out} exists and is not empty; name a new folder with --out")
    console = printer(100)
    summary = Table(title="SmolLM2-135M, from PyTorch to JAX and back", title_justify="left")
    for column in ("stage", "what came out", "seconds"):
        summary.add_column(
            column, overflow="fold", justify="right" if column == "seconds" else "left"
        )
    for number, (name, stage) in enumerate(STAGES.items(), 1):
        console.rule(f"{number}/{len(STAGES)} {name}", align="left")
        began = time.perf_counter()
        with working() as progress:
            result = stage(out, steps, progress, console)
        summary.add_row(name, result, f"{time.perf_counter() - began:.1f}")
    console.print(summary)


def unused(path: Path) -> Path:
    """The path, or with the first number behind it that is not taken."""
    import itertools

    names = itertools.chain([path], (Path(f"{path}-{i}") for i in itertools.count(2)))
    return next(name for name in names if not name.exists())


def stage_convert(out: Path, steps: int, progress: Callable[[str], None], console: Any) -> str:
    from jaxtwin.parity.checkpoints.convert import convert as run

    report = run(MODEL, out / "jax", "jax", progress=progress)
    return f"{report['tensors']} tensors, {report['bytes']:,} bytes -> {out / 'jax'}"


def verb(*words: str) -> None:
    """One of our own verbs in a process of its own, which gives its memory back.

    (And simulated devices must be there before JAX starts.)
    """
    import subprocess

    done = subprocess.run([sys.executable, "-m", "jaxtwin", *words], check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)


def stage_check(out: Path, steps: int, progress: Callable[[str], None], console: Any) -> str:
    verb("check", MODEL, "--save", str(out / "check.json"))
    checks = json.loads((out / "check.json").read_text())["checks"]
    return f"equal: all {len(checks)} comparisons hold -> {out / 'check.json'}"


def stage_generate(out: Path, steps: int, progress: Callable[[str], None], console: Any) -> str:
    from jaxtwin.cli.model_facts import Continuation, continuation

    prompt = "The difference between a list and a tuple in Python is"
    answer = continuation(str(out / "jax"), Continuation(prompt, tokens=48), progress)
    console.print(answer["text"], style="cyan")
    return f"{len(answer['new_ids'])} tokens, greedy"


def stage_export(out: Path, steps: int, progress: Callable[[str], None], console: Any) -> str:
    from jaxtwin.parity.checkpoints.convert import convert as run
    from jaxtwin.parity.checkpoints.convert import hashes
    from jaxtwin.parity.checkpoints.source import open_source

    run(out / "jax", out / "hf", "hf", progress=progress)
    progress("comparing the hash of every tensor")
    before, after = hashes(open_source(MODEL).tensors), hashes(open_source(out / "hf").tensors)
    same = sum(before[name] == after.get(name) for name in before)
    console.print(f"{same} of {len(before)} tensors have the sha256 they had in the GGUF file")
    if before != after:
        raise typer.Exit(1)
    return f"{same} of {len(before)} hashes unchanged by the round trip -> {out / 'hf'}"


def stage_train(out: Path, steps: int, progress: Callable[[str], None], console: Any) -> str:
    file, saved = str(Path(runs_folder()) / "finetune-smollm2.toml"), out / "train.json"
    verb("train", file, "--steps", str(steps), "--out", str(out / "run"), "--save", str(saved))
    losses = [step["loss"] for step in json.loads(saved.read_text())["steps"]]
    first, last = (sum(part) / len(part) for part in (losses[:5], losses[-5:]))
    if not last < first:
        raise typer.Exit(1)
    return (
        f"loss {first:.3f} -> {last:.3f} (mean of the first and the last 5 of {steps} steps) "
        f"on 2 x 2 x 2 devices -> {out / 'run'}"
    )


def stage_finish(out: Path, steps: int, progress: Callable[[str], None], console: Any) -> str:
    from jaxtwin.parity.checkpoints.convert import convert as run

    run(out / "run", out / "finetuned-hf", "hf", progress=progress)
    return f"the fine-tuned model for transformers -> {out / 'finetuned-hf'}"


STAGES: dict[str, Callable[[Path, int, Callable[[str], None], Any], str]] = {
    "convert to JAX": stage_convert,
    "check against torch and transformers": stage_check,
    "generate": stage_generate,
    "export to Hugging Face": stage_export,
    "fine-tune": stage_train,
    "export the fine-tuned model": stage_finish,
}


def runs_folder() -> str:
    """Where the example run files lie, installed or in a checkout."""
    from jaxtwin import configs

    return str(Path(configs.__file__).parent / "runs")
