"""GPT-2: learned positions, LayerNorm before each part, GELU, biases everywhere, tied."""

from jaxtwin.configs.spec import GQA, LN, Block, Learned, Mlp, Model, Run


def gpt2(*, vocab: int, d: int, layers: int, heads: int, max_len: int) -> Model:
    """A GPT-2 of any size. eps 1e-5 and GELU's tanh form as in openai/gpt-2, src/model.py."""
    norm = LN(eps=1e-5)
    block = Block(
        pre_attn=norm,
        attn=GQA(heads=heads, kv=heads, width=d // heads, rope=None, bias=True, out_bias=True),
        pre_ffn=norm,
        ffn=Mlp(hidden=4 * d, act="gelu_tanh", bias=True),
    )
    return Model(
        d=d,
        vocab=vocab,
        max_len=max_len,
        position=Learned(),
        runs=(Run(blocks=(block,), repeats=layers),),
        norm=norm,
        tied=True,
    )


PRESETS = {
    # Radford et al. 2019, table 2 (first row); openai-community/gpt2, config.json
    "gpt2": gpt2(vocab=50_257, d=768, layers=12, heads=12, max_len=1_024),
    "gpt2-tiny": gpt2(vocab=263, d=36, layers=3, heads=3, max_len=128),
}
