"""How a fault is made in a finished JAX model: parts that answer, or are set, otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxtwin.parity.selftest.faults.base import NoPlace

if TYPE_CHECKING:
    from jaxtwin.jaxmodel import Decoder


def parts(model: Any, name: str) -> list[Any]:
    """Every module of that class, found by walking the model."""
    from flax import nnx

    return [m for _, m in nnx.iter_modules(model) if type(m).__name__ == name]


def setting(part: str, change: Callable[[Any], None]) -> Callable[[Decoder], None]:
    def edit(model: Decoder) -> None:
        found = parts(model, part)
        if not found:
            raise NoPlace(f"the model has no {part}")
        for module in found:
            change(module)

    return edit


def without(
    part: str | Sequence[str], edit: Callable[[Decoder], None]
) -> Callable[[Decoder], None]:
    """The edit, for models that have no such part: with one it would be another fault."""

    def alone(model: Decoder) -> None:
        for name in (part,) if isinstance(part, str) else part:
            if parts(model, name):
                raise NoPlace(f"the model has a {name}")
        edit(model)

    return alone


def within(part: str, edit: Callable[[Decoder], None]) -> Callable[[Decoder], None]:
    """The edit, for models that have such a part."""

    def src(model: Decoder) -> None:
        if not parts(model, part):
            raise NoPlace(f"the model has no {part}")
        edit(model)

    return src


def calling(part: str, call: Callable[..., Any]) -> Callable[[Decoder], None]:
    """Every module of that class answers with call(original, module, *arguments)."""

    def change(module: Any) -> None:
        cls = type(module)

        def wrapped(self: Any, *args: Any) -> Any:
            def original(*given: Any) -> Any:
                return cls.__call__(self, *given)

            original.__wrapped__ = cls.__call__  # type: ignore[attr-defined]
            return call(original, self, *args)

        module.__class__ = type(cls.__name__, (cls,), {"__call__": wrapped})

    return setting(part, change)


def attend(
    self: Any,
    x: Any,
    context: Any,
    kv: Any,
    *,
    tile: bool = False,
    scores: Callable[[Any], Any] = lambda scores: scores,
    softmax: Any = None,
    values: Callable[[Any, Any], Any] = lambda rotate, v: v,
) -> Any:
    """jaxmodel's attention, with what can be got wrong inside it as arguments."""
    import jax
    import jax.numpy as jnp

    from jaxtwin.jaxmodel.cache import extend
    from jaxtwin.jaxmodel.probe import probe

    def rotate(y: Any) -> Any:
        return self.rotate(y, context.positions, context.longest)

    q = self.q_norm(self.q_bias(jnp.einsum("btd,dnh->btnh", x, self.q[...])))
    k = self.k_norm(self.k_bias(jnp.einsum("btd,dkh->btkh", x, self.k[...])))
    v = self.v_bias(jnp.einsum("btd,dkh->btkh", x, self.v[...]))
    q, k = probe(rotate(q), "attn/q"), probe(rotate(k), "attn/k")
    k, v, kv = extend(kv, k, probe(values(rotate, v), "attn/v"), context.offset)
    groups = self.groups[1]
    spread = (
        (lambda y: jnp.tile(y, (1, 1, groups, 1)))
        if tile
        else (lambda y: jnp.repeat(y, groups, axis=2))
    )
    s = scores(self.cap(jnp.einsum("btnh,bsnh->bnts", q, spread(k)) * self.scale))
    s = self.relative(s.reshape(len(s), *self.groups, *s.shape[2:]), context).reshape(s.shape)
    s = jnp.where(self.window(context)[:, None], s, jnp.finfo(s.dtype).min)
    weights = jax.nn.softmax(s.astype(softmax or s.dtype), axis=-1).astype(x.dtype)
    mixed = probe(jnp.einsum("bnts,bsnh->btnh", weights, spread(v)), "attn/mixed")
    return self.o_bias(jnp.einsum("btnh,nhd->btd", mixed, self.o[...])), kv


def attending(**how: Any) -> Callable[[Decoder], None]:
    return calling("Attention", lambda a, self, x, context, kv: attend(self, x, context, kv, **how))


def turning(turn: Callable[..., Any]) -> Callable[[Decoder], None]:
    """Rotary positions that answer with turn(rotate, module, x, positions)."""

    def call(rotate: Any, self: Any, x: Any, positions: Any, longest: Any) -> Any:
        return turn(lambda x, positions: rotate(x, positions, longest), self, x, positions)

    return calling("Rotary", call)


def wiring(
    mid: Callable[[Any, Any], Any] = lambda x, part: x + part,
    out: Callable[[Any, Any, Any], Any] = lambda x, y, part: y + part,
    feed: Callable[[Any, Any], Any] = lambda x, y: y,
) -> Callable[[Decoder], None]:
    """Blocks wired otherwise: `feed` is what the feed-forward's norm reads."""

    def call(block: Any, self: Any, x: Any, context: Any, kv: Any) -> Any:
        from jaxtwin.jaxmodel.probe import probe

        mixed, kv = self.attn(probe(self.pre_attn(x), "pre_attn"), context, kv)
        mixed = probe(self.post_attn(probe(mixed, "attn")), "post_attn")
        y = probe(mid(x, mixed), "mid")
        fed = probe(self.ffn(probe(self.pre_ffn(feed(x, y)), "pre_ffn")), "ffn")
        return probe(out(x, y, probe(self.post_ffn(fed), "post_ffn")), "out"), kv

    return calling("Block", call)


def seeing(change: Callable[[Any], dict[str, Any]]) -> Callable[..., Any]:
    return lambda attend, self, x, context, kv: attend(x, context._replace(**change(context)), kv)


def set_to(**values: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        for name, value in values.items():
            setattr(module, name, value(module) if callable(value) else value)

    return change
