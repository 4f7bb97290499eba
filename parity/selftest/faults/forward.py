"""Faults in the finished JAX model: parts that answer otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxtwin.parity.selftest.faults.base import NoPlace, add
from jaxtwin.parity.selftest.faults.making import (
    attending,
    calling,
    seeing,
    set_to,
    setting,
    turning,
    wiring,
    within,
    without,
)

if TYPE_CHECKING:
    from jaxtwin.jaxmodel import Decoder


def _future(context: Any) -> dict[str, Any]:
    """Every query also sees the next token."""
    import jax.numpy as jnp

    later = jnp.pad(context.mask[:, :, :-1], ((0, 0), (0, 0), (1, 0)))
    return {"mask": context.mask | later}


def _leak(context: Any) -> dict[str, Any]:
    """Causal, but blind to segments."""
    import jax.numpy as jnp

    t, s = context.mask.shape[1:]
    causal = jnp.arange(s)[None, :] <= context.offset + jnp.arange(t)[:, None]
    return {"mask": jnp.broadcast_to(causal, context.mask.shape)}


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
    if type(self.bias).__name__ != "Bias":
        raise NoPlace("the norm has no bias")
    return norm(x) - self.bias.weight[...]


def _without_offset(norm: Any) -> None:
    if norm.scale(0) != 1:
        raise NoPlace("the norm has no offset")
    norm.scale = lambda w: w


def _narrow(norm: Any, self: Any, x: Any) -> Any:
    import jax.numpy as jnp

    return norm(x.astype(jnp.float32)).astype(x.dtype)


def _stop(call: Any, self: Any, *args: Any) -> Any:
    import jax

    return jax.tree.map(jax.lax.stop_gradient, call(*args))


def _untied(head: Any, self: Any, x: Any, embed: Any) -> Any:
    import jax

    return head(x, jax.lax.stop_gradient(embed))


def _backwards(rotate: Any, self: Any, x: Any, positions: Any) -> Any:
    return rotate(x, -positions)


def _float32_angles(rotate: Any, self: Any, x: Any, positions: Any) -> Any:
    import jax.numpy as jnp

    return rotate(x.astype(jnp.float32), positions).astype(x.dtype)


add("tile-not-repeat", "K/V heads tiled, not repeated", edit=attending(tile=True))
add(
    "position-off-by-one",
    "every position after the first one place too far",
    edit=turning(lambda r, self, x, p: r(x, p + (p > 0))),
)
add("rope-backwards", "angles of the wrong sign", edit=turning(_backwards))
add(
    "rope-float32",
    "angles kept in float32 in a float64 run",
    edit=turning(_float32_angles),
)
add(
    "scale-missing-attn",
    "scores not divided by sqrt(h)",
    "scale-missing",
    edit=setting("Attention", set_to(scale=1.0)),
)
add(
    "scale-off",
    "scores divided by sqrt(h + 1)",
    edit=setting("Attention", set_to(scale=lambda a: (a.scale**-2 + 1) ** -0.5)),
)
add(
    "causal-corner", "each token also sees the next one", edit=calling("Attention", seeing(_future))
)
add("documents-leak", "packed documents see each other", edit=calling("Attention", seeing(_leak)))
add("layer-norm", "the mean subtracted in an RMS norm", edit=calling("RMSNorm", _layer_norm))
add(
    "norm-float32",
    "norms in float32 in a float64 run",
    edit=without("NormedHeads", calling("RMSNorm", _narrow)),  # there it is as well the rotation's
)
add(
    "residual-doubled",
    "the residual stream added twice",
    "input-added",
    edit=calling("GatedFFN", lambda f, self, x: f(x) + x),
)
add(
    "ffn-missing-layer",
    "the feed-forward part dropped",
    "dropped",
    edit=calling("GatedFFN", lambda f, self, x: 0 * f(x)),
)
add(
    "activation-missing",
    "the gate's activation left out",
    "activation",
    edit=setting("GatedFFN", lambda f: setattr(f, "act", lambda x: x)),
)
add("gradient-stopped", "no gradient through attention", edit=calling("Attention", _stop))
add(
    "head-untied",
    "the head's use of the embedding gets no gradient",
    edit=calling("TiedHead", _untied),
    layered=False,
)
add(
    "logits-scaled",
    "logits divided by a temperature nobody asked for",
    "scaled",
    edit=calling("TiedHead", lambda h, self, x, e: h(x, e) * 0.999),
    layered=False,
)
add(
    "cache-offset",
    "decoding one slot early: right without a cache, wrong with it",
    "cache-offset",
    edit=without(  # a window would be counted from there too
        "Window",
        calling(
            "Attention",
            lambda a, self, x, context, kv: a(
                x, context._replace(offset=context.offset - (context.offset > 0)), kv
            ),
        ),
    ),
    layered=False,
)

# ---- positions and masks ------------------------------------------------------------------------


def _slots(rotate: Any, self: Any, x: Any, positions: Any) -> Any:
    import jax.numpy as jnp

    return rotate(x, jnp.broadcast_to(jnp.arange(x.shape[1]), positions.shape))


def _partial(rotate: Any, self: Any, x: Any, positions: Any, longest: Any) -> Any:
    """Half of a head's coordinates turned, with the frequencies of a head of that width."""
    if self.width < 4:
        raise NoPlace("less than two pairs turn")
    narrow = copy.copy(self)
    object.__setattr__(narrow, "frequency", self.frequency[::2])
    object.__setattr__(narrow, "width", self.width // 2)
    return rotate.__wrapped__(narrow, x, positions, longest)


def _window(size: int) -> Callable[[Any], dict[str, Any]]:
    def change(context: Any) -> dict[str, Any]:
        import jax.numpy as jnp

        return {"mask": context.mask & jnp.triu(jnp.ones_like(context.mask), 1 - size)}

    return change


def _strict(context: Any) -> dict[str, Any]:
    import jax.numpy as jnp

    return {"mask": context.mask & jnp.tril(jnp.ones_like(context.mask), -1)}


def _open(context: Any) -> dict[str, Any]:
    import jax.numpy as jnp

    return {"mask": jnp.ones_like(context.mask)}


def _softcap(cap: float) -> Callable[[Any], Any]:
    def change(x: Any) -> Any:
        import jax.numpy as jnp

        return cap * jnp.tanh(x / cap)

    return change


add("positions-ignored", "angles by slot, whatever the positions", edit=turning(_slots))
add(
    "position-from-one",
    "positions counted from one",
    "position-offset",
    edit=turning(lambda r, self, x, p: r(x, p + 1)),
)
add(
    "position-scaled",
    "positions divided by a factor nobody asked for",
    edit=setting("Rotary", set_to(frequency=lambda r: tuple(f / 4 for f in r.frequency))),
)
add("rope-partial", "half of each head turned", edit=calling("Rotary", _partial))
add(
    "rope-on-values",
    "the values rotated too",
    edit=within("Rotary", attending(values=lambda rotate, v: rotate(v))),
)
add(
    "window",
    "only the last 8 tokens seen",
    edit=without("Window", calling("Attention", seeing(_window(8)))),
)
add("diagonal-hidden", "a token does not see itself", edit=calling("Attention", seeing(_strict)))
add("not-causal", "everything seen by all", edit=calling("Attention", seeing(_open)))
add("soft-cap", "scores capped at 3", edit=without("Cap", attending(scores=_softcap(3.0))))
add("softmax-float32", "the softmax in float32 in a float64 run", edit=attending(softmax="float32"))
add("softmax-bfloat16", "the softmax in bfloat16", edit=attending(softmax="bfloat16"))

# ---- norms, feed-forward, residual stream, head -------------------------------------------------


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


def _gate(hidden: Callable[[Any, Any, Any], Any]) -> Callable[[Decoder], None]:
    """A feed-forward whose hidden units are hidden(activation, gate, up)."""

    def call(ffn: Any, self: Any, x: Any) -> Any:
        gate, up = self.gate_bias(x @ self.gate[...]), self.up_bias(x @ self.up[...])
        return self.down_bias(hidden(self.act, gate, up) @ self.down[...])

    return calling("GatedFFN", call)


def _relu(x: Any) -> Any:
    import jax

    return jax.nn.relu(x)


def _no_input_gradient(embed: Any, self: Any, ids: Any) -> Any:
    import jax

    return jax.lax.stop_gradient(embed(ids))


add("norm-sum", "the root of the sum of squares", edit=calling("RMSNorm", _sum))
add("norm-eps-outside", "eps added to the root", edit=calling("RMSNorm", _outside))
add(
    "norm-scale-twice",
    "the norms' outputs doubled",
    "scaled",
    edit=calling("RMSNorm", lambda n, self, x: 2 * n(x)),
)
add(
    "norm-offset-missing",
    "a scale of w where 1 + w belongs",
    edit=setting("RMSNorm", _without_offset),
)
add("mean-kept", "the mean not subtracted in a LayerNorm", edit=calling("LayerNorm", _mean_kept))
add(
    "norm-bias-missing",
    "the norms' biases left out",
    edit=calling("LayerNorm", _without_bias),
)
add("variance-unbiased", "a variance over d - 1", edit=calling("LayerNorm", _unbiased))
add(
    "layer-norm-missing",
    "the LayerNorms left out",
    "norm-missing",
    edit=calling("LayerNorm", lambda n, self, x: x),
)
add("norm-missing", "the norms left out", edit=calling("RMSNorm", lambda n, self, x: x))
add(
    "activation-relu",
    "ReLU where SiLU belongs",
    "activation",
    edit=setting("GatedFFN", set_to(act=lambda module: _relu)),
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
    edit=wiring(mid=lambda x, part: part),
)
add(
    "residual-dropped-ffn",
    "feed-forward without its residual",
    "residual-dropped",
    edit=wiring(out=lambda x, y, part: part),
)
add(
    "residual-twice",
    "the stream added twice after attention",
    "residual-doubled",
    edit=wiring(mid=lambda x, part: 2 * x + part),
)
add(
    "residual-from-before",
    "the feed-forward added to the stream before attention",
    edit=wiring(out=lambda x, y, part: x + part),
)
add("parallel-residual", "a parallel block", edit=wiring(feed=lambda x, y: x))
add(
    "attention-missing",
    "attention left out",
    "dropped",
    edit=calling("Attention", lambda a, self, x, context, kv: (0 * a(x, context, kv)[0], kv)),
)
add(
    "attention-halved",
    "a residual multiplier nobody asked for",
    "scaled",
    edit=calling("Attention", lambda a, self, x, context, kv: (0.5 * a(x, context, kv)[0], kv)),
)
add(
    "embedding-scaled",
    "embeddings times sqrt(d)",
    "scaled",
    edit=calling("Embedding", lambda e, self, ids: e(ids) * self.weight.shape[1] ** 0.5),
    layered=False,
)
add(
    "logit-soft-cap",
    "logits capped at 5",
    edit=without("Cap", calling("TiedHead", lambda h, self, x, e: _softcap(5.0)(h(x, e)))),
    layered=False,
)
add(
    "ffn-gradient-stopped",
    "no gradient through the feed-forward",
    "gradient-stopped",
    edit=calling("GatedFFN", _stop),
)
add(
    "embedding-frozen",
    "no gradient to the embedding as the input",
    edit=calling("Embedding", _no_input_gradient),
    layered=False,
)


# ---- the cache ----------------------------------------------------------------------------------


def _restarted(context: Any) -> dict[str, Any]:
    return {"positions": context.positions - context.offset}


def _all_slots(context: Any) -> dict[str, Any]:
    return {"mask": context.mask | (context.offset > 0)}


add(
    "cache-positions",
    "each step turned as if at position 0",
    # What is added to the embedding, and a bias of distance, would have to start again too.
    edit=without(
        ("Window", "LearnedPositions", "SinusoidalPositions"),
        calling("Attention", seeing(_restarted)),
    ),
    layered=False,
)
add(
    "cache-mask",
    "empty slots seen",
    edit=calling("Attention", seeing(_all_slots)),
    layered=False,
)
