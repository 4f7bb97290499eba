"""The decoder, read in one sitting: embedding, layers, final norm, head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from jaxtwin.configs import spec as specs
from jaxtwin.configs.spec import Learned
from jaxtwin.jaxmodel.aux import Aux, merged
from jaxtwin.jaxmodel.axes import Maker, constrain, gathered, matmul_flat
from jaxtwin.jaxmodel.cache import AttentionContext, Cache, causal_segment_mask
from jaxtwin.jaxmodel.cap import Cap
from jaxtwin.jaxmodel.norm import NORMS
from jaxtwin.jaxmodel.position import POSITIONS, max_cacheable_len
from jaxtwin.jaxmodel.probe import probe
from jaxtwin.jaxmodel.skip import Skip
from jaxtwin.jaxmodel.stack import LAYOUTS, REMATS


class Embedding(nnx.Module):
    """A row of the table for each id."""

    def __init__(self, make: Maker):
        self.weight = make.matrix("embed", "v d")

    def __call__(self, ids: Integer[Array, "b t"]) -> Float[Array, "b t d"]:
        return gathered(self.weight)[ids]


class Scale(nnx.Module):
    """x * scale, the scale first rounded to x's dtype: bfloat16's sqrt(2304) is 48 (Gemma)."""

    def __init__(self, scale: float):
        self.scale = scale

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        return x * jnp.array(self.scale, x.dtype)


class TiedHead(nnx.Module):
    """Logits from the embedding's own table: one parameter, used twice."""

    def __call__(self, x: Float[Array, "b t d"], embed: Embedding) -> Float[Array, "b t v"]:
        return matmul_flat(x, gathered(embed.weight).T)


class Head(nnx.Module):
    """Logits from a matrix of its own."""

    def __init__(self, make: Maker):
        self.weight = make.matrix("head", "d v")

    def __call__(self, x: Float[Array, "b t d"], embed: Embedding) -> Float[Array, "b t v"]:
        return matmul_flat(x, gathered(self.weight))


class Decoder(nnx.Module):
    """A decoder-only language model.

    Parameters are float32 unless `dtype` says otherwise, and their dtype is the dtype of the
    computation. `layout` ("scan" or "unroll") and `remat` ("none", "dots", "full") are a run's
    choices and change no value.
    """

    def __init__(
        self,
        spec: specs.Model,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        layout: str = "scan",
        remat: str = "none",
    ):
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        if remat not in REMATS:
            raise ValueError(f"remat must be one of {', '.join(REMATS)}, got {remat!r}")
        residual = spec.init_std / (2 * len(spec.layers)) ** 0.5
        make = Maker(rngs.params(), check_dtype(dtype), spec.init_std, residual)
        make = make.child("decoder", d=spec.d, v=spec.vocab, m=spec.max_len)
        self.spec = spec
        self.embed = Embedding(make)
        self.scale = Skip() if spec.embed_scale is None else Scale(spec.embed_scale)
        self.position = POSITIONS[type(spec.position)](spec.position, make)
        self.embed_norm = NORMS[type(spec.embed_norm)](spec.embed_norm, make)
        self.stack = LAYOUTS[layout](spec, make.child("layers"), remat)
        self.norm = NORMS[type(spec.norm)](spec.norm, make)
        self.head = TiedHead() if spec.tied else Head(make)
        self.cap = Skip() if spec.cap is None else Cap(spec.cap)
        self.max_cacheable_len = max_cacheable_len(block.attn.rope for block in spec.layers)

    def __call__(
        self,
        ids: Integer[Array | np.ndarray, "b t"],
        *,
        positions: Int[Array | np.ndarray, "b t"] | None = None,
        segments: Int[Array | np.ndarray, "b t"] | None = None,
    ) -> Float[Array, "b t v"]:
        """Logits for every position.

        Positions count from 0 unless given. With `segments`, a token sees only its own segment:
        packed documents, or padding as a segment of its own. ValueError on a bad shape or dtype,
        a length of 0 or over max_len, and, outside jit, an id outside the vocabulary or a position
        that is negative or beyond a learned table.
        """
        return self.logits_and_aux(ids, positions=positions, segments=segments)[0]

    def logits_and_aux(
        self,
        ids: Integer[Array | np.ndarray, "b t"],
        *,
        positions: Int[Array | np.ndarray, "b t"] | None = None,
        segments: Int[Array | np.ndarray, "b t"] | None = None,
    ) -> tuple[Float[Array, "b t v"], Aux]:
        """The same, with the auxiliary losses and statistics of the layers (aux.py)."""
        ids = check_ids(ids, self.spec)
        b, t = ids.shape
        start = jnp.zeros((), jnp.int32)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(t), (b, t))
        else:
            positions = check_beside("positions", positions, ids, (0, position_count(self.spec)))
        if segments is not None:
            segments = check_beside("segments", segments, ids, (-(2**31), 2**31))
        mask = causal_segment_mask(b, t, t, start, segments)
        context = AttentionContext(positions, positions, positions.max() + 1, start, mask)
        return self.forward(ids, context)

    def forward(
        self, ids: Integer[Array, "b t"], context: AttentionContext
    ) -> tuple[Float[Array, "b t v"], Aux]:
        """The computation itself, without a cache."""
        x = probe(self.embed_tokens(ids, context), "embed")
        x, _, auxes = self.stack(x, context, None)
        logits = self.unembed(probe(self.norm(x), "norm"))
        return probe(constrain(logits, "b t v"), "head"), merged(auxes)

    def embed_tokens(
        self, ids: Integer[Array, "b t"], context: AttentionContext
    ) -> Float[Array, "b t d"]:
        """The first layer's input: embedding, scale, positions and norm, where there are such."""
        x = self.position(self.scale(self.embed(ids)), context.positions)
        return constrain(self.embed_norm(x), "b t d")

    def unembed(self, x: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """The logits of the last layer's normed output."""
        return self.cap(self.head(x, self.embed))

    def start(self, batch: int, slots: int) -> Cache:
        """An empty cache for `slots` tokens, in the parameters' dtype.

        ValueError where frequencies would change within them: see `logits_uncached`.
        """
        if slots > self.max_cacheable_len:
            raise ValueError(
                f"past {self.max_cacheable_len} tokens the rotary frequencies of this model depend "
                "on the text's length, and no cache can hold its keys; generate does without"
            )
        layers = self.stack.cache(self.spec, batch, slots, self.embed.weight.dtype)
        return Cache(layers, jnp.zeros((), jnp.int32))

    def extend(self, ids: Integer[Array, "b t"], cache: Cache) -> tuple[Float[Array, "b v"], Cache]:
        """The logits after t more tokens than the cache holds, and the cache with them written in.

        ValueError, outside jit, where they do not fit: a write past the end would be moved back
        over the last tokens without a word.
        """
        b, t = ids.shape
        slots = jax.tree.leaves(cache.layers)[0].shape[-3]
        check_room(cache.length, t, slots)
        positions = jnp.broadcast_to(cache.length + jnp.arange(t), (b, t))
        keys = jnp.broadcast_to(jnp.arange(slots), (b, slots))
        mask = causal_segment_mask(b, t, slots, cache.length, None)
        context = AttentionContext(positions, keys, cache.length + t, cache.length, mask)
        x, layers, _ = self.stack(self.embed_tokens(ids, context), context, cache.layers)
        return self.unembed(self.norm(x[:, -1:]))[:, 0], Cache(layers, cache.length + t)

    def logits_uncached(
        self, ids: Integer[Array, "b t"], length: Int[Array, ""]
    ) -> Float[Array, "b v"]:
        """The logits after the first `length` ids, without a cache; later ids are not seen.

        For texts past `max_cacheable_len` tokens, whose frequencies depend on their length.
        """
        b, t = ids.shape
        start = jnp.zeros((), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(t), (b, t))
        mask = causal_segment_mask(b, t, t, start, None)
        context = AttentionContext(positions, positions, length, start, mask)
        x, _, _ = self.stack(self.embed_tokens(ids, context), context, None)
        last = jax.lax.dynamic_slice_in_dim(x, length - 1, 1, axis=1)
        return self.unembed(self.norm(last))[:, 0]


def check_dtype(dtype: Any) -> jnp.dtype:
    """A floating-point dtype that JAX will keep, or a ValueError."""
    try:
        wanted = jnp.dtype(dtype)
    except TypeError:
        raise ValueError(f"dtype must be a floating-point dtype, got {dtype!r}") from None
    if not jnp.issubdtype(wanted, jnp.floating):
        raise ValueError(f"dtype must be a floating-point dtype, got {wanted}")
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ValueError(f"JAX would narrow {wanted} to 32 bits; set JAX_ENABLE_X64=1")
    return wanted


def check_ids(ids: Any, spec: specs.Model) -> Array:
    """Token ids as an array, or a ValueError.

    The values can only be looked at outside jit; a trainer checks them on the host. They must be
    looked at: JAX itself clamps, wraps or fills with NaN, by the operation, and says nothing.
    """
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if ids.ndim != 2:
        raise ValueError(f"ids must be (batch, time), got shape {tuple(ids.shape)}")
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"ids must be integers, got {ids.dtype}")
    if ids.shape[0] == 0:
        raise ValueError("ids must hold at least one row, got a batch of 0")
    if not 1 <= ids.shape[1] <= spec.max_len:
        raise ValueError(f"ids must be 1 to {spec.max_len} tokens long, got {ids.shape[1]}")
    if not isinstance(ids, jax.core.Tracer):
        values = np.asarray(ids)  # NumPy: inside a trace even a constant's jnp.min is a tracer
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= spec.vocab:
            bad = low if low < 0 else high
            raise ValueError(f"ids must be in 0 ... {spec.vocab - 1}, got {bad}")
    return jnp.asarray(ids)


def position_count(spec: specs.Model) -> int:
    """How many positions there are: as many as a table has rows, or any 32-bit number."""
    return spec.max_len if isinstance(spec.position, Learned) else 2**31


def check_beside(name: str, values: Any, ids: Array, bounds: tuple[int, int]) -> Array:
    """Positions or segments, one integer for each id and in range, or a ValueError.

    JAX would broadcast a wrong shape, wrap a 64-bit value and take a float for an integer.
    """
    values = values if isinstance(values, jax.Array) else np.asarray(values)
    if values.shape != ids.shape:
        raise ValueError(f"{name} must have the shape of ids {ids.shape}, got {values.shape}")
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name} must be integers, got {values.dtype}")
    if not isinstance(values, jax.core.Tracer):
        low, high = int(np.asarray(values).min()), int(np.asarray(values).max())
        if low < bounds[0] or high >= bounds[1]:
            bad = low if low < bounds[0] else high
            raise ValueError(f"{name} must be in {bounds[0]} ... {bounds[1] - 1}, got {bad}")
    return jnp.asarray(values)


def check_room(length: Array, more: int, slots: int) -> None:
    """A ValueError where so many more tokens do not fit; inside jit the length is not known."""
    if not isinstance(length, jax.core.Tracer) and int(length) + more > slots:
        raise ValueError(
            f"the cache has {slots} slots and holds {int(length)} tokens: {more} more do not fit; "
            f"start one of at least {int(length) + more} slots"
        )


def abstract(
    spec: specs.Model, *, dtype: Any = jnp.float32, layout: str = "scan", remat: str = "none"
) -> Decoder:
    """The model with shapes in place of arrays: no memory, whatever its size."""
    return nnx.eval_shape(
        lambda: Decoder(spec, rngs=nnx.Rngs(0), dtype=dtype, layout=layout, remat=remat)
    )
