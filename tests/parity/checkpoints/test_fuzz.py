"""Damaged files by the hundred: each loads with the same bytes or is refused in one message.

Only a bit of a value itself goes unseen, for no format here has a checksum of values; then that
value is another, and no other is.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtwin.configs import BadInput
from jaxtwin.jaxmodel import stream
from jaxtwin.parity.checkpoints.convert import convert
from jaxtwin.parity.checkpoints.source import open_source
from jaxtwin.tests.helpers.folders import hf_folder
from jaxtwin.tests.helpers.gguf_files import write_gguf

pytestmark = pytest.mark.slow
DAMAGES = 130  # of each of the four kinds of source
LONGEST = 20  # seconds

Values = dict[str, tuple[str, tuple[int, ...], bytes]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One sound source of each kind, of small tensors."""
    at = tmp_path_factory.mktemp("good")
    hf_folder(at / "single", "bfloat16")
    hf_folder(at / "shards", "bfloat16", max_shard_size="8KB")
    (at / "gguf").mkdir()
    write_gguf(at / "gguf" / "a.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "PIECE", 2**11)
        patch.setattr(stream, "LAYER", 2**8)
        convert(at / "single", at / "jax")
    return {name: at / name for name in ("single", "shards", "gguf", "jax")}


def read(folder: Path) -> Values:
    """Every tensor of a source, with dtype and shape."""
    files = list(folder.glob("*.gguf"))
    tensors = open_source(files[0] if files else folder).tensors
    values = {name: tensor.read() for name, tensor in tensors.items()}
    return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in values.items()}


# --- what can happen to a file


def flip(path: Path, at: int, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def values_begin(path: Path) -> int:
    """Where the values of a file begin; its length where it has none."""
    if path.suffix == ".safetensors":
        return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    if path.suffix == ".gguf":
        import gguf

        return int(min(t.data_offset for t in gguf.GGUFReader(path).tensors))
    return path.stat().st_size


def is_chunk(path: Path) -> bool:
    """A file of an Orbax step that holds values."""
    return path.parent.name == "d" and not path.read_bytes().startswith(b"\x0c\xdb")


def any_file(folder: Path, rng: random.Random) -> Path:
    """One of the files, the longer ones not oftener than others."""
    return rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))


def flipped(folder: Path, rng: random.Random) -> str:
    """A bit of a header, an index, a config, a tree's node."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
    path = rng.choice([p for p in paths if not is_chunk(p)])
    at = rng.randrange(values_begin(path))
    flip(path, at, rng)
    return f"bit of byte {at} of {path.name}"


def value_flipped(folder: Path, rng: random.Random) -> str:
    """A bit of a value."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    path = rng.choice([p for p in paths if is_chunk(p) or p.suffix in (".safetensors", ".gguf")])
    size = path.stat().st_size
    at = rng.randrange(0 if is_chunk(path) else values_begin(path), size)
    flip(path, at, rng)
    return f"value at byte {at} of {path.name}"


def truncated(folder: Path, rng: random.Random) -> str:
    path = any_file(folder, rng)
    size = path.stat().st_size
    kept = rng.choice([0, 1, size // 2, max(0, size - 1), rng.randrange(size + 1)])
    path.write_bytes(path.read_bytes()[:kept])
    return f"{path.name} cut to {kept} of {size} bytes"


def removed(folder: Path, rng: random.Random) -> str:
    path = any_file(folder, rng)
    path.unlink()
    return f"{path.name} removed"


def overwritten(folder: Path, rng: random.Random) -> str:
    """A run of bytes of a header replaced, or bytes put behind a file's end."""
    path = any_file(folder, rng)
    data = bytearray(path.read_bytes())
    if rng.random() < 0.3 or not data or is_chunk(path):
        data += rng.randbytes(rng.choice([1, 8, 100]))
        what = "longer"
    else:
        at, length = rng.randrange(values_begin(path)), rng.choice([2, 4, 8, 40])
        data[at : at + length] = rng.randbytes(len(data[at : at + length]))
        what = f"other bytes at {at}"
    path.write_bytes(data)
    return f"{path.name} {what}"


ODD: list[Any] = [
    None, -1, 0, 1, 2, 7, 1.5, "x", "", [], {}, [1], True, False, 1e300, -0.0, float("nan"),
    float("inf"), 2**31, 2**63, 2**70, 10**6, "../../x", {"a": 1}, "1",
]  # fmt: skip


def json_edited(folder: Path, rng: random.Random) -> str:
    """A key of any JSON file, anywhere in it, removed or given another value."""
    files = [*folder.glob("*.json"), *folder.rglob("_METADATA")]
    path = rng.choice(sorted(p for p in files if p.name != "generation_config.json"))
    data = json.loads(path.read_text())
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        keys = node.keys() if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(data)
    node, key = rng.choice(places)
    if rng.random() < 0.3:
        del node[key]
        what = "removed"
    else:
        node[key] = rng.choice(ODD)
        what = repr(node[key])
    path.write_text(json.dumps(data))
    return f"{path.name}: {key} {what}"


def header_edited(folder: Path, rng: random.Random) -> str:
    """A safetensors header that lies, of the right length, beside the same values."""
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    name = rng.choice(sorted(header.keys() - {"__metadata__"}))
    entry = header[name]
    act = rng.choice(["dtype", "shape", "offsets", "name", "gone", "twice"])
    if act == "dtype":
        entry["dtype"] = rng.choice(["F32", "F64", "I8", "BOOL", "F8_E5M2", "F4", "", None, 7])
    elif act == "shape":
        entry["shape"] = rng.choice(
            [[], [0], [-1, 3], [2**32, 2**32], [*entry["shape"][::-1], 1], [1.5], None, "x"]
        )
    elif act == "offsets":
        shift = rng.choice([1, -1, 2, -2, 2**40, 2**63])
        entry["data_offsets"] = [at + shift for at in entry["data_offsets"]]
    elif act == "name":
        header[rng.choice(["x", "../../x", "", name + "."])] = header.pop(name)
    elif act == "gone":
        del header[name]
    text = json.dumps(header).encode()
    if act == "twice":
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}".encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return f"{path.name}: {act} of {name}: {str(entry)[:80]}"


def entry_flipped(folder: Path, rng: random.Random) -> str:
    """A bit of what a GGUF says of a tensor: its name, shape, type and place."""
    import gguf

    (path,) = folder.glob("*.gguf")
    first = min(tensor.field.offset for tensor in gguf.GGUFReader(path).tensors)
    at = rng.randrange(first, values_begin(path))
    flip(path, at, rng)
    return f"bit of byte {at} of the tensors' entries from {first}"


ACTS: list[Callable[[Path, random.Random], str]] = [
    flipped, flipped, truncated, removed, overwritten, json_edited, json_edited, value_flipped,
]  # fmt: skip


def differs(a: Values, b: Values) -> int:
    """In how many bytes the values differ; -1 where names, dtypes or shapes do."""
    if {k: v[:2] for k, v in a.items()} != {k: v[:2] for k, v in b.items()}:
        return -1
    pairs = ((np.frombuffer(a[k][2], np.uint8), np.frombuffer(b[k][2], np.uint8)) for k in a)
    return sum(int((x != y).sum()) for x, y in pairs)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["single", "shards", "gguf", "jax"])
def test_a_damaged_source_is_the_same_or_refused(
    tmp_path: Path, good: dict[str, Path], kind: str
) -> None:
    due = read(good[kind])
    counts: Counter[str] = Counter()
    wrong = []
    more = {"gguf": [entry_flipped] * 4, "jax": []}.get(kind, [header_edited] * 2)
    acts = [act for act in ACTS if kind != "gguf" or act is not json_edited] + more
    for seed in range(DAMAGES):
        rng = random.Random(f"{kind} {seed}")
        folder = tmp_path / f"{seed}"
        shutil.copytree(good[kind], folder)
        act = rng.choice(acts)
        told = f"{kind} {seed}, {act(folder, rng)}"
        start = time.monotonic()
        try:
            got = read(folder)
        except BadInput as error:
            counts["refused"] += 1
            if not str(error) or len(str(error)) > 4000:
                wrong.append(f"{told}: a message of {len(str(error))} characters")
        except Exception as error:
            wrong.append(f"{told}: {type(error).__name__}: {str(error)[:200]}")
        else:
            apart = differs(got, due)
            if act is value_flipped and apart == 1:
                counts["one byte of a value"] += 1
            elif apart == 0:
                counts["harmless"] += 1
            else:
                wrong.append(f"{told}: loads otherwise, {apart} bytes")
        if (took := time.monotonic() - start) > LONGEST:
            wrong.append(f"{told}: took {took:.0f} s")
        shutil.rmtree(folder)
    assert not wrong, f"{len(wrong)} of {DAMAGES}\n" + "\n".join(wrong)
    assert counts["refused"] > DAMAGES // 10, counts
    assert counts["harmless"] > 0, counts
    assert counts["one byte of a value"] > 0, counts
