"""The same model on both sides: converted without a changed bit, and proven equal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmodel import Decoder
    from parity.findings import Report
    from parity.table import Row


def load(src: str | os.PathLike[str], *, layout: str = "scan", dtype: Any = None) -> Decoder:
    """The model that SRC names (see `parity.source`), in JAX, in its own dtype unless given.

    Needs torch only where SRC is a torch file.
    """
    from parity.convert import decoder
    from parity.source import open_source

    return decoder(open_source(src), layout=layout, dtype=dtype)


def check(src: str | os.PathLike[str], **how: Any) -> Report:
    """Is the JAX model the PyTorch model? See `parity.proof.check`; `.equal` is the answer."""
    from parity.proof import check

    return check(os.fspath(src), **how)


def compare(torch_module: Any, jax_side: Any, table: Any, inputs: Any, **how: Any) -> Report:
    """Any torch module against any JAX function: see `parity.pair.compare`."""
    from parity.pair import compare

    return compare(torch_module, jax_side, table, inputs, **how)


def sized(table: Any, tensors: Any) -> list[Row]:
    """The rows with the sizes of their single letters, read off torch's tensors (by name)."""
    from parity.pair import sized

    return sized(table, tensors)


def probe(x: Any, name: str) -> Any:
    """x, which a comparison may look at under this name: see `jaxmodel.probe`."""
    from jaxmodel.probe import probe

    return probe(x, name)


def assert_parity(subject: str | os.PathLike[str] | Report, **how: Any) -> Report:
    """For a test: AssertionError where the JAX model is not the PyTorch model.

    `subject` is a source, which is checked (`how` goes to `check`), or a report already made. The
    error says the verdict, where the two part first, and why, as far as it is known.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    from parity.findings import Report
    from parity.wording import complaint

    if isinstance(subject, Report):
        if how:
            raise TypeError(f"a finished report is not checked again: {', '.join(how)}")
        report = subject
    else:
        report = check(subject, **how)
    if not report.equal:
        raise AssertionError(complaint(report))
    return report
