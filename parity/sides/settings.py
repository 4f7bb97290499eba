"""What each side really computes with, read from the frameworks and the objects as they are.

A snapshot is a dict of plain values (docs/json.md lists them). `differences` says what of it is not
the same on both sides, or makes either side compute with fewer digits than the dtype compared.
What has no effect there (a CUDA flag in a comparison in float64) is recorded and not reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jaxtwin.parity.report.results import Difference, Report

if TYPE_CHECKING:
    import torch

Snapshot = dict[str, Any]
PLAIN = "written out"  # attention as matmuls and a softmax
FUSED = ("attention", "pallas", "flash")  # in the name of what is not


# ---- torch --------------------------------------------------------------------------------------


def torch_side(model: torch.nn.Module, called: Calls | None = None) -> Snapshot:
    """The flags of torch in force, and what the module carries.

    `called` is what was noted in a run; without one, matmuls and attention stay None.
    """
    import torch

    tensors = [*model.parameters(), *model.buffers()]
    kinds = sorted({t.device.type for t in tensors} or {"cpu"})
    cuda = torch.backends.cuda.matmul
    return {
        "device": kinds,
        "parameters": _names(p.dtype for p in model.parameters()),
        "default_dtype": _name(torch.get_default_dtype()),
        "training": model.training,
        "training_parts": training_parts(model),
        "autocast": next((a for kind in kinds if (a := _autocast(kind))), None),
        "matmul_precision": _matmul_precision(),
        "tf32_cuda_matmul": _tf32(cuda),
        "tf32_cudnn": _tf32(torch.backends.cudnn),
        "mkldnn_matmul": _onednn(),
        "fp16_reduced_reduction": bool(cuda.allow_fp16_reduced_precision_reduction),
        "bf16_reduced_reduction": bool(cuda.allow_bf16_reduced_precision_reduction),
        "fp16_accumulation": bool(cuda.allow_fp16_accumulation),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32_override": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        "subnormals": "kept" if float(torch.tensor(1e-38) * 0.1) else "flushed to zero",
        "matmuls": _names(called.dtypes) if called else None,
        "attention": (called.attention or PLAIN) if called else None,
    }


def _matmul_precision() -> str:
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set backend by backend, which torch refuses to sum up
        return torch.backends.cuda.matmul.fp32_precision


def _tf32(backend: Any) -> bool:
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        return bool(backend.fp32_precision == "tf32")


def _onednn() -> str:
    import torch

    backend: Any = torch.backends.mkldnn
    return str(backend.matmul.fp32_precision)


def _autocast(device: str) -> str | None:
    import torch

    return _name(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def training_parts(model: torch.nn.Module) -> list[str]:
    """Submodules that answer otherwise in training, and are in training mode: dropout and such."""
    from torch.nn.modules import batchnorm, dropout

    def random(m: Any) -> bool:
        if isinstance(m, dropout._DropoutNd):
            return m.p > 0
        share = getattr(m, "dropout", 0)  # of attention and recurrent layers: a number
        return isinstance(m, batchnorm._BatchNorm) or (isinstance(share, float | int) and share > 0)

    return [
        name or type(m).__name__ for name, m in model.named_modules() if m.training and random(m)
    ]


MATMULS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "dot"}


class Calls:
    """While open, notes the dtypes that torch's matmuls run in, and attention that is fused.

    They are seen below autocast and below what torch breaks up into other operations.
    """

    def __init__(self) -> None:
        self.dtypes: set[Any] = set()
        self.attention = ""

    def __enter__(self) -> Calls:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        calls = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
                name = f.overloadpacket.__name__
                fused = any(word in name for word in FUSED)
                if fused and "backward" not in name:
                    calls.attention = name.strip("_").removesuffix("_for_cpu")
                if fused or name in MATMULS:
                    of = {x.dtype for x in args if isinstance(x, torch.Tensor)}
                    calls.dtypes |= {dtype for dtype in of if dtype.is_floating_point}
                return f(*args, **(kw or {}))

        self.mode = Mode()
        self.mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)


# ---- JAX ----------------------------------------------------------------------------------------


def jax_side(
    parameters: Iterable[Any], apply: Callable[[], Any] | None = None, model: Any = None
) -> Snapshot:
    """JAX's configuration in force and, where given, the operations of `apply`, which is traced.

    `parameters` are arrays, `model` is a Flax NNX module with possible modes of its parts.
    """
    import jax
    import jax.numpy as jnp

    operations = list(_operations(jax.make_jaxpr(apply)().jaxpr)) if apply else None
    flags = [f.lstrip("-") for f in os.environ.get("XLA_FLAGS", "").split()]
    config: Any = jax.config  # its flags are made at run time
    promotion = config.jax_numpy_dtype_promotion
    tiny = jnp.float32(1e-38) * jnp.float32(0.1)
    return {
        "device": [jax.default_backend()],
        "parameters": _names(x.dtype for x in parameters),
        "default_dtype": _name(jnp.zeros(()).dtype),
        "training_parts": _nnx_training(model) if model is not None else [],
        "matmul_precision": config.jax_default_matmul_precision,
        "x64": bool(config.jax_enable_x64),
        "promotion": str(getattr(promotion, "value", promotion)),
        "jit": not config.jax_disable_jit,
        "xla_flags": sorted(f for f in flags if "timeout" not in f),
        "tf32_override": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        "subnormals": "kept" if float(tiny) else "flushed to zero",
        **({"matmuls": None, "attention": None, "dots": None} if operations is None else {}),
        **(_read(operations) if operations is not None else {}),
    }


def _operations(jaxpr: Any) -> Iterator[Any]:
    from jax.extend.core import jaxprs_in_params

    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _operations(inner)


def _read(operations: Sequence[Any]) -> Snapshot:
    """The operands' dtypes of all matmuls, their precisions, and how attention is done."""
    dots = [eqn for eqn in operations if eqn.primitive.name == "dot_general"]
    dtypes = {v.aval.dtype for eqn in dots for v in eqn.invars}
    named = [f"{eqn.primitive.name} {eqn.params.get('name', '')}" for eqn in operations]
    fused = [name.strip() for name in named if any(word in name for word in FUSED)]
    return {
        "matmuls": _names(d for d in dtypes if not np.issubdtype(d, np.integer)),
        "dots": sorted({_precision(eqn.params["precision"]) for eqn in dots}),
        "attention": fused[0].removeprefix("jit ").removeprefix("pjit ") if fused else PLAIN,
    }


def _precision(setting: Any) -> str:
    """One word: "highest", or the lower of the two operands'; "default" where none is set."""
    both = setting if isinstance(setting, tuple) else (setting,)
    words = [str(getattr(p, "name", p)).lower() for p in both]
    return next((w for w in words if w != "highest"), words[0]).replace("none", "default")


def _nnx_training(model: Any) -> list[str]:
    """Parts of an NNX module in training mode: dropout that draws, norms that update."""
    from flax import nnx

    def active(m: Any) -> bool:
        if getattr(m, "deterministic", True) is False:
            return getattr(m, "rate", getattr(m, "dropout_rate", 1.0)) > 0
        return getattr(m, "use_running_average", True) is False

    found = [("/".join(map(str, path)), m) for path, m in nnx.iter_modules(model)]
    return sorted(name or type(m).__name__ for name, m in found if active(m))


# ---- what differs -------------------------------------------------------------------------------

EXACT = {"highest", "float32", "ieee", "none"}
# Of JAX's matmuls; "high" is bfloat16 in three passes or TF32, "default" whatever is fastest.
EXACT_DOTS = {"highest", "float32", "f32_f32_f32", "f64_f64_f64"}
MEND_TORCH = "torch.set_float32_matmul_precision('highest')"
MEND_JAX = "jax.default_matmul_precision('highest')"


def differences(torch: Snapshot, jax: Snapshot, dtype: str) -> list[Difference]:
    """What is not the same in effect for a comparison in that dtype, the gravest first."""
    found: list[Difference] = []

    def tell(what: str, src: Any, dst: Any, about: str) -> None:
        found.append(Difference("setting", what, _text(src), _text(dst), about))

    _modes(torch, jax, tell)
    _dtypes(torch, jax, dtype, tell)
    if dtype == "float32":
        _precisions(torch, jax, tell)
    if dtype in ("float16", "bfloat16") and "cuda" in torch["device"]:
        key = "fp16_reduced_reduction" if dtype == "float16" else "bf16_reduced_reduction"
        if torch[key]:
            about = f"set torch.backends.cuda.matmul.allow_{key.split('_')[0]}"
            about += "_reduced_precision_reduction = False"
            tell("reductions in reduced precision", "allowed", "in float32", about)
    if dtype == "float16" and torch["fp16_accumulation"]:
        about = "set torch.backends.cuda.matmul.allow_fp16_accumulation = False"
        tell("float16 accumulation", "allowed", "in float32", about)
    fast = [f for f in jax["xla_flags"] if "fast_math" in f and _lowers(f)]
    if fast:
        about = "XLA may reorder and drop operations; take this out of XLA_FLAGS"
        tell("fast math", "off", ", ".join(fast), about)
    if None not in (torch["attention"], jax["attention"]) and (
        (torch["attention"] == PLAIN) != (jax["attention"] == PLAIN)
    ):
        about = "sums run in another order: equal in float64, other roundings in a working dtype"
        tell("attention implementation", torch["attention"], jax["attention"], about)
    return found


Tell = Callable[[str, Any, Any, str], None]


def _modes(torch: Snapshot, jax: Snapshot, tell: Tell) -> None:
    src, dst = torch["training_parts"], jax["training_parts"]
    if src or dst:
        about = "each run draws or updates something; call .eval() on that side"
        one, other = (", ".join(parts[:3]) if parts else "off" for parts in (src, dst))
        tell("training mode", one, other, about)


def _dtypes(torch: Snapshot, jax: Snapshot, dtype: str, tell: Tell) -> None:
    if torch["autocast"] and dtype != "float64":  # autocast leaves float64 alone
        about = f"torch's matmuls run in {torch['autocast']}; leave torch.autocast"
        tell("autocast", torch["autocast"], "off", about)
    if dtype == "float64" and not jax["x64"]:
        about = "JAX narrows to float32 without a word; set JAX_ENABLE_X64=1"
        tell("64-bit types", "on", "off", about)
    if torch["default_dtype"] != "float32":
        about = "a tensor made without a dtype is not of the same one; set torch's back to float32"
        # With 64-bit types JAX makes float64, which is right in a comparison in float64.
        if torch["default_dtype"] != jax["default_dtype"]:
            tell("default dtype", torch["default_dtype"], jax["default_dtype"], about)
    for key, what in (("parameters", "dtypes of the parameters"), ("matmuls", "matmul operands")):
        src, dst = torch[key] or [], jax[key] or []
        narrow = [[d for d in side if _bits(d) < _bits(dtype)] for side in (src, dst)]
        if any(narrow) and not (key == "matmuls" and torch["autocast"]):
            about = f"narrower than the {dtype} that is compared"
            tell(what, src or "not read", dst or "not read", about)


def _precisions(torch: Snapshot, jax: Snapshot, tell: Tell) -> None:
    """What makes float32 matmuls compute with fewer digits."""
    requested = jax["matmul_precision"]
    dots = [d for d in jax["dots"] or [] if d not in EXACT_DOTS]
    dst = requested or "default"
    if requested not in (None, *EXACT_DOTS):
        low = True
    elif dots and dots != ["default"]:  # set inside the function
        dst, low = ", ".join(dots), True
    else:  # on a CPU the default is exact
        low = (requested is None or bool(dots)) and jax["device"] != ["cpu"]
    src = torch["matmul_precision"]
    low_torch = src not in EXACT or torch["tf32_cuda_matmul"]
    src += " (TF32 on CUDA)" * torch["tf32_cuda_matmul"]
    if low or low_torch:
        mend = [MEND_TORCH] * low_torch + [MEND_JAX] * low
        about = f"float32 products lose digits where the device can; set {' and '.join(mend)}"
        tell("float32 matmul precision", src, dst, about)
    if torch["mkldnn_matmul"] not in EXACT and not low_torch:
        about = "set torch.backends.mkldnn.matmul.fp32_precision = 'ieee'"
        tell("float32 matmuls of oneDNN", torch["mkldnn_matmul"], dst, about)
    if torch["tf32_cudnn"] and "cuda" in torch["device"]:
        about = "convolutions lose digits; set torch.backends.cudnn.allow_tf32 = False"
        tell("TF32 in cuDNN", "allowed", dst, about)
    if jax["tf32_override"] == "1" or torch["tf32_override"] == "1":
        about = "NVIDIA's libraries use TF32 whatever is set; take NVIDIA_TF32_OVERRIDE away"
        tell("NVIDIA_TF32_OVERRIDE", torch["tf32_override"], jax["tf32_override"], about)


def _lowers(flag: str) -> bool:
    """Whether a flag "name=value" of XLA allows less: `honor` flags do when they are off."""
    name, _, value = flag.partition("=")
    on = value.lower() not in ("false", "0")
    return on != ("honor" in name)


def notes(model: torch.nn.Module) -> list[str]:
    """A note on a torch module that came in training mode."""
    if not model.training:
        return []
    parts = training_parts(model)
    held = f", with {', '.join(parts[:3])}" + (" and more" if parts[3:] else "") if parts else ""
    return [f"the torch module was in training mode{held}: a copy was compared in eval mode"]


def tell(report: Report, found: Sequence[Difference]) -> None:
    """Adds what is new to what the report says first; settings come before specs and weights."""
    known = {(d.what, d.torch, d.jax) for d in report.preflight}
    new = [d for d in found if (d.what, d.torch, d.jax) not in known]
    before = sum(d.kind == "setting" for d in report.preflight)
    report.preflight[before:before] = new


# ---- words --------------------------------------------------------------------------------------


def _names(dtypes: Iterable[Any]) -> list[str]:
    return sorted({_name(dtype) for dtype in dtypes})


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _bits(dtype: str) -> int:
    """Digits of a floating dtype; anything else has as many as can be."""
    try:
        return int(ml_dtypes.finfo(np.dtype(dtype)).nmant)
    except (TypeError, ValueError):
        return 99


def _text(x: Any) -> str:
    return ", ".join(map(str, x)) if isinstance(x, list) else str(x)
