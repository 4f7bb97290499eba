"""Grok's style with a dense feed-forward: norms before and after, scores and logits capped."""

from jaxtwin.configs.spec import GQA, RMS, Block, Glu, Model, Rope, Run


def grok(
    *, vocab: int, d: int, layers: int, heads: int, kv: int, hidden: int, max_len: int
) -> Model:
    """xai-org/grok-1, model.py: norms (eps 1e-5), scores capped at 30, GELU gate, scaled and tied

    embedding. The logits' cap of 50 is that of xai-org/grok-2, config.json; Grok-1 has none.
    """
    norm = RMS(eps=1e-5)
    rope = Rope(base=10_000.0, pairs="half")
    attn = GQA(heads=heads, kv=kv, width=d // heads, rope=rope, cap=30.0)
    block = Block(
        pre_attn=norm,
        attn=attn,
        post_attn=norm,
        pre_ffn=norm,
        ffn=Glu(hidden=hidden, act="gelu_tanh"),
        post_ffn=norm,
    )
    return Model(
        d=d,
        vocab=vocab,
        max_len=max_len,
        embed_scale=d**0.5,
        runs=(Run(blocks=(block,), repeats=layers),),
        norm=norm,
        tied=True,
        cap=50.0,
    )


PRESETS = {
    # Sizes of our own, those of reference-100m: Grok's experts are not dense. 8,192 positions and
    # six query heads to a key head as xai-org/grok-1, run.py.
    "grok-style": grok(vocab=32_000, d=768, layers=12, heads=12, kv=2, hidden=2_048, max_len=8_192),
    "grok-tiny": grok(vocab=263, d=36, layers=3, heads=6, kv=1, hidden=44, max_len=256),
}
