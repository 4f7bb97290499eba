"""The faults that the check must catch: see base.py."""

from parity.faults import forward, given  # isort: skip
from parity.faults import axes  # isort: skip  (the order is that of the random pairs)
from parity.faults.base import FAULTS, Fault

__all__ = ["FAULTS", "Fault", "axes", "forward", "given"]
