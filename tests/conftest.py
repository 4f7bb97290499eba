"""What every test stands on. It runs before jax, torch or a room of ours is imported."""

from __future__ import annotations

import os
import resource
import sys

# The simulated devices share this machine's few cores, so a collective among eight of them can
# outlast XLA's own time limits, which abort the process.
_XLA = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "xla_cpu_collective_call_terminate_timeout_seconds": 280,
    "xla_cpu_collective_timeout_seconds": 280,
}
_given = os.environ.get("XLA_FLAGS", "")
_wanted = [f"--{flag}={seconds}" for flag, seconds in _XLA.items() if flag not in _given]
os.environ["XLA_FLAGS"] = " ".join([_given, *_wanted]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: one torch thread each
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

assert not {"jax", "torch", "jaxtwin.jaxmodel", "jaxtwin.torchref"} & sys.modules.keys(), (
    "imported too early"
)

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)

# The shapes in the signatures of both mirrors are checked at every call, under test only.
jaxtyping.install_import_hook(["jaxtwin.jaxmodel", "jaxtwin.torchref"], "beartype.beartype")

# The same examples in every run; `--hypothesis-profile=wander` looks for new ones.
_always = {"deadline": None, "database": None, "print_blob": True}
_slow_inputs = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile(
    "steady", derandomize=True, suppress_health_check=_slow_inputs, **_always
)
hypothesis.settings.register_profile("wander", suppress_health_check=_slow_inputs, **_always)
hypothesis.settings.load_profile("steady")

from jaxtwin.configs.memory import give_back  # noqa: E402
from jaxtwin.tests.helpers.kit import GOLDEN, Golden  # noqa: E402
from jaxtwin.tests.helpers.levels import slow  # noqa: E402


@pytest.fixture
def x64() -> Iterator[None]:
    """JAX with 64-bit types, for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session", params=[GOLDEN[0], slow(GOLDEN[1])])
def golden(request: pytest.FixtureRequest) -> Golden:
    """Each recorded model in turn."""
    return Golden.load(request.param)


@pytest.fixture(scope="module", autouse=True)
def spared() -> Iterator[None]:
    """What JAX has compiled for one file's models is of no use to the next, and grows to GBs."""
    yield
    pages = Path("/proc/self/statm")
    if pages.exists() and int(pages.read_text().split()[1]) * resource.getpagesize() > 3e9:
        jax.clear_caches()
        give_back()
