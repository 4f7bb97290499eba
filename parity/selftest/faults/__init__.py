"""The faults that the check must catch (base.py), and how they are made (making.py)."""

from jaxtwin.parity.selftest.faults import attention, axes, parts, spec_and_weights
from jaxtwin.parity.selftest.faults.base import FAULTS

__all__ = ["FAULTS", "attention", "axes", "parts", "spec_and_weights"]
