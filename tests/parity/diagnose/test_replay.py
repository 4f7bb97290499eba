"""What failed, by itself: the folder that a check leaves, and the script in it."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from jaxtwin.cli.main import app
from jaxtwin.configs import BadInput, Model
from jaxtwin.configs.spec import Run, to_json
from jaxtwin.jaxmodel.norm import RMSNorm
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.checkpoints.writers import write_pt
from jaxtwin.parity.compare import curves, failure_details
from jaxtwin.parity.diagnose import replay
from jaxtwin.parity.report.results import Check, Divergence, Point, Report
from jaxtwin.parity.selftest.kill_table import TOKENS
from jaxtwin.parity.selftest.tiny_models import shapes, weights
from jaxtwin.parity.sides.inputs import check_inputs
from jaxtwin.parity.sides.runs import Reference, Subject, faulty_decoder
from jaxtwin.parity.table.tensors import Tensor, Tensors
from jaxtwin.tests.helpers.levels import full, slow

SPEC = replace(shapes()["pre-norm"], runs=(replace(shapes()["pre-norm"].runs[0], repeats=2),))
SANDWICH = replace(shapes()["sandwich"], runs=(replace(shapes()["sandwich"].runs[0], repeats=1),))
WEIGHTS = weights(SPEC, 3)


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """64 bits, and the settings as they were afterwards: a script run in this process sets them."""
    before = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before[0])
    jax.config.update("jax_default_matmul_precision", before[1])


def explained(folder: Path, spec: Model, tensors: Tensors) -> Report:
    """What a check with a reference of SPEC and WEIGHTS finds in a JAX side of these."""
    given = check_inputs(SPEC, TOKENS, 3)
    subject = faulty_decoder(spec, tensors, given, None)
    report = Report([Check("logits", "float64", 1.0, 0.0)])
    decoder_check.explain(report, Reference(SPEC, WEIGHTS, given), subject, folder)
    return report


def dst(script: Path) -> int:
    """The exit status of the script, run in this process."""
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(script), run_name="__main__")
    return int(done.value.code or 0)


def alone(script: Path, *python: str) -> tuple[int, str]:
    """Run in a process of its own, from elsewhere."""
    words = [sys.executable, *(python or (str(script),))]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def printed(text: str) -> float:
    found = re.search(r"relative L2 (\S+),", text)
    assert found, text
    return float(found[1])


# ---- three mistakes -----------------------------------------------------------------------------


def other_base() -> tuple[Model, Tensors]:
    block = SPEC.runs[0].blocks[0]
    assert block.attn.rope is not None
    attn = replace(block.attn, rope=replace(block.attn.rope, base=500.0))
    return replace(SPEC, runs=(Run(blocks=(replace(block, attn=attn),), repeats=2),)), WEIGHTS


def other_eps() -> tuple[Model, Tensors]:
    norm = SPEC.norm
    assert norm is not None
    return replace(SPEC, norm=replace(norm, eps=2e-3)), WEIGHTS


def other_element() -> tuple[Model, Tensors]:
    down = WEIGHTS["layers.1.ffn.down.weight"].read().copy()
    down[5, 3] += 1e-6
    return SPEC, {**WEIGHTS, "layers.1.ffn.down.weight": Tensor.of(down)}


@pytest.mark.parametrize(
    ("make", "part", "weight"),
    [
        full(other_base, "layers.0.attn.q", ["layers.0.attn.q.weight"]),
        slow(other_eps, "norm", ["norm.weight"]),
        full(
            other_element,
            "layers.1.ffn",
            [f"layers.1.ffn.{w}.weight" for w in ("down", "gate", "up")],
        ),
    ],
)
def test_a_mistake_is_reproduced_alone_and_is_gone_once_mended(
    tmp_path: Path, make: Any, part: str, weight: list[str]
) -> None:
    report = explained(tmp_path / "out", *make())
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name == part
    assert sorted(p.name for p in folder.iterdir()) == [
        "expected.safetensors", "input.safetensors", "replay.py", "spec.json", "weights.safetensors"
    ]  # fmt: skip
    assert sorted(load_file(folder / "weights.safetensors")) == weight
    given = set(load_file(folder / "input.safetensors"))
    assert len(given - {"ids", "positions", "segments"}) == 1
    (point,) = [p for p in report.points if (p.probe, p.direction) == (part, "forward")]
    status, said = alone(folder / "replay.py")
    assert status == 1
    assert printed(said) == pytest.approx(point.local_error, rel=1e-5)
    assert f"{point.local_error:.6e}" in (folder / "replay.py").read_text()
    assert "WRONG\nlargest at b " in said

    (folder / "spec.json").write_text(json.dumps(to_json(SPEC)))
    save_file({n: t.read() for n, t in WEIGHTS.items()}, folder / "weights.safetensors")
    assert dst(folder / "replay.py") == 0


def test_where_the_error_is_largest_and_that_torch_is_not_needed(tmp_path: Path) -> None:
    explained(tmp_path / "out", *other_eps())
    folder = tmp_path / "out" / "norm"
    want = load_file(folder / "expected.safetensors")["norm"].copy()
    want[1, 7, 5] += 3.0
    save_file({"norm": want}, folder / "expected.safetensors")
    script = folder / "replay.py"
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(script)!r})"
    status, said = alone(script, "-c", code)
    assert status == 1
    assert "largest at b 1, t 7, d 5: " in said


# ---- every part, both ways ----------------------------------------------------------------------


def run_of(spec: Model) -> tuple[Subject, Any, Any]:
    given, tensors = check_inputs(spec, TOKENS, 3), weights(spec, 3)
    truth = Reference(spec, tensors, given).run()
    return faulty_decoder(spec, tensors, given, None), given, truth


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, SANDWICH], ids=["pre-norm, tied", "sandwich, untied"])
def test_every_value_cotangent_and_gradient_is_right_alone(tmp_path: Path, spec: Model) -> None:
    """What each is computed from is known, and is all of it: else it would be wrong by far."""
    subject, given, truth = run_of(spec)
    zeros: curves.Errors = {
        d: dict.fromkeys(getattr(truth, curves.PICK[d]), 1.0) for d in curves.PICK
    }
    points = curves.points(zeros, [zeros], truth, "float64")
    assert len(points) == sum(map(len, zeros.values()))
    none = []
    for point in points:
        folder = tmp_path / replay.label(point)
        args = (subject.spec, subject.weights, given, truth, Report(points=[point]))
        replay.save(folder, *args)
        if not folder.exists():
            none.append((point.probe, point.direction))
            continue
        assert dst(folder / folder.name / "replay.py") == 0, point
    assert none == [("head", "backward")]  # the loss makes it


def stopped(x: Any) -> Any:
    return jax.lax.stop_gradient(x)


def test_a_mistake_in_the_code_and_in_the_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mended in jaxmodel, the same script is content."""
    right = RMSNorm.__call__

    def wrong(self: Any, x: Any) -> Any:
        y = right(self, x)
        return y + 0.5 * (x - stopped(x))  # the same value, another derivative

    monkeypatch.setattr(RMSNorm, "__call__", wrong)
    report = explained(tmp_path / "out", SPEC, WEIGHTS)
    assert all(p.ok for p in report.points if p.direction == "forward")
    folder = tmp_path / "out" / "layers.1.out.backward"  # what reaches it through the final norm
    assert folder.is_dir()
    (point,) = [p for p in report.points if (p.probe, p.direction) == ("layers.1.out", "backward")]
    assert f"{point.local_error:.6e}" in (folder / "replay.py").read_text()
    assert not point.ok
    assert dst(folder / "replay.py") == 1
    monkeypatch.setattr(RMSNorm, "__call__", right)
    assert dst(folder / "replay.py") == 0


# ---- which parts --------------------------------------------------------------------------------


def point(probe: str, direction: str = "forward", local_error: float = 1.0) -> Point:
    layer = int(probe.split(".")[1]) if probe.startswith("layers") else None
    part = probe.split(".", 2)[2] if layer is not None else probe
    return Point(probe, layer, part, direction, "float64", 1.0, local_error, 0.0, 1e-13)


def test_the_first_divergence_and_one_for_each_divergence() -> None:
    points = [
        point("embed", local_error=0.0),
        point("layers.0.attn.v"),
        point("layers.1.attn.q"),
        point("layers.1.ffn"),
        point("layers.2.attn.q"),
        point("layers.2.ffn"),
        point("norm"),
        replace(point("embed"), dtype="float32"),
        point("embed", "backward"),
        point("norm", "backward"),
        point("embed.weight", "parameter"),
    ]
    divergences = [
        Divergence("attn.q", (1, 2), "forward", 1.0, None),
        Divergence("ffn.down.weight", (2,), "preflight", 1.0, None),
        Divergence("norm", (), "backward", 1.0, None),
        Divergence("cache", (), "forward", 1.0, None),
    ]
    report = Report(points=points, divergences=divergences)
    labels = [replay.label(p) for p in failure_details.chosen(report)]
    assert labels == ["layers.0.attn.v", "layers.1.attn.q", "layers.2.ffn", "norm.backward"]
    assert [p.probe for p in failure_details.chosen(Report(points=points[-3:]))] == [
        "norm"
    ]  # going back
    assert failure_details.chosen(Report(points=points[:1])) == []


# ---- bad input ----------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> str:
        raise KeyError

    monkeypatch.setattr(replay, "script", fail)
    with pytest.raises(KeyError):
        explained(tmp_path / "new" / "out", *other_eps())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_fit_is_told(tmp_path: Path) -> None:
    explained(tmp_path / "out", *other_eps())
    folder = tmp_path / "out" / "norm"
    save_file({"norm.weight": np.ones(3)}, folder / "weights.safetensors")
    with pytest.raises(
        BadInput, match=r"weights.*: 'norm.weight' has the shape \(3,\), expected \(16"
    ):
        replay.opened(folder, "norm", "forward")
    save_file({"other": np.ones(3)}, folder / "weights.safetensors")
    with pytest.raises(BadInput, match=r"weights.* has no 'norm.weight'; it holds other"):
        replay.opened(folder, "norm", "forward")
    (folder / "weights.safetensors").write_text("no tensors")
    with pytest.raises(BadInput, match=r"weights.safetensors cannot be read"):
        replay.opened(folder, "norm", "forward")
    (folder / "spec.json").write_text("{")
    with pytest.raises(BadInput, match=r"spec.json cannot be read"):
        replay.opened(folder, "norm", "forward")


# ---- the front door -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_pt(folder / "right.pt", SPEC, WEIGHTS, {})
    write_pt(folder / "wrong.pt", *other_element(), {})
    return folder


def check(files: Path, src: str, *more: object) -> Result:
    words = ["check", files / src, "--tokens", 16, "--layout", "unroll", "--dtype", "float64"]
    return CliRunner().invoke(app, list(map(str, [*words, *more])))


@pytest.mark.slow
def test_the_check_writes_the_folder_and_says_how_to_run_it(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "replay"
    done = check(files, "right.pt", "--against", files / "wrong.pt", "--json", "--replay", out)
    assert done.exit_code == 1, done.output
    assert [p.name for p in out.iterdir()] == ["layers.1.ffn"]
    script = out / "layers.1.ffn" / "replay.py"
    notes = json.loads(done.stdout)["notes"]
    assert f"to run what failed by itself: python {script}" in notes
    assert dst(script) == 1


def test_equal_models_leave_no_folder(files: Path, tmp_path: Path) -> None:
    done = check(files, "right.pt", "--replay", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert list(tmp_path.iterdir()) == []
    assert "replay" not in done.stdout


def test_a_taken_folder_and_no_float64_are_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    for more, said in (
        ((tmp_path,), "exists and is not empty"),
        ((tmp_path / "new", "--dtype", "float32"), "--replay needs the comparison in float64"),
    ):
        words = ["check", "no-such-model", "--replay", *map(str, more)]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2
        assert said in done.stderr.replace("\n", " ")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_what_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    failed = Report([Check("decode", "float64", 1.0, 0.0)])
    given = check_inputs(SPEC, TOKENS, 3)
    replay.save(tmp_path / "out", SPEC, {}, given, None, failed)  # type: ignore[arg-type]
    (note,) = replay.notes(tmp_path / "out", failed)
    assert note.startswith("no replay: no part is off in float64")
    assert not (tmp_path / "out").exists()
