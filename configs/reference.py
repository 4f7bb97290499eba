"""The 100M reference decoder, and a tiny twin of it that tests can afford."""

from jaxtwin.configs.llama import llama

PRESETS = {
    "reference-100m": llama(
        vocab=32_000,
        d=768,
        layers=12,
        heads=12,
        kv=4,
        hidden=2_048,
        max_len=2_048,
        base=10_000.0,
        pairs="adjacent",
        eps=1e-6,
        tied=True,
    ),
    "reference-tiny": llama(
        vocab=257,
        d=32,
        layers=3,
        heads=4,
        kv=2,
        hidden=48,
        max_len=128,
        base=10_000.0,
        pairs="adjacent",
        eps=1e-6,
        tied=True,
    ),
}
