"""How a check is made: the options that travel together from the caller to every comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtwin.configs import BadInput, Model
from jaxtwin.parity.compare.curves import NUMPY
from jaxtwin.parity.sides.runs import InjectedFault
from jaxtwin.parity.table import decoder_table


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of a check of a decoder; `refuse` tells what is wrong with them."""

    dtypes: Sequence[str] = ("float64", "float32")
    tokens: int = 300  # length of the two input rows
    seed: int = 0  # of the inputs
    layout: str = "scan"  # of the JAX side's layers
    probes: bool = False  # judge every part alone too, in every dtype (curves.py)
    diagnose: bool = True  # follow a failure in float64 to its cause (search.py)
    replay: Path | None = None  # a new folder for what fails (replay.py)
    injected: InjectedFault | None = None  # a fault for the JAX side, to see it caught
    progress: Callable[[str], None] = lambda step: None

    def refuse(self, spec: Model) -> None:
        """BadInput where there is nothing to compare, or no such thing."""
        dtypes, known = self.dtypes, ", ".join(NUMPY)
        if not dtypes:
            raise BadInput(f"name at least one dtype to compare in: {known}")
        if isinstance(dtypes, str):
            raise BadInput(f"dtypes must be a list, as [{dtypes!r}], got {dtypes!r}")
        unknown = sorted(set(map(str, dtypes)) - set(NUMPY))
        if unknown:
            raise BadInput(f"no such dtype: {', '.join(unknown)}; known: {known}")
        if not isinstance(self.tokens, int) or self.tokens < 8:
            raise BadInput(f"a check needs 8 tokens or more, got {self.tokens}")
        if spec.max_len < 2:
            raise BadInput(f"max_len={spec.max_len}: there is no next token to predict")
        if self.layout not in decoder_table.LAYOUTS:
            layouts = ", ".join(decoder_table.LAYOUTS)
            raise BadInput(f"layout must be one of {layouts}, got {self.layout!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise BadInput(f"seed must be a whole number from 0 to 2^32 - 1, got {self.seed}")
