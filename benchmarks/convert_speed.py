"""How fast conversion is, beside a copy of the same files.

    python benchmarks/convert_speed.py --mib 1024 --times 3

makes a checkpoint of that size and converts it, taking turns with a copy of the source. Both end
when the data is on the disk (sync). Printed are the best of each in MB of weights per second, and
their ratio; the goal is half of the copy's rate.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np


def seconds(act: Callable[[], object], memory: int) -> float:
    """How long that takes, once there are so many bytes of memory that were just in use.

    A virtual machine gives back what it leaves free for a second or two, and its host takes longer
    to find it again than anything measured here.
    """
    np.ones(memory, np.uint8)
    os.sync()
    start = time.perf_counter()
    act()
    os.sync()
    return time.perf_counter() - start


def copied(src: Path, dst: Path) -> None:
    """Every file of a folder, each forced to the disk."""
    shutil.copytree(src, dst)
    for path in dst.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def best(src: Path, dst: Path, to: str, times: int, size: int) -> tuple[float, float]:
    """The fewest seconds of a copy of `src` and of its conversion, in turns."""
    from jaxtwin.parity.checkpoints.convert import convert

    copies, conversions = [], []
    for _ in range(times):
        copies.append(seconds(lambda: copied(src, dst), 2 * size))
        shutil.rmtree(dst)
        conversions.append(seconds(lambda: convert(src, dst, to), 2 * size))
        shutil.rmtree(dst)
    return min(copies), min(conversions)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the weights")
    parser.add_argument("--times", type=int, default=3, help="how often each is measured")
    parser.add_argument("--folder", type=Path, help="where to work (a new folder below)")
    given = parser.parse_args()
    from jaxtwin.benchmarks.synthetic import make
    from jaxtwin.parity.checkpoints.convert import convert

    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        size = make(folder / "hf", given.mib)
        convert("smollm2-tiny", folder / "warm")  # imports and compiled functions
        convert(folder / "hf", folder / "jax", "jax")
        for src, to in (("hf", "hf"), ("hf", "jax"), ("jax", "hf")):
            copy, ours = best(folder / src, folder / "out", to, given.times, size)
            print(
                f"{src} -> {to:4} {size / 1e6:6.0f} MB   copy {size / copy / 1e6:5.0f} MB/s   "
                f"convert {size / ours / 1e6:5.0f} MB/s   ratio {copy / ours:.2f}"
            )


if __name__ == "__main__":
    main()
