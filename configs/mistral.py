"""Mistral: a Llama whose tokens see a window (Jiang et al. 2023, arXiv 2310.06825)."""

from jaxtwin.configs.llama import llama

PRESETS = {
    # arXiv 2310.06825, table 1; mistralai/Mistral-7B-v0.1, config.json (32,768 positions)
    "mistral-7b": llama(
        vocab=32_000,
        d=4_096,
        layers=32,
        heads=32,
        kv=8,
        hidden=14_336,
        max_len=32_768,
        base=10_000.0,
        pairs="half",
        eps=1e-5,
        tied=False,
        window=4_096,
    ),
    "mistral-tiny": llama(
        vocab=261,
        d=40,
        layers=3,
        heads=4,
        kv=2,
        hidden=44,
        max_len=256,
        base=10_000.0,
        pairs="half",
        eps=1e-5,
        tied=False,
        window=9,
    ),
}
