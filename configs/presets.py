"""Every preset by name, gathered from the family files."""

import difflib

from configs import bloom, gemma, gpt2, grok, llama, mistral, qwen, reference, transformer
from configs.errors import BadInput, nearest
from configs.spec import Model

FAMILIES = (reference, gpt2, transformer, llama, mistral, qwen, gemma, grok, bloom)
PRESETS: dict[str, Model] = {
    name: spec for family in FAMILIES for name, spec in family.PRESETS.items()
}


def preset(name: str) -> Model:
    """The spec of that name, or a BadInput with the nearest known one."""
    if name not in PRESETS:
        large = [known for known in PRESETS if not known.endswith("-tiny")]
        alike = PRESETS if difflib.get_close_matches(name, PRESETS, n=1) else large
        raise BadInput(f"no preset is called {name!r}; {nearest(name, alike)}")
    return PRESETS[name]
