"""Mistakes that people make in this job, to be made on purpose: the check is itself checked.

Each fault touches the JAX side alone, in one of three places: the spec it is built from, the
weights on their way in, or the finished model. A check that lets one pass is no check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from configs import Model
from configs.spec import RMS, Block
from parity.sides import Wrong

if TYPE_CHECKING:
    from jaxmodel import Decoder

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Fault:
    """A mistake: what it is in a few words, and how to make it."""

    about: str
    wrong: Wrong


FAULTS: dict[str, Fault] = {}


def _add(name: str, about: str, **how: Any) -> None:
    FAULTS[name] = Fault(about, Wrong(**how))


# ---- in the spec ------------------------------------------------------------------------------


def every(change: Callable[[Block], Block]) -> Callable[[Model], Model]:
    """The change made to every block."""

    def apply(spec: Model) -> Model:
        runs = tuple(replace(r, blocks=tuple(map(change, r.blocks))) for r in spec.runs)
        return replace(spec, runs=runs)

    return apply


def _attn(**new: Any) -> Callable[[Model], Model]:
    return every(lambda b: replace(b, attn=replace(b.attn, **new)))


def _rope(change: Callable[[Any], dict[str, Any]]) -> Callable[[Model], Model]:
    def turn(b: Block) -> Block:
        rope = b.attn.rope
        assert rope is not None, "the fault needs rotary positions"
        return replace(b, attn=replace(b.attn, rope=replace(rope, **change(rope))))

    return every(turn)


def _eps(norm: RMS | None) -> RMS:
    assert norm is not None, "the fault needs the norm"
    return replace(norm, eps=norm.eps * 10)


OTHER = {"adjacent": "half", "half": "adjacent"}
_add(
    "rope-pairing",
    "adjacent pairs turned as halves, or the reverse",
    spec=_rope(lambda rope: {"pairs": OTHER[rope.pairs]}),
)
_add("rope-base", "a RoPE base 1% off", spec=_rope(lambda rope: {"base": rope.base * 1.01}))
_add("rope-missing", "no rotary positions at all", spec=_attn(rope=None))
_add(
    "norm-eps",
    "the norms' eps ten times too large",
    spec=every(lambda b: replace(b, pre_attn=_eps(b.pre_attn), pre_ffn=_eps(b.pre_ffn))),
)
_add(
    "final-norm-eps",
    "the last norm's eps ten times too large",
    spec=lambda m: replace(m, norm=_eps(m.norm)),
)
_add(
    "activation-gelu",
    "GELU where SiLU belongs",
    spec=every(lambda b: replace(b, ffn=replace(b.ffn, act="gelu"))),
)

# ---- in the weights ---------------------------------------------------------------------------


def on(ending: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Arrays], Arrays]:
    """The change made to every array whose path ends so: stacked layers have their l in front."""

    def apply(arrays: Arrays) -> Arrays:
        return {p: change(x) if p.endswith(ending) else x for p, x in arrays.items()}

    return apply


def swapped(one: str, other: str) -> Callable[[Arrays], Arrays]:
    """Two parameters of one part exchanged."""

    def apply(arrays: Arrays) -> Arrays:
        names = {p: p.removesuffix(one) + other for p in arrays if p.endswith(one)}
        names |= {q: p for p, q in names.items()}
        return {p: arrays[names.get(p, p)] for p in arrays}

    return apply


def _square_transposed(x: np.ndarray) -> np.ndarray:
    """(l d n h) read as if the file held (in, out): a fault that only a square matrix hides."""
    return np.swapaxes(x.reshape(*x.shape[:2], -1), 1, 2).reshape(x.shape)


def _one_element(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[-1, 0, 0] += np.asarray(0.01, x.dtype)
    return x


def _through(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    import ml_dtypes

    return lambda x: x.astype(getattr(ml_dtypes, dtype)).astype(x.dtype)


_add("q-transposed", "the square q matrix transposed", weights=on("attn/q", _square_transposed))
_add("k-v-swapped", "k and v exchanged", weights=swapped("attn/k", "attn/v"))
_add("gate-up-swapped", "gate and up exchanged", weights=swapped("ffn/gate", "ffn/up"))
_add(
    "norms-swapped", "the two norms exchanged", weights=swapped("pre_attn/weight", "pre_ffn/weight")
)
_add("layers-reversed", "layers in reverse order", weights=on("attn/o", lambda x: x[::-1]))
_add(
    "layer-repeated",
    "layer 0 in every slot",
    weights=on("ffn/down", lambda x: x[:1].repeat(len(x), 0)),
)
_add(
    "heads-rotated",
    "query heads one place on",
    weights=on("attn/q", lambda x: np.roll(x, 1, axis=2)),
)
_add(
    "kv-heads-rotated",
    "value heads one place on",
    weights=on("attn/v", lambda x: np.roll(x, 1, axis=2)),
)
_add(
    "o-head-order",
    "the output matrix's (head, width) read as (width, head)",
    weights=on("attn/o", lambda x: np.swapaxes(x, 1, 2).reshape(x.shape)),
)
_add(
    "vocab-shifted",
    "the embedding's rows one place on",
    weights=on("embed/weight", lambda x: np.roll(x, 1, 0)),
)
_add(
    "norm-plus-one",
    "a scale of 1 + w where w is stored",
    weights=on("pre_ffn/weight", lambda x: x + 1),
)
_add("scale-missing", "norm scales left at 1", weights=on("pre_attn/weight", np.ones_like))
_add("one-element", "one element of one matrix 0.01 off", weights=on("ffn/up", _one_element))
_add("rounded-weight", "one matrix rounded to bfloat16", weights=on("attn/k", _through("bfloat16")))
_add(
    "query-scale-folded",
    "q stored already scaled",
    weights=on("attn/q", lambda x: x * x.shape[-1] ** -0.5),
)

# ---- in the model -----------------------------------------------------------------------------


def parts(model: Any, name: str) -> list[Any]:
    """Every module of that class, found by walking the model."""
    from flax import nnx

    return [m for _, m in nnx.iter_modules(model) if type(m).__name__ == name]


def setting(part: str, change: Callable[[Any], None]) -> Callable[[Decoder], None]:
    def edit(model: Decoder) -> None:
        found = parts(model, part)
        if not found:
            raise ValueError(f"the model has no {part}")
        for module in found:
            change(module)

    return edit


def calling(part: str, call: Callable[..., Any]) -> Callable[[Decoder], None]:
    """Every module of that class answers with call(original, module, *arguments)."""

    def change(module: Any) -> None:
        cls = type(module)

        def wrapped(self: Any, *args: Any) -> Any:
            return call(lambda *a: cls.__call__(self, *a), self, *args)

        module.__class__ = type(cls.__name__, (cls,), {"__call__": wrapped})

    return setting(part, change)


def _tile(attend: Any, self: Any, x: Any, seen: Any, kv: Any) -> Any:
    """K/V heads tiled (0 1 0 1) where each should be repeated (0 0 1 1): the queries regrouped."""
    import jax.numpy as jnp

    k, g = self.groups
    order = np.arange(k * g).reshape(g, k).T.reshape(-1)
    q, o = self.q[...], self.o[...]
    self.q.set_value(jnp.take(q, order, axis=1))
    self.o.set_value(jnp.take(o, order, axis=0))
    out = attend(x, seen, kv)
    self.q.set_value(q)
    self.o.set_value(o)
    return out


def _seen(change: Callable[[Any], dict[str, Any]]) -> Callable[..., Any]:
    return lambda attend, self, x, seen, kv: attend(x, seen._replace(**change(seen)), kv)


def _set(**values: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        for name, value in values.items():
            setattr(module, name, value(module) if callable(value) else value)

    return change


def _future(seen: Any) -> dict[str, Any]:
    """Every query also sees the next token."""
    import jax.numpy as jnp

    later = jnp.pad(seen.mask[:, :, :-1], ((0, 0), (0, 0), (1, 0)))
    return {"mask": seen.mask | later}


def _leak(seen: Any) -> dict[str, Any]:
    """Causal, but blind to segments."""
    import jax.numpy as jnp

    t, s = seen.mask.shape[1:]
    causal = jnp.arange(s)[None, :] <= seen.offset + jnp.arange(t)[:, None]
    return {"mask": jnp.broadcast_to(causal, seen.mask.shape)}


def _layer_norm(norm: Any, self: Any, x: Any) -> Any:
    return norm(x - x.mean(axis=-1, keepdims=True))


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


_add("tile-not-repeat", "K/V heads tiled, not repeated", edit=calling("Attention", _tile))
_add(
    "position-off-by-one",
    "every position after the first one place too far",
    edit=calling("Rotary", lambda r, self, x, p: r(x, p + (p > 0))),
)
_add("rope-backwards", "angles of the wrong sign", edit=calling("Rotary", _backwards))
_add(
    "rope-float32",
    "angles kept in float32 in a float64 run",
    edit=calling("Rotary", _float32_angles),
)
_add(
    "scale-missing-attn",
    "scores not divided by sqrt(h)",
    edit=setting("Attention", _set(scale=1.0)),
)
_add(
    "scale-off",
    "scores divided by sqrt(h + 1)",
    edit=setting("Attention", _set(scale=lambda a: (a.scale**-2 + 1) ** -0.5)),
)
_add(
    "causal-corner", "each token also sees the next one", edit=calling("Attention", _seen(_future))
)
_add("documents-leak", "packed documents see each other", edit=calling("Attention", _seen(_leak)))
_add("layer-norm", "the mean subtracted in an RMS norm", edit=calling("RMSNorm", _layer_norm))
_add("norm-float32", "norms in float32 in a float64 run", edit=calling("RMSNorm", _narrow))
_add(
    "residual-doubled",
    "the residual stream added twice",
    edit=calling("GatedFFN", lambda f, self, x: f(x) + x),
)
_add(
    "ffn-missing-layer",
    "the feed-forward part dropped",
    edit=calling("GatedFFN", lambda f, self, x: 0 * f(x)),
)
_add(
    "activation-missing",
    "the gate's activation left out",
    edit=setting("GatedFFN", lambda f: setattr(f, "act", lambda x: x)),
)
_add("gradient-stopped", "no gradient through attention", edit=calling("Attention", _stop))
_add(
    "head-untied",
    "the head's use of the embedding gets no gradient",
    edit=calling("TiedHead", _untied),
)
_add(
    "logits-scaled",
    "logits divided by a temperature nobody asked for",
    edit=calling("TiedHead", lambda h, self, x, e: h(x, e) * 0.999),
)
_add(
    "cache-offset",
    "decoding one slot early: right without a cache, wrong with it",
    edit=calling(
        "Attention",
        lambda a, self, x, seen, kv: a(
            x, seen._replace(offset=seen.offset - (seen.offset > 0)), kv
        ),
    ),
)
