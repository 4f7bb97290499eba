"""Every preset by name, gathered from the family files."""

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
        alike = [known for known in PRESETS if known.endswith("-tiny") == name.endswith("-tiny")]
        raise BadInput(f"no preset is called {name!r}; {nearest(name, alike)}")
    return PRESETS[name]
