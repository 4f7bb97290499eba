"""What each side computes with: equal by default, and every flag that is flipped is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jaxtwin
from jaxtwin.configs import PRESETS
from jaxtwin.jaxmodel.attention import Attention
from jaxtwin.jaxmodel.position import Rotary
from jaxtwin.parity.check import decoder_check
from jaxtwin.parity.compare import decoder_settings
from jaxtwin.parity.report import results
from jaxtwin.parity.report.results import Difference, Report
from jaxtwin.parity.selftest.faults import FAULTS
from jaxtwin.parity.sides import runs, settings
from jaxtwin.parity.sides.inputs import check_inputs
from jaxtwin.parity.sides.runs import InjectedFault
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.tests.helpers.kit import torch_model

TINY = PRESETS["reference-tiny"]
WEIGHTS = {n: Tensor.of(x.numpy()) for n, x in torch_model(TINY).state_dict().items()}
X = np.random.default_rng(0).normal(size=(5, 3))


def product() -> Any:
    return jnp.ones((2, 2)) @ jnp.ones((2, 2))


def told(dtype: str = "float32", *, model: Any = None, dst: Any = None, **how: Any) -> Any:
    """What differs between a small torch module and a JAX function, each as it is."""
    kind = getattr(torch, dtype)
    model = torch.nn.Linear(2, 2).to(kind).eval() if model is None else model
    with settings.Calls() as calls:
        model(torch.ones(1, 2, dtype=next(model.parameters()).dtype))
    wide, precision = how.pop("x64", dtype == "float64"), how.pop("precision", "highest")
    with jax.enable_x64(wide), jax.default_matmul_precision(precision):
        parameters = [jnp.ones(1, how.pop("parameters", dtype))]
        jaxs = settings.jax_side(parameters, dst or product, how.pop("module", None))
    torchs = settings.torch_side(model, calls)
    return settings.differences({**torchs, **how}, jaxs, dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_as_they_come_nothing_differs(dtype: str) -> None:
    matrix = jnp.ones((2, 2), dtype) if dtype != "float64" else None
    dst = None if matrix is None else lambda: matrix @ matrix
    assert told(dtype, dst=dst) == []


# ---- torch --------------------------------------------------------------------------------------


@contextmanager
def flipped(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def called(set_to: Callable[[Any], None], value: Any, back: Any) -> Iterator[None]:
    set_to(value)
    try:
        yield
    finally:
        set_to(back)


CUDA = torch.backends.cuda.matmul
TORCH: dict[str, tuple[Callable[[], AbstractContextManager], str, str, str]] = {
    "high": (
        lambda: called(torch.set_float32_matmul_precision, "high", "highest"),
        "float32 matmul precision",
        "high (TF32 on CUDA)",
        "torch.set_float32_matmul_precision('highest')",
    ),
    "tf32": (
        lambda: flipped(CUDA, "allow_tf32", True),
        "float32 matmul precision",
        "high (TF32 on CUDA)",
        "torch.set_float32_matmul_precision('highest')",
    ),
    "onednn": (
        lambda: flipped(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        "float32 matmuls of oneDNN",
        "bf16",
        "'ieee'",
    ),
    "autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16),
        "autocast",
        "bfloat16",
        "leave torch.autocast",
    ),
    "default": (
        lambda: called(torch.set_default_dtype, torch.float64, torch.float32),
        "default dtype",
        "float64",
        "set torch's back to float32",
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_a_flag_of_torch(name: str) -> None:
    flip, what, value, advice = TORCH[name]
    model = torch.nn.Linear(2, 2)
    with flip():
        found = told(model=model)
        if name != "default":
            assert told("float64") == []  # which it does not touch
    (difference,) = [d for d in found if "oneDNN" not in d.what or name == "onednn"]
    assert difference.what == f"setting: {what}"
    assert difference.torch == value
    assert advice in difference.about
    assert told() == []


def test_reductions_in_reduced_precision_matter_on_cuda() -> None:
    half = lambda: jnp.ones((2, 2), jnp.bfloat16) @ jnp.ones((2, 2), jnp.bfloat16)  # noqa: E731
    (found,) = told("bfloat16", dst=half, device=["cuda"])
    assert found.what == "setting: reductions in reduced precision"
    assert "allow_bf16_reduced_precision_reduction = False" in found.about
    with flipped(CUDA, "allow_bf16_reduced_precision_reduction", False):
        assert told("bfloat16", dst=half, device=["cuda"]) == []
    (cudnn,) = told(device=["cuda"])
    assert cudnn.what == "setting: TF32 in cuDNN"
    with flipped(torch.backends.cudnn, "allow_tf32", False):
        assert told(device=["cuda"]) == []


def test_accumulation_in_float16() -> None:
    half = lambda: jnp.ones((2, 2), jnp.float16) @ jnp.ones((2, 2), jnp.float16)  # noqa: E731
    assert told("float16", dst=half) == []
    found = told("float16", dst=half, fp16_accumulation=True)
    assert [d.what for d in found] == ["setting: float16 accumulation"]


def test_flags_that_change_no_digit_are_recorded() -> None:
    linear = torch.nn.Linear(2, 2)
    before = settings.torch_side(linear)
    assert not before["deterministic"]
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)
    try:
        after = settings.torch_side(linear)
        assert told() == []
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_flush_denormal(False)
    assert after["deterministic"]
    assert (before["subnormals"], after["subnormals"]) == ("kept", "flushed to zero")


def test_a_torch_module_that_is_training() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    (found,) = told(model=model)
    assert (found.what, found.torch, found.jax) == ("setting: training mode", "1", "off")
    assert told(model=model.eval()) == []
    assert told(model=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))) == []


def test_narrow_parameters_and_operands() -> None:
    found = told(model=torch.nn.Linear(2, 2).bfloat16())
    assert [(d.what, d.torch, d.jax) for d in found] == [
        ("setting: dtypes of the parameters", "bfloat16", "float32"),
        ("setting: matmul operands", "bfloat16", "float32"),
    ]


def test_attention_that_torch_fuses() -> None:
    class Attends(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = super().forward(x)[None, None]
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    with torch.no_grad():
        (found,) = told(model=Attends(2, 2))
    assert found.what == "setting: attention implementation"
    assert found.torch.startswith("scaled_dot_product")
    assert found.jax == "written out"


# ---- JAX ----------------------------------------------------------------------------------------


def test_a_lower_precision_asked_of_jax() -> None:
    (found,) = told(precision="bfloat16")
    assert (found.what, found.torch, found.jax) == (
        "setting: float32 matmul precision", "highest", "bfloat16",
    )  # fmt: skip
    assert found.about.endswith("set jax.default_matmul_precision('highest')")
    assert told("float64", precision="bfloat16") == []


def test_a_lower_precision_within_the_function() -> None:
    x = jnp.ones((2, 2))
    low = jax.jit(lambda: jnp.matmul(x, x, precision="high"))
    (found,) = told(dst=low)
    assert (found.what, found.jax) == ("setting: float32 matmul precision", "high")


def test_both_sides_lower_is_told_too() -> None:
    with called(torch.set_float32_matmul_precision, "medium", "highest"):
        found = told(precision="high")
    assert (found[0].torch, found[0].jax) == ("medium (TF32 on CUDA)", "high")
    assert "set_float32_matmul_precision('highest') and jax.default" in found[0].about


def test_the_default_precision_is_low_off_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(precision=None) == []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    (found,) = told(precision=None)
    assert (found.what, found.jax) == ("setting: float32 matmul precision", "default")
    assert told() == []


def test_64_bits_that_jax_drops() -> None:
    found = told("float64", x64=False, parameters="float32")
    assert found[0] == Difference(
        "setting", "64-bit types", "on", "off",
        "JAX narrows to float32 without a word; set JAX_ENABLE_X64=1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "low"),
    [
        ("--xla_cpu_enable_fast_math=true", True),
        ("--xla_cpu_enable_fast_math", True),
        ("--xla_cpu_enable_fast_math=false", False),
        ("--xla_cpu_fast_math_honor_nans=false", True),
        ("--xla_cpu_fast_math_honor_nans=true", False),
        ("--xla_allow_excess_precision=true", False),
    ],
)
def test_xla_flags(flags: str, low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)  # read when JAX starts: nothing is changed by it here
    found = told()
    assert [d.what for d in found] == ["setting: fast math"] * low
    assert settings.jax_side([])["xla_flags"] == [flags.removeprefix("--")]


def test_tf32_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert told() == []
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert [d.what for d in told()] == ["setting: NVIDIA_TF32_OVERRIDE"]


def test_a_jax_module_that_is_training() -> None:
    class Drops(nnx.Module):
        def __init__(self) -> None:
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    module = Drops()
    (found,) = told(module=module)
    assert (found.what, found.torch, found.jax) == ("setting: training mode", "off", "drop, norm")
    module.eval()
    assert told(module=module) == []


def test_narrow_operands_within_the_function() -> None:
    x = jnp.ones((2, 2), jnp.bfloat16)
    (found,) = told(dst=lambda: jax.lax.scan(lambda c, _: (c @ x, None), x, None, 2))
    assert (found.what, found.jax) == ("setting: matmul operands", "bfloat16")


def test_attention_that_jax_fuses() -> None:
    @jax.jit
    def flash_attention() -> Any:
        return product()

    (found,) = told(dst=flash_attention)
    assert (found.what, found.jax) == ("setting: attention implementation", "flash_attention")


# ---- a decoder ----------------------------------------------------------------------------------


def of_fault(wrong: InjectedFault, layout: str = "scan", remat: str = "none") -> list[Difference]:
    report, given = Report(), check_inputs(TINY, 64, 0)
    read = decoder_settings.Sides(given, report)
    read.torch("float32")(runs.torch_model(TINY, WEIGHTS, "float32"))
    with jax.default_matmul_precision("highest"):
        model = runs.jax_model(TINY, WEIGHTS, "float32", layout, wrong, remat)
        read.jax("float32", model)
    assert "positions" in report.environment["settings"]["float32"]["jax"]
    return report.preflight


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("layout", ["scan", "unroll"])
def test_masks_positions_and_scalars(layout: str, remat: str) -> None:
    before = (Attention.__call__, Rotary.__call__)
    assert of_fault(InjectedFault(), layout, remat) == []
    (mask,) = of_fault(FAULTS["not-causal"], layout, remat)
    assert (Attention.__call__, Rotary.__call__) == before
    segments = check_inputs(TINY, 64, 0).segments
    pairs = np.tril(segments[:, :, None] == segments[:, None, :])
    seen, every = int(pairs.sum()), pairs.size
    assert (mask.what, mask.torch) == ("setting: attention mask", f"{seen} pairs seen")
    assert mask.jax == f"{every} pairs seen"
    first = "the first at sequence 0, token 0, key token 1"
    assert mask.about == f"{every - seen} of {every} pairs differ, {first}"
    (positions,) = of_fault(FAULTS["position-from-one"], layout, remat)
    assert positions.what == "setting: rotary positions"
    assert positions.about.startswith(f"{segments.size} of {segments.size} positions differ")
    (eps, _) = of_fault(FAULTS["norm-eps"], layout, remat)
    assert (eps.what, eps.torch) == ("setting: layers.{0..2}.pre_attn.eps", "1e-06")
    (base,) = of_fault(FAULTS["rope-base"], layout, remat)
    assert base.what == "setting: layers.{0..2}.attn.rotate.frequency"
    assert base.about == "the first that differs is pair 1"


@pytest.mark.slow
def test_a_check_says_it_first_and_is_provisional() -> None:
    with flipped(CUDA, "allow_tf32", True):
        report = decoder_check.check(TINY, WEIGHTS, dtypes=("float64", "float32"), tokens=32)
    assert report.equal
    assert report.provisional
    assert [d.what for d in report.preflight] == ["setting: float32 matmul precision"]
    said = "; provisional: the sides differ before any run (setting: float32 matmul precision)"
    assert results.verdict(report).endswith(said)
    settled = report.environment["settings"]
    assert settled["float32"]["torch"]["tf32_cuda_matmul"] is True
    assert settled["float32"]["jax"]["dots"] == ["highest"]
    assert settled["float64"]["jax"]["matmuls"] == ["float64"]


# ---- bring your own -----------------------------------------------------------------------------


def compared(theirs: torch.nn.Module, **how: Any) -> Report:
    params = {"w": theirs[0].weight.detach().numpy().T, "b": theirs[0].bias.detach().numpy()}
    table = [Row("w", "0.weight", "o i -> i o"), Row("b", "0.bias", "o -> o")]
    ours = how.pop("ours", lambda p, x: x @ p["w"] + p["b"])
    return jaxtwin.compare(theirs, ours, table, [X], params=params, jit=False, **how)


def test_a_module_given_in_training_mode_is_noted() -> None:
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.1))
    report = compared(theirs)
    assert report.equal
    assert not report.preflight
    assert report.notes == [
        "the torch module was in training mode, with 1: a copy was compared in eval mode"
    ]
    assert not compared(theirs.eval()).notes
    assert theirs[1].training is False


def test_a_flag_in_a_comparison_of_ones_own() -> None:
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 2))
    with torch.autocast("cpu", torch.bfloat16):
        report = compared(theirs)
    assert report.provisional
    assert [d.what for d in report.preflight] == ["setting: autocast"]

    def narrow(p: Any, x: Any) -> Any:
        half = jnp.bfloat16
        return (x.astype(half) @ p["w"].astype(half)).astype(x.dtype) + p["b"]

    found = compared(theirs, ours=narrow)
    assert not found.equal
    assert found.preflight[0].what == "setting: matmul operands"
    assert not [s for s in found.divergences if s.direction == "preflight"]
