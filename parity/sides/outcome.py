"""What one run of one side gives, under torchref's names, so that comparing needs no framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxtwin.parity.sides import terms
from jaxtwin.parity.sides.terms import Terms


@dataclass(frozen=True)
class Outcome:
    """logits (b t v); the counted targets' negative log-likelihoods, one after another; the
    gradient of their mean for every parameter, and what those of biases are sums of (terms.py)."""

    logits: np.ndarray
    nll: np.ndarray
    grads: dict[str, np.ndarray]
    terms: Mapping[str, Terms] = field(default_factory=dict, kw_only=True)

    def off(self, name: str, grad: np.ndarray) -> float:
        """How far another's gradient of that parameter is off this one, relatively."""
        return terms.relative(grad, self.grads[name], self.terms.get(name))


@dataclass(frozen=True)
class Trace(Outcome):
    """An Outcome seen from inside: values and cotangents by probe, in the order of computation."""

    values: dict[str, np.ndarray] = field(default_factory=dict)
    cotangents: dict[str, np.ndarray] = field(default_factory=dict)
