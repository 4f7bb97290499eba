"""Mistakes of how the parts are put together, and of what flows back through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from jaxtwin.parity.diagnose.hypotheses.base import Forward, add, calling, kind

# ---- the residual stream ------------------------------------------------------------------------


def _wired(mid: Any, out: Any) -> Callable[[nn.Module, Any], None]:
    """A block wired otherwise: mid(x, attention) and out(x, mid, feed-forward)."""

    def call(f: Forward, m: Any, v: Any, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        y = mid(x, m.post_attn(m.attn(m.pre_attn(x), at, mask)))
        return out(x, y, m.post_ffn(m.ffn(m.pre_ffn(y))))

    return calling(call)


def _plus(x: Tensor, part: Tensor) -> Tensor:
    return x + part


def _last(x: Tensor, y: Tensor, part: Tensor) -> Tensor:
    return y + part


add(
    "residual-dropped",
    "does not add the residual stream",
    "x + attention, then + feed-forward",
    "mid",
    "",
    _wired(lambda x, part: part, _last),
    values=kind("Block"),
)
add(
    "residual-doubled",
    "adds the residual stream twice",
    "add it once",
    "mid",
    "",
    _wired(lambda x, part: 2 * x + part, _last),
    values=kind("Block"),
)
add(
    "residual-dropped",
    "does not add the residual stream",
    "x + attention, then + feed-forward",
    "out",
    "",
    _wired(_plus, lambda x, y, part: part),
    values=kind("Block"),
)
add(
    "residual-doubled",
    "adds the residual stream twice",
    "add it once",
    "out",
    "",
    _wired(_plus, lambda x, y, part: 2 * y + part),
    values=kind("Block"),
)
add(
    "residual-from-before",
    "adds the feed-forward to the stream as it was before attention",
    "add it to the stream that has the attention in it",
    "out",
    "",
    _wired(_plus, lambda x, y, part: x + part),
    values=kind("Block"),
)


add(
    "parallel-residual",
    "feeds the feed-forward from before attention (a parallel block)",
    "let the feed-forward read the stream that has the attention in it",
    "pre_ffn",
    "",
    calling(lambda f, m, v, x, at, mask: _fed_before(m, x, at, mask)),
    values=kind("Block"),
)


def _fed_before(m: Any, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
    y = x + m.post_attn(m.attn(m.pre_attn(x), at, mask))
    inner = m.pre_ffn.forward
    m.pre_ffn.__dict__["forward"] = lambda given: inner(x)
    try:
        return y + m.post_ffn(m.ffn(m.pre_ffn(y)))
    finally:
        del m.pre_ffn.__dict__["forward"]


def _summed(mid: Any, total: Any) -> Callable[[nn.Module, Any], None]:
    """A layer of 2017 whose sums are mid(x, attention) and total(mid, feed-forward)."""

    def call(f: Forward, m: Any, v: Any, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        x = m.post_attn(mid(m, x, m.attn(x, at, mask)))
        return m.post_ffn(total(m, x, m.ffn(x)))

    return calling(call)


def _right(m: Any, x: Tensor, part: Tensor) -> Tensor:
    return m.alpha * x + part


for _probe, _sums in {
    "summed": lambda wrong: _summed(wrong, _right),
    "total": lambda wrong: _summed(_right, wrong),
}.items():
    add(
        "residual-dropped",
        "does not add the residual stream",
        "norm the sum of the stream and the part",
        _probe,
        "",
        _sums(lambda m, x, part: part),
        values=kind("PostBlock"),
    )

add(
    "residual-scale-missing",
    "does not multiply the residual stream by alpha",
    "alpha * x + part, then the norm (DeepNorm)",
    ("summed", "total"),
    "",
    _summed(lambda m, x, part: x + part, lambda m, x, part: x + part),
    values=lambda m: () if getattr(m, "alpha", 1.0) == 1 else (None,),
)

# ---- the backward pass --------------------------------------------------------------------------

for _part, _probe in (
    ("attn", "attn.mixed"),
    ("ffn", "pre_ffn"),
    ("pre_attn", "out"),
    ("pre_ffn", "mid"),
    ("ffn", "mid"),  # where no norm stands between
):
    add(
        "gradient-stopped",
        f"lets no gradient through {_part}",
        "remove the stop_gradient (or the conversion that loses the gradient)",
        _probe,
        _part,
        calling(lambda f, m, v, *args: f(*args).detach()),
        direction="backward",
    )
add(
    "head-untied",
    "gives the embedding no gradient from its use as the head",
    "use one parameter in both places: its gradient is the sum of both",
    "embed.weight",
    "head",
    calling(lambda f, m, v, x, embed: x @ embed.weight.detach().T),
    values=kind("TiedHead"),
    direction="parameter",
)
add(
    "embedding-frozen",
    "gives the embedding no gradient from its use as the input",
    "use one parameter in both places: its gradient is the sum of both",
    "embed.weight",
    "embed",
    calling(lambda f, m, v, ids: f(ids).detach()),
    direction="parameter",
)
