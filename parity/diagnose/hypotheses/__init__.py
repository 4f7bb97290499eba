"""The catalogue of mistakes that the reference can be made to commit (sides/hypothesis.py)."""

from jaxtwin.parity.diagnose.hypotheses import (  # isort: skip
    positions,
    attention,
    parts,
    wiring,
    any_module,
)
from jaxtwin.parity.diagnose.hypotheses.base import ANY, HYPOTHESES

# Hypotheses are tried in the order of these modules.
__all__ = ["ANY", "HYPOTHESES", "any_module", "attention", "parts", "positions", "wiring"]
