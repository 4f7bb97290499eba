"""Hugging Face's GPT-2: learned positions; matrices are stored (in, out), and Q, K, V in one."""

from __future__ import annotations

from typing import Any

from jaxtwin.configs import Model
from jaxtwin.configs.spec import GQA, LN, Block, Learned, Mlp
from jaxtwin.parity.checkpoints.dialects.base import Dialect, Fields
from jaxtwin.parity.checkpoints.dialects.hf_keys import (
    HEAD,
    Family,
    beside,
    depth,
    first_layer,
    model,
    word,
)
from jaxtwin.parity.table.row import Row

BODY = "transformer."
LAYER = BODY + "h.{l}."


def fused(name: str, heads: str, at: int) -> tuple[Row, Row]:
    """The rows of one of Q, K and V."""
    ours, theirs = f"layers.{{l}}.attn.{name}.", LAYER + "attn.c_attn."
    sizes, take = {"j": 3}, ("j", at, at + 1)
    weight = f"d (j {heads} h) -> ({heads} h) d"
    bias = f"(j {heads} h) -> ({heads} h)"
    return (
        Row(ours + "weight", theirs + "weight", weight, sizes, take=take),
        Row(ours + "bias", theirs + "bias", bias, sizes, take=take),
    )


def norm(ours: str, theirs: str) -> tuple[Row, Row]:
    return (
        Row(ours + ".weight", theirs + ".weight", "d -> d"),
        Row(ours + ".bias.weight", theirs + ".bias", "d -> d"),
    )


HF_GPT2 = Dialect(
    "hf-gpt2",
    (
        Row("embed.weight", BODY + "wte.weight", "v d -> v d"),
        Row("position.weight", BODY + "wpe.weight", "m d -> m d"),
        *norm("layers.{l}.pre_attn", LAYER + "ln_1"),
        *fused("q", "n", 0),
        *fused("k", "k", 1),
        *fused("v", "k", 2),
        Row("layers.{l}.attn.o.weight", LAYER + "attn.c_proj.weight", "(n h) d -> d (n h)"),
        Row("layers.{l}.attn.o.bias", LAYER + "attn.c_proj.bias", "d -> d"),
        *norm("layers.{l}.pre_ffn", LAYER + "ln_2"),
        Row("layers.{l}.ffn.up.weight", LAYER + "mlp.c_fc.weight", "d f -> f d"),
        Row("layers.{l}.ffn.up.bias", LAYER + "mlp.c_fc.bias", "f -> f"),
        Row("layers.{l}.ffn.down.weight", LAYER + "mlp.c_proj.weight", "f d -> d f"),
        Row("layers.{l}.ffn.down.bias", LAYER + "mlp.c_proj.bias", "d -> d"),
        *norm("norm", BODY + "ln_f"),
        HEAD,
    ),
    "half",
    prefix=BODY,
)
ACTS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def read(fields: Fields) -> Model:
    d = fields.positive_int(fields.alias("n_embd", "hidden_size"))
    heads = fields.positive_int(fields.alias("n_head", "num_attention_heads"))
    layers = depth(fields, fields.alias("n_layer", "num_hidden_layers"))
    length = fields.positive_int(fields.alias("n_positions", "n_ctx", "max_position_embeddings"))
    hidden = fields.positive_int("n_inner", absent=4 * (d or 0))
    act = fields.choice("activation_function", ACTS)
    eps, vocab = fields.number("layer_norm_epsilon"), fields.positive_int("vocab_size")
    scaled = fields.flag("scale_attn_weights", absent=True)
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", absent=False)
    init_std = fields.number("initializer_range", absent=None)
    tied = fields.flag("tie_word_embeddings", absent=True)
    if d and heads and d % heads:
        fields.problems.append(f"n_embd: {d} is not a multiple of n_head={heads}")
    fields.finish()
    width = d // heads
    before = LN(eps=eps)

    def block(i: int) -> Block:
        scale = None if scaled and not by_layer else _scale(width, scaled, by_layer, i)
        attn = GQA(
            heads=heads, kv=heads, width=width, rope=None, bias=True, out_bias=True, scale=scale
        )
        ffn = Mlp(hidden=hidden, act=act, bias=True)
        return Block(pre_attn=before, attn=attn, pre_ffn=before, ffn=ffn)

    return model(
        [block(i) for i in range(layers)],
        init_std=init_std,
        norm=before,
        d=d,
        vocab=vocab,
        max_len=length,
        position=Learned(),
        tied=tied,
    )


def _scale(width: int, scaled: bool, by_layer: bool, i: int) -> float:
    scale = width**-0.5 if scaled else 1.0
    return scale / (i + 1) if by_layer else scale


def write(spec: Model) -> dict[str, Any]:
    block = first_layer(spec, "GPT-2", Mlp, rotary=False)
    width = block.attn.width
    scales = [b.attn.scale or width**-0.5 for b in spec.layers]
    flags = [(True, False), (True, True), (False, False), (False, True)]
    scaled, by_layer = next(
        (f for f in flags if [_scale(width, *f, i) for i in range(len(scales))] == scales), flags[0]
    )
    return {
        "vocab_size": spec.vocab,
        "n_positions": spec.max_len,
        "n_embd": spec.d,
        "n_layer": len(spec.layers),
        "n_head": block.attn.heads,
        "n_inner": block.ffn.hidden,
        "activation_function": word(block.ffn.act, ACTS),
        "layer_norm_epsilon": spec.norm.eps if spec.norm else None,
        "scale_attn_weights": scaled,
        "scale_attn_by_inverse_layer_idx": by_layer,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        **beside(spec),
    }


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    HF_GPT2,
    read,
    write,
    tied=True,
    wide=True,
    defaults={
        "vocab_size": 50_257,
        "n_positions": 1_024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    },
    ignored={
        "reorder_and_upcast_attn": "an order of roundings; the function is the same",
        "summary_type": "of classifiers",
        "summary_use_proj": "of classifiers",
        "summary_activation": "of classifiers",
        "summary_proj_to_labels": "of classifiers",
        "summary_first_dropout": "of classifiers",
    },
)
