"""The Llama shape: pre-RMSNorm, RoPE, GQA, SwiGLU, no biases."""

from typing import Literal

from configs.spec import GQA, RMS, Block, Glu, Model, Rope, Run


def llama(
    *,
    vocab: int,
    d: int,
    layers: int,
    heads: int,
    kv: int,
    hidden: int,
    max_len: int,
    base: float,
    pairs: Literal["adjacent", "half"],
    eps: float,
    tied: bool,
    width: int | None = None,
) -> Model:
    """A Llama of any size; the head width is d / heads unless it is given."""
    if width is None:
        if d % heads:
            raise ValueError(f"d={d} is not a multiple of heads={heads}; give the head width")
        width = d // heads
    norm = RMS(eps=eps)
    attn = GQA(heads=heads, kv=kv, width=width, rope=Rope(base=base, pairs=pairs))
    block = Block(pre_attn=norm, attn=attn, pre_ffn=norm, ffn=Glu(hidden=hidden))
    return Model(
        d=d,
        vocab=vocab,
        max_len=max_len,
        runs=(Run(blocks=(block,), times=layers),),
        norm=norm,
        tied=tied,
    )


PRESETS = {
    # Hugging Face, HuggingFaceTB/SmolLM2-135M-Instruct, config.json
    "smollm2-135m": llama(
        vocab=49_152,
        d=576,
        layers=30,
        heads=9,
        kv=3,
        hidden=1_536,
        max_len=8_192,
        base=100_000.0,
        pairs="half",
        eps=1e-5,
        tied=True,
    ),
    "smollm2-tiny": llama(
        vocab=259,
        d=36,
        layers=3,
        heads=9,
        kv=3,
        hidden=40,
        max_len=256,
        base=100_000.0,
        pairs="half",
        eps=1e-5,
        tied=True,
    ),
}
