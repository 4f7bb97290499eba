"""The catalogue of mistakes that the reference can be made to commit (sides/hypothesis.py)."""

from jaxtwin.parity.diagnose.hypotheses import positions, attention, parts, wiring  # isort: skip
from jaxtwin.parity.diagnose.hypotheses.base import ANY, HYPOTHESES

# Hypotheses are tried in the order of these modules.
__all__ = ["ANY", "HYPOTHESES", "attention", "parts", "positions", "wiring"]
