"""How much memory a conversion needs beyond what its imports take.

    python benchmarks/memory.py --mib 4096

makes a checkpoint of that size, converts it, each time in a process of its own, and prints the
peak of the resident memory above what the process had after its imports. Linux alone tells it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CONVERT = """
import json, sys

def told(key):  # in KiB
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

import jaxtwin.jaxmodel.checkpoint, jaxtwin.parity.checkpoints.source, safetensors
from jaxtwin.parity.checkpoints.convert import convert

base = told("VmRSS")
report = convert(sys.argv[1], sys.argv[2], sys.argv[3], sha256=True)
more = (told("VmHWM") - base) / 1024
print(json.dumps({"base": base / 1024, "more": more, "sha256": report["sha256"]}))
"""


def converted(src: Path, dst: Path, to: str) -> dict[str, object]:
    """{"base", "more"} in MiB, and the hashes, of one conversion in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, str(src), str(dst), to],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measured(folder: Path, mib: int) -> dict[str, dict[str, float]]:
    """The peaks of HF -> jax -> HF -> HF, in MiB, with the size of the weights among them."""
    from jaxtwin.benchmarks.synthetic import make

    size = make(folder / "hf", mib) / 2**20
    out, hashes = {}, []
    for name, src, to in (
        ("hf->jax", "hf", "jax"),
        ("jax->hf", "jax", "hf"),
        ("hf->hf", "hf", "hf"),
    ):
        dst = folder / ("jax" if to == "jax" else name.replace("->", "-to-"))
        told = converted(folder / src, dst, to)
        hashes.append(told.pop("sha256"))
        out[name] = {"weights": size, **told}
    assert all(one == hashes[0] for one in hashes)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=4096, help="size of the weights")
    parser.add_argument("--folder", type=Path, help="where to work (a new folder below)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for name, told in measured(Path(folder), given.mib).items():
            print(
                f"{name:8} weights {told['weights']:6.0f} MiB   imports {told['base']:4.0f} MiB   "
                f"peak beyond them {told['more']:5.0f} MiB"
            )


if __name__ == "__main__":
    main()
