"""The Llama shape: pre-RMSNorm, RoPE, GQA, SwiGLU, no biases. Others add one thing to it."""

from typing import Literal

from jaxtwin.configs.spec import GQA, RMS, Block, Glu, Llama3, Model, QKNorm, Rope, Run, Scaling


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
    scaling: Scaling | None = None,
    window: int | None = None,
    bias: bool = False,
    qk_norm: bool = False,
) -> Model:
    """A Llama of any size; the head width is d / heads unless it is given.

    `window` is Mistral's, `bias` (of Q, K and V) Qwen 2's, and `qk_norm` (of each head) Qwen 3's.
    """
    if width is None:
        if d % heads:
            raise ValueError(f"d={d} is not a multiple of heads={heads}; give the head width")
        width = d // heads
    norm = RMS(eps=eps)
    attn = GQA(
        heads=heads,
        kv=kv,
        width=width,
        rope=Rope(base=base, pairs=pairs, scaling=scaling),
        bias=bias,
        qk_norm=QKNorm(norm=norm, over="head") if qk_norm else None,
        window=window,
    )
    block = Block(pre_attn=norm, attn=attn, pre_ffn=norm, ffn=Glu(hidden=hidden))
    return Model(
        d=d,
        vocab=vocab,
        max_len=max_len,
        runs=(Run(blocks=(block,), repeats=layers),),
        norm=norm,
        tied=tied,
    )


PRESETS = {
    # Touvron et al. 2023, arXiv 2302.13971, table 2 and section 2.2; huggyllama/llama-7b,
    # config.json (hidden 11,008, eps 1e-6)
    "llama-7b": llama(
        vocab=32_000,
        d=4_096,
        layers=32,
        heads=32,
        kv=32,
        hidden=11_008,
        max_len=2_048,
        base=10_000.0,
        pairs="half",
        eps=1e-6,
        tied=False,
    ),
    # Touvron et al. 2023, arXiv 2307.09288, table 1; meta-llama/Llama-2-7b-hf, config.json
    "llama2-7b": llama(
        vocab=32_000,
        d=4_096,
        layers=32,
        heads=32,
        kv=32,
        hidden=11_008,
        max_len=4_096,
        base=10_000.0,
        pairs="half",
        eps=1e-5,
        tied=False,
    ),
    # meta-llama/Llama-2-70b-hf, config.json: the only Llama 2 with grouped heads, beside the 34B
    "llama2-70b": llama(
        vocab=32_000,
        d=8_192,
        layers=80,
        heads=64,
        kv=8,
        hidden=28_672,
        max_len=4_096,
        base=10_000.0,
        pairs="half",
        eps=1e-5,
        tied=False,
    ),
    # Grattafiori et al. 2024, arXiv 2407.21783, table 3; meta-llama/Meta-Llama-3-8B, config.json
    "llama3-8b": llama(
        vocab=128_256,
        d=4_096,
        layers=32,
        heads=32,
        kv=8,
        hidden=14_336,
        max_len=8_192,
        base=500_000.0,
        pairs="half",
        eps=1e-5,
        tied=False,
    ),
    # meta-llama/Llama-3.1-8B, config.json: 3's sizes, and frequencies divided by up to 8
    "llama3.1-8b": llama(
        vocab=128_256,
        d=4_096,
        layers=32,
        heads=32,
        kv=8,
        hidden=14_336,
        max_len=131_072,
        base=500_000.0,
        pairs="half",
        eps=1e-5,
        tied=False,
        scaling=Llama3(factor=8.0, low=1.0, high=4.0, original=8_192),
    ),
    # meta-llama/Llama-3.2-1B, config.json: divided by up to 32, and tied
    "llama3.2-1b": llama(
        vocab=128_256,
        d=2_048,
        layers=16,
        heads=32,
        kv=8,
        width=64,
        hidden=8_192,
        max_len=131_072,
        base=500_000.0,
        pairs="half",
        eps=1e-5,
        tied=True,
        scaling=Llama3(factor=32.0, low=1.0, high=4.0, original=8_192),
    ),
    "llama3-tiny": llama(
        vocab=263,
        d=40,
        layers=3,
        heads=5,
        kv=1,
        hidden=48,
        max_len=256,
        base=500.0,
        pairs="half",
        eps=1e-5,
        tied=False,
        scaling=Llama3(factor=8.0, low=1.0, high=4.0, original=32),
    ),
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
