"""Run files: the examples hold, and every mistake is named with its file and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxtwin.configs import BadInput, runs

EXAMPLES = sorted((Path(runs.__file__).parent / "runs").glob("*.toml"))
BASE = """
model = "smollm2-135m"
folder = "out"
steps = 20
batch = 8
length = 64
seed = 0
devices = 8
save_every = 10

[mesh]
data = 2
fsdp = 2
tensor = 2

[optimizer]
peak = 1e-4
warmup = 4
schedule = "cosine"
floor = 1e-5
b1 = 0.9
b2 = 0.95
eps = 1e-8
weight_decay = 0.1
clip = 1.0

[data]
source = "stdlib"
max_bytes = 1_000_000
"""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(path: Path) -> None:
    assert runs.read(path).steps > 0


@pytest.fixture
def base(tmp_path: Path) -> runs.Training:
    (tmp_path / "my.toml").write_text(BASE)
    return runs.read(tmp_path / "my.toml")


def test_every_field_is_read(base: runs.Training) -> None:
    assert base == runs.Training(
        model="smollm2-135m",
        folder="out",
        steps=20,
        batch=8,
        length=64,
        seed=0,
        devices=8,
        save_every=10,
        mesh=runs.Mesh(data=2, fsdp=2, tensor=2),
        optimizer=runs.AdamW(
            peak=1e-4,
            warmup=4,
            schedule="cosine",
            floor=1e-5,
            b1=0.9,
            b2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            clip=1.0,
        ),
        data=runs.Data(source="stdlib", max_bytes=1_000_000),
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("steps = 20", 'steps = "20"', "steps: .*valid integer, got '20'"),
        ("steps = 20", "steps = 20.0", "steps: .*valid integer, got 20.0"),
        ("steps = 20", "steps = true", "steps: .*valid integer, got True"),
        ("steps = 20", "steps = 0", "steps: .*greater than 0, got 0"),
        ("steps = 20", "", "steps: Field required"),
        ("seed = 0", "seed = 2024-01-01", "seed: .*valid integer"),
        ("seed = 0", "seed = -1", "seed: .*greater than or equal to 0"),
        ("clip = 1.0", "clip = nan", "optimizer.clip: .*finite"),
        ("clip = 1.0", "clap = 1.0", "optimizer.clap: Unexpected"),
        ("b1 = 0.9", "b1 = 1.0", "optimizer.b1: .*less than 1"),
        ("eps = 1e-8", "eps = 0.0", "optimizer.eps: .*greater than 0"),
        ('"cosine"', '"linear"', "optimizer.schedule: .*'cosine' or 'constant'"),
        ('"cosine"', '"constant"', "floor=1e-05 has no effect"),
        ("floor = 1e-5", "floor = 1.0", "floor=1.0 is above peak"),
        ("warmup = 4", "warmup = 20", "optimizer.warmup=20 leaves no step of steps=20"),
        ("batch = 8", "batch = 9", "batch=9 rows do not divide by .*nearest .* is 8"),
        ("devices = 8", "devices = 4", "devices=4, but the mesh needs 8"),
        ("tensor = 2", "tensor = 0", "mesh.tensor"),
        ("tensor = 2", "expert = 2", "mesh.expert: Unexpected"),
        ('"stdlib"', '"internet"', "data.source"),
        ("[data]", "[data", "Expected ']'"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in BASE
    path = tmp_path / "my.toml"
    path.write_text(BASE.replace(old, new))
    with pytest.raises(BadInput, match=rf"(?s)my\.toml is not .*{said}"):
        runs.read(path)


def test_overrides_are_validated_like_the_file(base: runs.Training) -> None:
    assert runs.changed(base, "x", steps=None, folder=None) == base
    assert runs.changed(base, "x", steps=7).steps == 7
    with pytest.raises(BadInput, match=r"x, with \{'steps': 0\} is not valid:\n  steps: "):
        runs.changed(base, "x", steps=0)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(BadInput, match=r"nowhere\.toml cannot be read: No such file"):
        runs.read("nowhere.toml")
