"""The faults that the check must catch: see base.py."""

from parity.faults import forward, given
from parity.faults.base import FAULTS, Fault

__all__ = ["FAULTS", "Fault", "forward", "given"]
