"""The command line: what it prints, the JSON it promises, and what a mistake gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from jaxtwin.cli import around
from jaxtwin.cli.main import app
from jaxtwin.tests.helpers import ROOT
from jaxtwin.tests.helpers.kit import DATA
from jaxtwin.tests.helpers.levels import slow

GOLDEN = str(DATA / "reference_mqa_untied.npz")


def run(*words: str, status: int = 0) -> Result:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result


def refused(*words: str) -> str:
    """The one message of a call that must fail as bad input does."""
    result = run(*words, status=2)
    assert "Traceback" not in result.output
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return result.stderr[result.stderr.index("error: ") :]


def test_help_imports_no_framework() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from jaxtwin.cli.main import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print([m for m in ('jax', 'torch', 'transformers', 'flax', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", ["convert", "check", "generate", "inspect", "train", "demo"])
def test_every_verb_has_examples(verb: str) -> None:
    out = run(verb, "--help").output
    assert "Examples" in out
    assert f"jaxtwin {verb} " in out or f"jaxtwin {verb}\n" in out


def test_inspect_counts_the_reference() -> None:
    facts = json.loads(run("inspect", "reference-100m", "--json").stdout)
    assert facts["parameters"] == {
        "total": 100_092_672,
        "decayed": 100_073_472,
        "not_decayed": 19_200,
    }
    assert facts["bytes"] == {"weights": 400_370_688, "kv_cache_per_token": 2 * 4 * 64 * 12 * 4}


def test_inspect_for_people() -> None:
    out = run("inspect", "reference-100m").stdout
    assert "100,092,672" in out
    assert "adjacent" in out


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads(run("check", GOLDEN, "--json").stdout)


def test_check_meets_the_record_and_transformers(golden: dict) -> None:
    assert golden["equal"] is True
    names = [check["name"] for check in golden["checks"]]
    for start in ("recorded, torch: ", "recorded, JAX: ", "transformers: "):
        for what in ("logits", "loss, per target", "grad embed.weight", "grad head.weight"):
            assert start + what in names
    generated = [name for name in names if "tokens that differ" in name]
    assert len(generated) == 6
    assert golden["environment"]["source"]["kind"] == "golden"
    bounds = {c["name"]: c["budget"] for c in golden["checks"] if c["dtype"] == "float64"}
    assert bounds["logits"] == bounds["recorded, JAX: logits"] == 1e-13
    assert bounds["grad head.weight"] == 1e-12


@pytest.mark.parametrize(
    ("key", "name"),
    [
        slow("logits", "recorded, JAX: logits"),
        pytest.param("loss", "recorded, JAX: loss, per target", marks=pytest.mark.slow),
        pytest.param(
            "grad/blocks.1.attn.k.weight",
            "recorded, JAX: grad layers.1.attn.k.weight",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "generate/greedy8_with_eos",
            "recorded, JAX: greedy8_with_eos, tokens that differ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_check_of_a_record_that_is_off_says_not_equal(tmp_path: Path, key: str, name: str) -> None:
    with np.load(GOLDEN) as file:
        arrays = {k: file[k] for k in file.files}
    off = arrays[key].copy()
    if off.dtype == np.float64:
        off[...] *= 1 + 1e-11
    else:
        off[0, -1] += 1
    path = tmp_path / "off.npz"
    np.savez(path, **{**arrays, key: off})
    result = run("check", str(path), "--dtype", "float64", "--json", status=1)
    report = json.loads(result.stdout)
    assert report["equal"] is False
    bad = {check["name"] for check in report["checks"] if not check["ok"]}
    beside = {f"{name}, worst token"} if key == "logits" else set()
    both = {name, *beside}
    assert bad == both | {one.replace("JAX", "torch") for one in both}


def test_check_for_people() -> None:
    out = run("check", GOLDEN, "--dtype", "float64", "--no-witness").stdout
    assert "EQUAL: all" in out
    assert "no third witness: turned off" in " ".join(out.split())


def test_generate_from_ids() -> None:
    with np.load(GOLDEN) as file:
        want = file["generate/greedy8_from_first4"][0].tolist()
    prompt = ",".join(map(str, want[:4]))
    words = ("generate", GOLDEN, "--ids", prompt, "--tokens", "8", "--dtype", "float64")
    answer = json.loads(run(*words, "--json").stdout)
    assert answer["new_ids"] == want[4:]
    assert run(*words).stdout.strip() == ",".join(map(str, want[4:]))


def test_convert_there_and_back(tmp_path: Path) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back.pt"
    one = json.loads(run("convert", GOLDEN, str(ours), "--to", "jax", "--json").stdout)
    two = json.loads(run("convert", str(ours), str(back), "--to", "torch", "--json").stdout)
    assert one["sha256"] == two["sha256"]
    assert len(one["sha256"]) == one["tensors"] == 2 * 9 + 3
    assert "tensors" in run("inspect", str(back)).stdout


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    out = run("convert", GOLDEN, str(tmp_path / "new"), "--to", "jax", "--dry-run").stdout
    for piece in ("blocks.{0..1}.attn.q.weight", "(n h) d -> d n h", "stack/runs/0/0/attn/q"):
        assert piece in out
    assert list(tmp_path.iterdir()) == []


MISTAKES = {
    "unknown name": (("check", "smollm2-136m"), "did you mean 'smollm2-135m'?"),
    "no such file": (("inspect", "nowhere/model.gguf"), "nowhere/model.gguf"),
    "prompt twice": (("generate", GOLDEN, "--ids", "1", "--prompt", "a"), "one of them"),
    "no prompt": (("generate", GOLDEN), "one of them"),
    "text without tokenizer": (("generate", GOLDEN, "--prompt", "a"), "without a tokenizer"),
    "ids that are none": (("generate", GOLDEN, "--ids", "1,x"), "whole numbers"),
    "id out of range": (("generate", GOLDEN, "--ids", "1,19"), "ids must be in 0 ... 18, got 19"),
    "negative id": (("generate", GOLDEN, "--ids", "-1"), "ids must be in 0 ... 18, got -1"),
    "too long": (("generate", GOLDEN, "--ids", ",".join("1" * 13)), "1 to 12 tokens long, got 13"),
    "top_k 0": (
        ("generate", GOLDEN, "--ids", "1", "--top-k", "0", "--temperature", "1"),
        "top_k must be in 1 ... 19",
    ),
    "top_k of a likeliest": (("generate", GOLDEN, "--ids", "1", "--top-k", "3"), "no effect"),
    "cold": (("generate", GOLDEN, "--ids", "1", "--temperature", "-1"), "temperature must be 0"),
    "fewer than none": (("generate", GOLDEN, "--ids", "1", "--tokens", "-1"), "new_tokens must"),
    "no run file": (("train", "nowhere.toml"), "nowhere.toml"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_gets_one_clear_message(mistake: str) -> None:
    words, said = MISTAKES[mistake]
    assert said in " ".join(refused(*words).split())


def test_mistake_in_json_is_an_object() -> None:
    result = run("inspect", "smollm2-136m", "--json", status=2)
    assert "smollm2-135m" in json.loads(result.stdout)["error"]


def test_target_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert str(tmp_path) in refused("convert", GOLDEN, str(tmp_path), "--to", "jax")
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_run_file_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    example = ROOT / "configs/runs/train-reference-tiny.toml"
    text = example.read_text().replace("seed = 0", "seed = 0\nsede = 1")
    (tmp_path / "run.toml").write_text(text)
    said = refused("train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out"))
    assert "sede" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("platform", ["nonsense", *map(slow, ("tpu", "cuda"))])
def test_a_backend_that_is_not_there(tmp_path: Path, platform: str) -> None:
    """JAX says so with a RuntimeError, or with an assertion and no word at all."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "jaxtwin",
            "convert",
            "smollm2-tiny",
            str(tmp_path / "x"),
            "--to=jax",
        ],
        env={**os.environ, "JAX_PLATFORMS": platform},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2, done.stderr
    assert f"error: JAX does not start with JAX_PLATFORMS={platform}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())


def test_progress_in_a_pipe_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 2.0, 11.0, 12.0])
    monkeypatch.setattr(around.time, "monotonic", lambda: next(clock))
    lines = around.Lines()
    for step in ("first", "held back", "note: always", "ten seconds on", "held back"):
        lines(step)
    assert capsys.readouterr().err == "... first\n... note: always\n... ten seconds on\n"
