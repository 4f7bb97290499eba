"""Faults of the other parts in the finished JAX model: norms, feed-forward, residuals, head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtwin.jaxmodel.attention import NormedHeads
from jaxtwin.jaxmodel.aux import NO_AUX
from jaxtwin.jaxmodel.bias import Bias
from jaxtwin.jaxmodel.cap import Cap
from jaxtwin.jaxmodel.ffn import GatedFFN
from jaxtwin.jaxmodel.model import Embedding, TiedHead
from jaxtwin.jaxmodel.norm import LayerNorm, RMSNorm, as_stored, unit_offset
from jaxtwin.parity.selftest.faults.base import NoPlace, add
from jaxtwin.parity.selftest.faults.making import (
    ModelEdit,
    calling,
    changing,
    rewired,
    set_to,
    setting,
    without,
)


def _layer_norm(norm: Any, self: Any, x: Any) -> Any:
    return norm(x - x.mean(axis=-1, keepdims=True))


def _mean_kept(norm: Any, self: Any, x: Any) -> Any:
    import jax.numpy as jnp

    root = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + self.eps)
    return self.bias(x / root * self.weight[...])


def _unbiased(norm: Any, self: Any, x: Any) -> Any:
    import jax.numpy as jnp

    root = jnp.sqrt(jnp.var(x, axis=-1, keepdims=True, ddof=1) + self.eps)
    return self.bias((x - x.mean(axis=-1, keepdims=True)) / root * self.weight[...])


def _without_bias(norm: Any, self: Any, x: Any) -> Any:
    if not isinstance(self.bias, Bias):
        raise NoPlace("the norm has no bias")
    return norm(x) - self.bias.weight[...]


def _without_offset(norm: Any) -> None:
    if norm.scale is not unit_offset:
        raise NoPlace("the norm has no offset")
    norm.scale = as_stored


def _narrow(norm: Any, self: Any, x: Any) -> Any:
    import jax.numpy as jnp

    return norm(x.astype(jnp.float32)).astype(x.dtype)


def _stop(call: Any, self: Any, *args: Any) -> Any:
    import jax

    return jax.tree.map(jax.lax.stop_gradient, call(*args))


def _untied(head: Any, self: Any, x: Any, embed: Any) -> Any:
    import jax

    return head(x, jax.lax.stop_gradient(embed))


def _sum(norm: Any, self: Any, x: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return (
        x
        * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + self.eps)
        * self.scale(self.weight[...])
    )


def _outside(norm: Any, self: Any, x: Any) -> Any:
    import jax.numpy as jnp

    return (
        x
        / (jnp.sqrt(jnp.square(x).mean(-1, keepdims=True)) + self.eps)
        * self.scale(self.weight[...])
    )


def _gate(hidden: Callable[[Any, Any, Any], Any]) -> ModelEdit:
    """A feed-forward whose hidden units are hidden(activation, gate, up)."""

    def call(ffn: Any, self: Any, x: Any) -> Any:
        gate, up = self.gate_bias(x @ self.gate[...]), self.up_bias(x @ self.up[...])
        return self.down_bias(hidden(self.act, gate, up) @ self.down[...]), NO_AUX

    return calling(GatedFFN, call)


def _relu(x: Any) -> Any:
    import jax

    return jax.nn.relu(x)


def _no_input_gradient(embed: Any, self: Any, ids: Any) -> Any:
    import jax

    return jax.lax.stop_gradient(embed(ids))


def _plus_input(ffn: Any, self: Any, x: Any) -> Any:
    y, aux = ffn(x)
    return y + x, aux


add("layer-norm", "the mean subtracted in an RMS norm", edit=calling(RMSNorm, _layer_norm))
add(
    "norm-float32",
    "norms in float32 in a float64 run",
    edit=without(NormedHeads)(calling(RMSNorm, _narrow)),  # there it is as well the rotation's
)
add(
    "residual-doubled",
    "the residual stream added twice",
    "input-added",
    edit=calling(GatedFFN, _plus_input),
)
add(
    "ffn-missing-layer",
    "the feed-forward part dropped",
    "dropped",
    edit=changing(GatedFFN, lambda y: 0 * y),
)
add(
    "activation-missing",
    "the gate's activation left out",
    "activation",
    edit=setting(GatedFFN, lambda f: setattr(f, "act", lambda x: x)),
)
add(
    "head-untied",
    "the head's use of the embedding gets no gradient",
    edit=calling(TiedHead, _untied),
    layered=False,
)
add(
    "logits-scaled",
    "logits divided by a temperature nobody asked for",
    "scaled",
    edit=changing(TiedHead, lambda logits: logits * 0.999),
    layered=False,
)
add("norm-sum", "the root of the sum of squares", edit=calling(RMSNorm, _sum))
add("norm-eps-outside", "eps added to the root", edit=calling(RMSNorm, _outside))
add(
    "norm-scale-twice",
    "the norms' outputs doubled",
    "scaled",
    edit=calling(RMSNorm, lambda n, self, x: 2 * n(x)),
)
add(
    "norm-offset-missing",
    "a scale of w where 1 + w belongs",
    edit=setting(RMSNorm, _without_offset),
)
add("mean-kept", "the mean not subtracted in a LayerNorm", edit=calling(LayerNorm, _mean_kept))
add(
    "norm-bias-missing",
    "the norms' biases left out",
    edit=calling(LayerNorm, _without_bias),
)
add("variance-unbiased", "a variance over d - 1", edit=calling(LayerNorm, _unbiased))
add(
    "layer-norm-missing",
    "the LayerNorms left out",
    "norm-missing",
    edit=calling(LayerNorm, lambda n, self, x: x),
)
add("norm-missing", "the norms left out", edit=calling(RMSNorm, lambda n, self, x: x))
add(
    "activation-relu",
    "ReLU where SiLU belongs",
    "activation",
    edit=setting(GatedFFN, set_to(act=lambda module: _relu)),
)
add(
    "activation-on-up",
    "up activated and not gate",
    edit=_gate(lambda act, gate, up: gate * act(up)),
)
add("gate-missing", "no gate at all", edit=_gate(lambda act, gate, up: act(up)))
add(
    "residual-dropped-attn",
    "attention without its residual",
    "residual-dropped",
    edit=rewired(mid=lambda block, values: values["post_attn"]),
)
add(
    "residual-dropped-ffn",
    "feed-forward without its residual",
    "residual-dropped",
    edit=rewired(out=lambda block, values: values["post_ffn"]),
)
add(
    "residual-twice",
    "the stream added twice after attention",
    "residual-doubled",
    edit=rewired(mid=lambda block, values: 2 * values["in"] + values["post_attn"]),
)
add(
    "residual-from-before",
    "the feed-forward added to the stream before attention",
    edit=rewired(out=lambda block, values: values["in"] + values["post_ffn"]),
)
add(
    "parallel-residual",
    "a parallel block",
    edit=rewired(pre_ffn=lambda block, values: block.pre_ffn(values["in"])),
)
add(
    "embedding-scaled",
    "embeddings times sqrt(d)",
    "scaled",
    edit=calling(Embedding, lambda e, self, ids: e(ids) * self.weight.shape[1] ** 0.5),
    layered=False,
)
add(
    "logit-soft-cap",
    "logits capped at 5",
    edit=without(Cap)(changing(TiedHead, Cap(5.0))),
    layered=False,
)
add(
    "ffn-gradient-stopped",
    "no gradient through the feed-forward",
    "gradient-stopped",
    edit=calling(GatedFFN, _stop),
)
add(
    "embedding-frozen",
    "no gradient to the embedding as the input",
    edit=calling(Embedding, _no_input_gradient),
    layered=False,
)
