"""Hugging Face's BLOOM: ALiBi, a norm of the embedding, and Q, K, V fused head by head."""

from __future__ import annotations

from typing import Any

from jaxtwin.configs import Model
from jaxtwin.configs.spec import GQA, LN, Alibi, Block, Mlp
from jaxtwin.parity.checkpoints.dialects.base import Dialect, Fields
from jaxtwin.parity.checkpoints.dialects.hf_gpt2 import norm
from jaxtwin.parity.checkpoints.dialects.hf_keys import (
    HEAD,
    Family,
    beside,
    depth,
    first_layer,
    model,
)
from jaxtwin.parity.table.row import Row

BODY = "transformer."
LAYER = BODY + "h.{l}."
LENGTH = 2_048  # what it was trained on; its positions have no end


def fused(name: str, heads: str, at: int) -> tuple[Row, Row]:
    """The rows of one of Q, K and V, which stand side by side in every head."""
    ours, theirs = f"layers.{{l}}.attn.{name}.", LAYER + "self_attention.query_key_value."
    sizes, take = {"j": 3}, ("j", at, at + 1)
    weight = f"({heads} j h) d -> ({heads} h) d"
    bias = f"({heads} j h) -> ({heads} h)"
    return (
        Row(ours + "weight", theirs + "weight", weight, sizes, take=take),
        Row(ours + "bias", theirs + "bias", bias, sizes, take=take),
    )


HF_BLOOM = Dialect(
    "hf-bloom",
    (
        Row("embed.weight", BODY + "word_embeddings.weight", "v d -> v d"),
        *norm("embed_norm", BODY + "word_embeddings_layernorm"),
        *norm("layers.{l}.pre_attn", LAYER + "input_layernorm"),
        *fused("q", "n", 0),
        *fused("k", "k", 1),
        *fused("v", "k", 2),
        Row(
            "layers.{l}.attn.o.weight", LAYER + "self_attention.dense.weight", "d (n h) -> d (n h)"
        ),
        Row("layers.{l}.attn.o.bias", LAYER + "self_attention.dense.bias", "d -> d"),
        *norm("layers.{l}.pre_ffn", LAYER + "post_attention_layernorm"),
        Row("layers.{l}.ffn.up.weight", LAYER + "mlp.dense_h_to_4h.weight", "f d -> f d"),
        Row("layers.{l}.ffn.up.bias", LAYER + "mlp.dense_h_to_4h.bias", "f -> f"),
        Row("layers.{l}.ffn.down.weight", LAYER + "mlp.dense_4h_to_h.weight", "d f -> d f"),
        Row("layers.{l}.ffn.down.bias", LAYER + "mlp.dense_4h_to_h.bias", "d -> d"),
        *norm("norm", BODY + "ln_f"),
        HEAD,
    ),
    "half",
    prefix=BODY,
)


def read(fields: Fields) -> Model:
    d = fields.positive_int(fields.alias("hidden_size", "n_embed"))
    heads = fields.positive_int(fields.alias("n_head", "num_attention_heads"))
    layers = depth(fields, fields.alias("n_layer", "num_hidden_layers"))
    eps, vocab = fields.number("layer_norm_epsilon"), fields.positive_int("vocab_size")
    hidden = 4 * (d or 0)
    if fields.positive_int("n_inner", absent=hidden) != hidden:
        fields.problems.append(f"n_inner: the class has 4 * {d} and nothing else")
    length = fields.positive_int("seq_length", absent=LENGTH)
    init_std = fields.number("initializer_range", absent=None)
    tied = fields.flag("tie_word_embeddings", absent=True)
    if d and heads and d % heads:
        fields.problems.append(f"hidden_size: {d} is not a multiple of n_head={heads}")
    split = fields.settings.get("pretraining_tp")
    if fields.settings.get("slow_but_exact") and type(split) is int and split > 1:
        fields.problems.append(
            f"slow_but_exact: with pretraining_tp={split} the class leaves out two biases of every "
            "layer; not supported"
        )
    if fields.settings.get("seq_length") is None:
        fields.notes.append(f"no seq_length: inputs may be {LENGTH} long, as BLOOM was trained")
    fields.finish()
    before = LN(eps=eps)
    attn = GQA(
        heads=heads,
        kv=heads,
        width=d // heads,
        rope=None,
        relative=Alibi(),
        bias=True,
        out_bias=True,
    )
    ffn = Mlp(hidden=hidden, act="gelu_tanh", bias=True)
    block = Block(pre_attn=before, attn=attn, pre_ffn=before, ffn=ffn)
    return model(
        [block] * layers,
        init_std=init_std,
        norm=before,
        d=d,
        vocab=vocab,
        max_len=length,
        embed_norm=before,
        tied=tied,
    )


def write(spec: Model) -> dict[str, Any]:
    block = first_layer(spec, "BLOOM", Mlp, rotary=False)
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.d,
        "n_layer": len(spec.layers),
        "n_head": block.attn.heads,
        "seq_length": spec.max_len,
        "layer_norm_epsilon": spec.norm.eps if spec.norm else None,
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **beside(spec),
    }


BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    HF_BLOOM,
    read,
    write,
    tied=True,
    wide=True,
    defaults={
        "vocab_size": 250_880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "layer_norm_epsilon": 1e-5,
    },
    fixed={"apply_residual_connection_post_layernorm": (False,)},
    ignored={
        "slow_but_exact": "an order of roundings; the function is the same",
        "attention_softmax_in_fp32": "of other code; the class always does",
        "bias_dropout_fusion": "of other code",
        "masked_softmax_fusion": "of other code",
        "skip_bias_add": "of other code",
        "skip_bias_add_qkv": "of other code",
        "offset_alibi": "of other code",
    },
)
