"""Run files: the examples hold, and every mistake is named with its file and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs import BadInput, runs

EXAMPLES = sorted((Path(runs.__file__).parent / "runs").glob("*.toml"))
BASE = next(path for path in EXAMPLES if path.name == "finetune-smollm2.toml").read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(path: Path) -> None:
    assert runs.read(path).steps > 0


def test_every_field_of_an_example_is_read() -> None:
    run = runs.read(next(path for path in EXAMPLES if path.name == "finetune-smollm2.toml"))
    assert run.mesh == runs.Mesh(data=2, fsdp=2, tensor=2)
    assert (run.model, run.steps, run.batch, run.length) == ("smollm2-135m", 20, 8, 64)
    assert (run.optimizer.peak, run.optimizer.floor, run.optimizer.clip) == (3e-4, 3e-5, 1.0)
    assert run.data == runs.Data(source="stdlib", max_bytes=12_000)


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
        ('"cosine"', '"constant"', "floor=3e-05 has no effect"),
        ("floor = 3e-5", "floor = 1.0", "floor=1.0 is above peak"),
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


def test_overrides_are_validated_like_the_file() -> None:
    run = runs.read(EXAMPLES[0])
    assert runs.changed(run, "x", steps=None, folder=None) == run
    assert runs.changed(run, "x", steps=7).steps == 7
    with pytest.raises(BadInput, match=r"x, with \{'steps': 0\} is not valid:\n  steps: "):
        runs.changed(run, "x", steps=0)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(BadInput, match=r"nowhere\.toml cannot be read: No such file"):
        runs.read("nowhere.toml")
