"""Conversions killed at any moment: nothing that loads is left, and the next run completes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtwin.configs import BadInput
from jaxtwin.configs.llama import llama
from jaxtwin.parity.checkpoints.convert import convert, hashes
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.tests.helpers.folders import entries, pt_file, torch_state

pytestmark = pytest.mark.slow
SPEC = llama(
    vocab=512, d=256, layers=24, heads=4, kv=2, hidden=1024, max_len=32, base=500.0, pairs="half",
    eps=1e-5, tied=False, width=64,
)  # fmt: skip

RUN = """
import sys, time
import jaxtwin.jaxmodel.checkpoint, jaxtwin.parity.checkpoints.source
from jaxtwin.jaxmodel import stream
from jaxtwin.parity.checkpoints.convert import convert

stream.PIECE = 2**18
stream.LAYER = 2**16  # so that stacks are written layer by layer
stream.BEHIND = 2**20
src, dst, to = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
# On a busy machine a conversion as fast as this one is over before a signal comes.
convert(src, dst, to, shard=4_000_000, progress=lambda step: time.sleep(0.02))
print("done", flush=True)
"""


def started(src: Path, dst: Path, to: str) -> subprocess.Popen[str]:
    """A process that has imported everything and waits for the word."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(src), str(dst), to],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.full)])
@pytest.mark.parametrize("to", ["jax", "hf"])
def test_a_conversion_killed_at_any_moment(tmp_path: Path, to: str, kills: int) -> None:
    """At moments between the first and the last of an undisturbed run's time, drawn by a seed."""
    source = pt_file(tmp_path / "a.pt", SPEC, torch_state(SPEC, "bfloat16"))
    convert(source, tmp_path / "hf", "hf", shard=4_000_000)
    due = hashes(open_source(tmp_path / "hf").tensors)
    undisturbed = started(tmp_path / "hf", tmp_path / "whole", to)
    start = time.perf_counter()
    go(undisturbed)
    assert undisturbed.stdout is not None
    assert undisturbed.stdout.readline() == "done\n"
    took = time.perf_counter() - start
    undisturbed.wait()
    rng = random.Random(to)
    killed, half, left = 0, 0, set[str]()
    for i in range(3 * kills):
        if killed == kills:
            break
        dst = tmp_path / f"out{i}"
        process = started(tmp_path / "hf", dst, to)
        go(process)
        time.sleep(rng.uniform(0, took))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if dst.exists():  # it was quicker this time: then it is whole, and not counted
            assert hashes(open_source(dst).tensors) == due
            took *= 0.9
            continue
        killed += 1
        hidden = {name for name in entries(tmp_path) if name.endswith(".part")}
        for name in hidden - left:
            try:  # between its last byte and its renaming it is whole
                assert hashes(open_source(tmp_path / name).tensors) == due
            except BadInput:
                half += 1
        left |= hidden
        again = convert(tmp_path / "hf", dst, to, sha256=True)
        assert again["sha256"] == due
        assert hashes(open_source(dst).tensors) == due
    assert killed == kills
    assert half or kills < 20  # of so many, some were killed while they wrote


@pytest.mark.timeout(600)
@pytest.mark.parametrize("to", ["jax", "hf"])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, to: str) -> None:
    """While it writes, from the first file on; Orbax's threads hear of it too, and stop."""
    source = pt_file(tmp_path / "a.pt", SPEC, torch_state(SPEC, "bfloat16"))
    convert(source, tmp_path / "hf", "hf", shard=4_000_000)
    stopped = 0
    for i in range(8):
        dst = tmp_path / f"out{i}"
        process = started(tmp_path / "hf", dst, to)
        go(process)
        while process.poll() is None and not list(tmp_path.glob("*.part")):
            time.sleep(0.001)
        time.sleep(0.012 * i)
        process.send_signal(signal.SIGINT)
        status = process.wait(30)
        assert not list(tmp_path.glob(".*.part")), status
        if not dst.exists():
            stopped += 1
            assert status in (1, -signal.SIGINT)
    assert stopped > 1
