"""What conftest.py sets up for every test is so."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest


def test_eight_devices() -> None:
    assert jax.device_count() == 8
    assert {device.platform for device in jax.devices()} == {"cpu"}


def test_collectives_may_wait() -> None:
    flags = dict(flag.split("=") for flag in os.environ["XLA_FLAGS"].split() if "=" in flag)
    for name in ("call_warn_stuck", "call_terminate", ""):
        name = f"--xla_cpu_collective_{name}_timeout_seconds".replace("__", "_")
        assert int(flags[name]) >= 100


def test_a_flag_that_xla_does_not_know_aborts() -> None:
    """So the flags above are ones that it knows."""
    env = os.environ | {"XLA_FLAGS": "--xla_cpu_no_such_flag=1"}
    code = "import jax; jax.devices()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert "Unknown flag" in done.stderr


def test_no_hub_is_asked() -> None:
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE


def test_one_torch_thread_for_each_worker() -> None:
    import torch

    if "PYTEST_XDIST_WORKER" in os.environ:
        assert torch.get_num_threads() == 1


def test_x64_is_for_one_test(x64: None) -> None:
    assert jax.numpy.zeros(1).dtype == "float64"


def test_without_x64_there_is_none() -> None:
    assert jax.numpy.zeros(1).dtype == "float32"


def test_our_own_deprecations_are_errors() -> None:
    import warnings

    with pytest.raises(DeprecationWarning):
        warnings.warn_explicit("old", DeprecationWarning, "x.py", 1, module="jaxtwin.jaxmodel.norm")
