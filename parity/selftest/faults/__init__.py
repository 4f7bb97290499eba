"""The faults that the check must catch: see base.py."""

from jaxtwin.parity.selftest.faults import forward, given  # isort: skip
from jaxtwin.parity.selftest.faults import axes  # isort: skip  (the order is that of the random pairs)
from jaxtwin.parity.selftest.faults.base import FAULTS, Fault

__all__ = ["FAULTS", "Fault", "axes", "forward", "given"]
