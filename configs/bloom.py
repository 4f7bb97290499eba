"""BLOOM's style: ALiBi, LayerNorm also of the embedding, GELU, biases everywhere, tied."""

from jaxtwin.configs.spec import GQA, LN, Alibi, Block, Mlp, Model, Run


def bloom(*, vocab: int, d: int, layers: int, heads: int, max_len: int) -> Model:
    """A BLOOM of any size (Scao et al. 2022, arXiv 2211.05100, section 3.2)."""
    norm = LN(eps=1e-5)
    attn = GQA(
        heads=heads,
        kv=heads,
        width=d // heads,
        rope=None,
        relative=Alibi(),
        bias=True,
        out_bias=True,
    )
    ffn = Mlp(hidden=4 * d, act="gelu_tanh", bias=True)
    block = Block(pre_attn=norm, attn=attn, pre_ffn=norm, ffn=ffn)
    return Model(
        d=d,
        vocab=vocab,
        max_len=max_len,
        embed_norm=norm,
        runs=(Run(blocks=(block,), repeats=layers),),
        norm=norm,
        tied=True,
    )


PRESETS = {
    # The sizes of bigscience/bloom-560m, config.json; arXiv 2211.05100, table 3
    "bloom-style": bloom(vocab=250_880, d=1_024, layers=24, heads=16, max_len=2_048),
    "bloom-tiny": bloom(vocab=263, d=30, layers=3, heads=6, max_len=128),
}
