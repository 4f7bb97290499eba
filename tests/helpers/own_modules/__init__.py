"""Four decoders as people write them, each with the names of its tensors: not one line of ours.

Each folder is what a user has: `model.py` (theirs), and what they write for jaxtwin.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtwin.configs import Model, user_code
from jaxtwin.parity.naming.names import read

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Own:
    """A user's module: FILE.py:NAME, and the file of its names."""

    name: str
    reference: str
    names: str

    def __str__(self) -> str:
        return self.name

    def module(self) -> Any:
        return user_code.named(self.reference)()

    @property
    def spec(self) -> Model:
        found = read(self.names).spec
        assert found is not None
        return found


def _own(name: str, module: str, names: str = "names.py") -> Own:
    return Own(name, f"{FOLDER / name / 'model.py'}:{module}", str(FOLDER / name / names))


OWN = (
    _own("nano", "GPT"),
    _own("tiny_llama", "Transformer", "names.toml"),
    _own("fused", "Fused"),
    _own("renamed", "Net"),
)
