"""OLMo 2: norms on the outputs of attention and feed-forward alone, and QK-norm over all heads."""

from jaxtwin.configs.spec import GQA, RMS, Block, Glu, Model, QKNorm, Rope, Run


def olmo2(
    *, vocab: int, d: int, layers: int, heads: int, kv: int, hidden: int, max_len: int
) -> Model:
    """An OLMo 2 of any size (OLMo team 2025, arXiv 2501.00656, section 2.1); heads of d / heads."""
    norm = RMS(eps=1e-6, cast="after")
    attn = GQA(
        heads=heads,
        kv=kv,
        width=d // heads,
        rope=Rope(base=500_000.0, pairs="half"),
        qk_norm=QKNorm(norm=norm, over="projection"),
    )
    block = Block(
        pre_attn=None,
        attn=attn,
        post_attn=norm,
        pre_ffn=None,
        ffn=Glu(hidden=hidden),
        post_ffn=norm,
    )
    return Model(
        d=d,
        vocab=vocab,
        max_len=max_len,
        runs=(Run(blocks=(block,), repeats=layers),),
        norm=norm,
        tied=False,
    )


PRESETS = {
    # OLMo team 2025, arXiv 2501.00656, table 1; allenai/OLMo-2-0425-1B, model card (sizes) and
    # config.json (hidden 8,192, vocabulary padded to 100,352)
    "olmo2-1b": olmo2(
        vocab=100_352, d=2_048, layers=16, heads=16, kv=16, hidden=8_192, max_len=4_096
    ),
    "olmo2-tiny": olmo2(vocab=277, d=40, layers=3, heads=4, kv=4, hidden=44, max_len=128),
}
