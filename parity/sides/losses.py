"""The next-token losses of both frameworks, a few tokens at a time.

With a vocabulary of 262,144 the logits of 600 tokens are 1.3 GB in float64. A log-softmax over all
of them, its gradient and the scatter of the targets would each be as large again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

PIECE = 2**23  # logits at once


def torch_losses(logits: torch.Tensor, ids: np.ndarray) -> torch.Tensor:
    """-log p of each next token (b t-1) by logits (b t v), in float32 at least."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint

    wide = torch.promote_types(logits.dtype, torch.float32)

    def of(piece: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(piece.to(wide), targets, reduction="none")

    at_once = max(1, PIECE // logits.shape[-1])
    pieces = logits.flatten(0, 1).split(at_once)
    # After a row's last token there is no next one: its loss is left out in the end.
    targets = torch.from_numpy(np.roll(ids, -1, axis=1)).flatten().split(at_once)
    pairs = zip(pieces, targets, strict=True)
    found = [checkpoint(of, *pair, use_reentrant=False) for pair in pairs]
    return torch.cat(found).view(ids.shape)[:, :-1]


def jax_losses(logits: Any, ids: Any) -> Any:
    """-log p of each next token (b t-1) by logits (b t v), in float32 at least."""
    import jax
    import jax.numpy as jnp

    wide = jnp.promote_types(logits.dtype, jnp.float32)

    @jax.checkpoint
    def of(pair: tuple[Any, Any]) -> Any:
        scores, target = pair
        scores = scores.astype(wide)
        return jax.nn.logsumexp(scores) - scores[target]

    targets = jnp.roll(ids, -1, axis=1).reshape(-1)
    rows = logits.reshape(-1, logits.shape[-1])
    # What divides evenly is not copied to be cut up.
    most = max(1, PIECE // logits.shape[-1])
    at_once = next(n for n in range(min(most, len(rows)), 0, -1) if len(rows) % n == 0)
    if at_once == len(rows):
        found = jax.vmap(of)((rows, targets))
    else:
        found = jax.lax.map(of, (rows, targets), batch_size=at_once)
    return found.reshape(ids.shape)[:, :-1]
