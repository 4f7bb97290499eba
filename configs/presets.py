"""Every preset by name, gathered from the family files."""

import difflib

from jaxtwin.configs import (
    bloom,
    gemma,
    gpt2,
    grok,
    llama,
    mistral,
    olmo,
    qwen,
    reference,
    transformer,
)
from jaxtwin.configs.errors import BadInput, nearest
from jaxtwin.configs.spec import Model

FAMILIES = (reference, gpt2, transformer, llama, mistral, qwen, gemma, grok, bloom, olmo)
PRESETS: dict[str, Model] = {
    name: spec for family in FAMILIES for name, spec in family.PRESETS.items()
}

NOT_YET = {  # known by name, to be refused by name
    "qwen3-30b-a3b": "mixture of experts",
    "mixtral-8x7b": "mixture of experts",
    "lavender2-dev": "mixture of experts",
    "lavender2-70b": "mixture of experts",
    "deepseek-v2-lite": "latent attention and mixture of experts",
    "deepseek-v3": "latent attention and mixture of experts",
}


def preset(name: str) -> Model:
    """The spec of that name, or a BadInput with the nearest known one."""
    if name in NOT_YET:
        raise BadInput(f"{name} is not supported yet: {NOT_YET[name]}")
    if name not in PRESETS:
        large = [known for known in PRESETS if not known.endswith("-tiny")]
        alike = PRESETS if difflib.get_close_matches(name, PRESETS, n=1) else large
        raise BadInput(f"no preset is called {name!r}; {nearest(name, alike)}")
    return PRESETS[name]
