"""optax put together in other ways: what wrong optimizers are made of (optimizer_faults.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxtwin.configs.runs import AdamW
from jaxtwin.parity.training.single_step import Combine

Letters = Mapping[str, str]
Build = Callable[[AdamW, int, Letters], Any]
EMBED = "embed/weight"


def right(config: AdamW, steps: int, letters: Letters) -> Any:
    from jaxtwin.parity.training.trajectory import optimizer

    return optimizer(config, steps, letters)


def changed(**new: Any) -> Build:
    """The right optimizer of another config."""
    return lambda config, steps, letters: right(replace(config, **new), steps, letters)


def matrices(letters: Letters) -> dict[str, bool]:
    return {path: len(set(names.split()) - {"l", "h"}) > 1 for path, names in letters.items()}


Mask = Callable[[Letters], Any]
Stage = Callable[[AdamW], Any]  # a transform


def chain(
    order: Sequence[str] = ("clip", "adam", "decay", "rate"),
    *,
    clip: Stage | None = None,
    adam: Stage | None = None,
    decay: Stage | None = None,
    mask: Mask = matrices,
    rate: Callable[[AdamW, int], Any] | None = None,
) -> Build:
    """AdamW from its four parts, some of them another or in another order."""
    import optax

    def build(config: AdamW, steps: int, letters: Letters) -> Any:
        parts = {
            "clip": (clip or (lambda c: optax.clip_by_global_norm(c.clip)))(config),
            "adam": (adam or (lambda c: optax.scale_by_adam(c.b1, c.b2, c.eps)))(config),
            "decay": optax.add_decayed_weights(config.weight_decay, mask(letters))
            if decay is None
            else decay(config),
            "rate": optax.scale_by_learning_rate((rate or schedule)(config, steps)),
        }
        return optax.chain(*(parts[name] for name in order))

    return build


def schedule(config: AdamW, steps: int, *, shift: int = 0, apart: int = 0) -> Any:
    import optax

    inner = optax.warmup_cosine_decay_schedule(
        0.0, config.peak, config.warmup, decay_steps=steps + apart, end_value=config.floor
    )
    return lambda count: inner(count + shift)


def after(*more: Callable[[AdamW], Any]) -> Build:
    """The right optimizer, and then something else."""
    import optax

    return lambda config, steps, letters: optax.chain(
        right(config, steps, letters), *(one(config) for one in more)
    )


def uncorrected(*, mu: bool) -> Stage:
    """Adam that leaves the second moment (and the first, unless `mu`) as it is."""
    import jax
    import jax.numpy as jnp
    import optax

    def stage(config: AdamW) -> Any:
        inner = optax.scale_by_adam(config.b1, config.b2, config.eps)

        def update(grads: Any, state: Any, params: Any = None) -> Any:
            _, state = inner.update(grads, state, params)
            first = optax.tree.bias_correction(state.mu, config.b1, state.count)
            return jax.tree.map(
                lambda m, v: m / (jnp.sqrt(v) + config.eps), first if mu else state.mu, state.nu
            ), state

        return optax.GradientTransformation(inner.init, update)

    return stage


def eps_by_count(config: AdamW) -> Any:
    """eps over the root of the correction: as if it were added before that."""
    import jax.numpy as jnp
    import optax

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        eps = config.eps / jnp.sqrt(1 - config.b2 ** (state.count + 1))
        return optax.scale_by_adam(config.b1, config.b2, eps).update(grads, state, params)

    return optax.GradientTransformation(optax.scale_by_adam().init, update)


def each_clipped(config: AdamW) -> Any:
    """Every tensor by a norm of its own."""
    import jax
    import optax

    clip = optax.clip_by_global_norm(config.clip or 1.0)

    def update(grads: Any, params: Any) -> Any:
        return jax.tree.map(lambda g: clip.update(g, clip.init(g))[0], grads)

    return optax.stateless(update)


def clip_with_eps(config: AdamW) -> Any:
    import jax.numpy as jnp
    import optax

    def update(grads: Any, params: Any) -> Any:
        factor = jnp.minimum(1.0, config.clip / (optax.tree.norm(grads) + 1e-6))
        return optax.tree.scale(factor, grads)

    return optax.stateless(update)


def narrow(config: AdamW, steps: int, letters: Letters) -> Any:
    """Both moments kept in bfloat16 between the steps."""
    import jax.numpy as jnp
    import optax

    inner = right(config, steps, letters)

    def cast(state: Any, dtype: Any) -> Any:
        both = {name: optax.tree.cast(optax.tree.get(state, name), dtype) for name in ("mu", "nu")}
        return optax.tree.set(state, **both)

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = inner.update(grads, cast(state, jnp.float64), params)
        return updates, cast(state, jnp.bfloat16)

    return optax.GradientTransformation(lambda p: cast(inner.init(p), jnp.bfloat16), update)


def weighed(weight: Callable[[int, Sequence[int]], float], clip: float | None = None) -> Combine:
    """The parts' means (each clipped, where asked for), times what weight(own, all tokens) says."""
    import jax
    import optax

    def combine(grads: Sequence[Any], tokens: Sequence[int]) -> Any:
        means = [
            jax.tree.map(lambda g, n=n: g / n, one) for one, n in zip(grads, tokens, strict=True)
        ]
        if clip is not None:
            stage = optax.clip_by_global_norm(clip)
            means = [stage.update(one, stage.init(one))[0] for one in means]
        by = [weight(n, tokens) for n in tokens]
        return jax.tree.map(
            lambda *parts: sum(w * x for w, x in zip(by, parts, strict=True)), *means
        )

    return combine
