"""The same model on both sides: converted without a changed bit, and proven equal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmodel import Decoder
    from parity.findings import Report


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
