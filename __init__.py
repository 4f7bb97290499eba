"""The same decoder in PyTorch and in JAX: converted without a changed bit, and proven equal.

The public names, each of which imports what it needs when it is used:

    load, save, convert, generate, fit      a model, from any source to any target
    adopt, release                          a state dict under names of your own, and back
    check, compare, assert_parity, probe    are two models the same, and if not, where and why
    register_activation, register_norm      a part of your own, for both
    Row                                     one parameter's two names, and how its axes move
    specs                                   the classes that a model is described with
"""

from typing import TYPE_CHECKING, Any

from jaxtwin.api import (
    adopt,
    assert_parity,
    check,
    compare,
    convert,
    fit,
    generate,
    load,
    probe,
    register_activation,
    register_norm,
    release,
    save,
)

if TYPE_CHECKING:
    __version__: str
    from jaxtwin.configs import spec as specs
    from jaxtwin.parity.table.row import Row

__all__ = [
    "Row",
    "adopt",
    "assert_parity",
    "check",
    "compare",
    "convert",
    "fit",
    "generate",
    "load",
    "probe",
    "register_activation",
    "register_norm",
    "release",
    "save",
    "specs",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("jaxtwin")
    if name == "Row":
        from jaxtwin.parity.table.row import Row

        return Row
    if name == "specs":
        from jaxtwin.configs import spec

        return spec
    raise AttributeError(f"module 'jaxtwin' has no attribute {name!r}")
