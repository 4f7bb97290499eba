"""The catalogue of mistakes that the reference can be made to commit: see base.py."""

from parity.causes import positions, attention, parts, wiring  # isort: skip  (tried in this order)
from parity.causes.base import ANY, MISTAKES, Edit, Mistake, edited

__all__ = [
    "ANY",
    "MISTAKES",
    "Edit",
    "Mistake",
    "attention",
    "edited",
    "parts",
    "positions",
    "wiring",
]
