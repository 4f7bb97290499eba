"""A decoder-only stack in the style of 2017: post-LayerNorm, sinusoidal positions, ReLU, biases."""

from jaxtwin.configs.spec import GQA, LN, Mlp, Model, PostBlock, Run, Sinusoidal


def transformer(*, vocab: int, d: int, layers: int, heads: int, hidden: int, max_len: int) -> Model:
    """The paper's stack without its encoder. It has no final norm: each layer ends with one.

    The paper gives no eps: 1e-5 is torch.nn.Transformer's, as are the biases of attention.
    """
    norm = LN(eps=1e-5)
    block = PostBlock(
        attn=GQA(heads=heads, kv=heads, width=d // heads, rope=None, bias=True, out_bias=True),
        post_attn=norm,
        ffn=Mlp(hidden=hidden, act="relu", bias=True),
        post_ffn=norm,
    )
    return Model(
        d=d,
        vocab=vocab,
        max_len=max_len,
        embed_scale=d**0.5,
        position=Sinusoidal(),
        runs=(Run(blocks=(block,), repeats=layers),),
        norm=None,
        tied=True,
    )


PRESETS = {
    # Vaswani et al. 2017, arXiv 1706.03762: table 3 (base), sections 3.4 (scaled and tied
    # embedding) and 5.1 (37,000 tokens). It gives no greatest length.
    "transformer-2017": transformer(
        vocab=37_000, d=512, layers=6, heads=8, hidden=2_048, max_len=1_024
    ),
    "transformer-tiny": transformer(vocab=261, d=30, layers=3, heads=5, hidden=44, max_len=128),
}
