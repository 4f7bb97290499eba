"""Faults of attention in the finished JAX model: positions, masks, scores, the cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from jaxtwin.jaxmodel.attention import Attention, Softmax, Window
from jaxtwin.jaxmodel.cap import Cap
from jaxtwin.jaxmodel.position import LearnedPositions, Rotary, SinusoidalPositions
from jaxtwin.parity.selftest.faults.base import NoPlace, add
from jaxtwin.parity.selftest.faults.making import (
    attending,
    calling,
    changing,
    rotated_values,
    set_to,
    setting,
    tiled,
    turning,
    where_present,
    without,
)


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


def _stop(call: Any, self: Any, *args: Any) -> Any:
    import jax

    return jax.tree.map(jax.lax.stop_gradient, call(*args))


def _backwards(rotate: Any, self: Any, x: Any, positions: Any) -> Any:
    return rotate(x, -positions)


def _float32_angles(rotate: Any, self: Any, x: Any, positions: Any) -> Any:
    import jax.numpy as jnp

    return rotate(x.astype(jnp.float32), positions).astype(x.dtype)


def _slots(rotate: Any, self: Any, x: Any, positions: Any) -> Any:
    import jax.numpy as jnp

    return rotate(x, jnp.broadcast_to(jnp.arange(x.shape[1]), positions.shape))


def _partial(rotate: Any, self: Any, x: Any, positions: Any, length: Any) -> Any:
    """Half of a head's coordinates turned, with the frequencies of a head of that width."""
    if self.width < 4:
        raise NoPlace("less than two pairs turn")
    narrow = copy.copy(self)
    object.__setattr__(narrow, "frequency", self.frequency[::2])
    object.__setattr__(narrow, "width", self.width // 2)
    return rotate.__wrapped__(narrow, x, positions, length)


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


def _restarted(context: Any) -> dict[str, Any]:
    return {"positions": context.positions - context.offset}


def _all_slots(context: Any) -> dict[str, Any]:
    return {"mask": context.mask | (context.offset > 0)}


def _normalizing_in(dtype: str) -> Callable[[Any], None]:
    import jax

    def normalize(scores: Any) -> Any:
        return jax.nn.softmax(scores.astype(dtype), axis=-1).astype(scores.dtype)

    return set_to(normalize=lambda softmax: normalize)


add("tile-not-repeat", "K/V heads tiled, not repeated", edit=setting(Attention, tiled))
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
    edit=setting(Attention, set_to(scale=1.0)),
)
add(
    "scale-off",
    "scores divided by sqrt(h + 1)",
    edit=setting(Attention, set_to(scale=lambda a: (a.scale**-2 + 1) ** -0.5)),
)
add("causal-corner", "each token also sees the next one", edit=attending(_future))
add("documents-leak", "packed documents see each other", edit=attending(_leak))
add("gradient-stopped", "no gradient through attention", edit=calling(Attention, _stop))
add(
    "cache-offset",
    "decoding one slot early: right without a cache, wrong with it",
    "cache-offset",
    edit=without(Window)(  # a window would be counted from there too
        attending(lambda context: {"offset": context.offset - (context.offset > 0)})
    ),
    layered=False,
)
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
    edit=setting(Rotary, set_to(frequency=lambda r: tuple(f / 4 for f in r.frequency))),
)
add("rope-partial", "half of each head turned", edit=calling(Rotary, _partial))
add(
    "rope-on-values",
    "the values rotated too",
    edit=where_present(Rotary, calling(Attention, rotated_values)),
)
add(
    "window",
    "only the last 8 tokens seen",
    edit=without(Window)(attending(_window(8))),
)
add("diagonal-hidden", "a token does not see itself", edit=attending(_strict))
add("not-causal", "everything seen by all", edit=attending(_open))
add(
    "soft-cap",
    "scores capped at 3",
    edit=without(Cap)(setting(Attention, set_to(cap=lambda a: Cap(3.0)))),
)
add(
    "softmax-float32",
    "the softmax in float32 in a float64 run",
    edit=setting(Softmax, _normalizing_in("float32")),
)
add(
    "softmax-bfloat16",
    "the softmax in bfloat16",
    edit=setting(Softmax, _normalizing_in("bfloat16")),
)
add(
    "attention-missing",
    "attention left out",
    "dropped",
    edit=changing(Attention, lambda y: 0 * y),
)
add(
    "attention-halved",
    "a residual multiplier nobody asked for",
    "scaled",
    edit=changing(Attention, lambda y: 0.5 * y),
)
add(
    "cache-positions",
    "each step turned as if at position 0",
    # What is added to the embedding, and a bias of distance, would have to start again too.
    edit=without(Window, LearnedPositions, SinusoidalPositions)(attending(_restarted)),
    layered=False,
)
add(
    "cache-mask",
    "empty slots seen",
    edit=attending(_all_slots),
    layered=False,
)
