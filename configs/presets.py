"""Every preset by name, gathered from the family files."""

from configs import llama, reference
from configs.errors import BadInput, nearest
from configs.spec import Model

PRESETS: dict[str, Model] = {**reference.PRESETS, **llama.PRESETS}


def preset(name: str) -> Model:
    """The spec of that name, or a BadInput with the nearest known one."""
    if name not in PRESETS:
        raise BadInput(f"no preset is called {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]
