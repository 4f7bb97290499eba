"""A user's file: an activation and a norm that jaxtwin does not have, and a spec with both."""

import jax
import torch

import jaxtwin
from jaxtwin.configs import GQA, Block, Glu, Mlp, Model, OwnNorm, QKNorm, Rope, Run

jaxtwin.register_activation(
    "squared_relu", torch=lambda x: torch.relu(x) ** 2, jax=lambda x: jax.nn.relu(x) ** 2
)


def torch_l1(x, weight, eps):
    """Divided by the mean of the absolute values."""
    return x / (x.abs().mean(-1, keepdim=True) + eps) * weight


def jax_l1(x, weight, eps):
    return x / (jax.numpy.abs(x).mean(-1, keepdims=True) + eps) * weight


jaxtwin.register_norm("l1", torch=torch_l1, jax=jax_l1)


def block(ffn, bias, over):
    norm = OwnNorm(name="l1", eps=1e-3, bias=bias)
    heads = OwnNorm(name="l1", eps=1e-3)
    attn = GQA(heads=4, kv=2, width=8, rope=Rope(base=100.0, pairs="half"),
               qk_norm=QKNorm(norm=heads, over=over))  # fmt: skip
    return Block(pre_attn=norm, attn=attn, pre_ffn=norm, ffn=ffn)


variant = Model(
    d=32, vocab=300, max_len=64, tied=True, norm=OwnNorm(name="l1", eps=1e-3),
    runs=(
        Run(blocks=(block(Mlp(hidden=48, act="squared_relu", bias=True), True, "head"),
                    block(Glu(hidden=40, act="squared_relu"), False, "projection")), repeats=1),
    ),
)  # fmt: skip


def no_spec():
    return 3


def fails():
    raise KeyError("width")
