"""Mistakes of how the parts are put together, and of what flows back through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from jaxtwin.configs.dataflow import IN, WIRING
from jaxtwin.configs.spec import Block
from jaxtwin.parity.diagnose.hypotheses.base import (
    Forward,
    add,
    calling,
    changing,
    only_in,
    setting,
)
from jaxtwin.torchref import block as torchref
from jaxtwin.torchref.aux import NO_AUX, Aux
from jaxtwin.torchref.model import TiedHead

SPECS = {part: spec for spec, part in torchref.BLOCKS.items()}

# ---- the residual stream ------------------------------------------------------------------------


Values = Mapping[str, Tensor]  # of a layer's forward pass so far, by the names of its steps


def _rewired(**changes: Callable[[Any, Values], Tensor]) -> Callable[[nn.Module, Any], None]:
    """A block in which the sums of these names are change(block, the values so far) instead."""

    def call(f: Forward, m: Any, v: Any, x: Tensor, at: Tensor, mask: Tensor) -> tuple[Tensor, Aux]:
        values, aux = {IN: x}, NO_AUX
        for step in WIRING[SPECS[type(m)]]:
            inputs = [values[name] for name in step.inputs]
            if step.name in changes:
                y = changes[step.name](m, values)
            elif step.parts == ("attn",):
                y = m.attn(*inputs, at, mask)
            elif step.parts == ("ffn",):
                y, aux = m.ffn(*inputs)
            elif step.parts:
                y = getattr(m, step.parts[0])(*inputs)
            else:
                y = getattr(m, "alpha", 1.0) * inputs[0] + inputs[1]
            values[step.name] = y
        return values["out"], aux

    return calling(call)


for _sum in ("mid", "out"):
    _stream, _part = next(step.inputs for step in WIRING[Block] if step.name == _sum)
    add(
        "residual-dropped",
        "does not add the residual stream",
        "x + attention, then + feed-forward",
        _sum,
        "",
        _rewired(**{_sum: lambda m, values, part=_part: values[part]}),
        values=only_in(torchref.Block),
    )
    add(
        "residual-doubled",
        "adds the residual stream twice",
        "add it once",
        _sum,
        "",
        _rewired(**{_sum: lambda m, values, x=_stream, part=_part: 2 * values[x] + values[part]}),
        values=only_in(torchref.Block),
    )
add(
    "residual-from-before",
    "adds the feed-forward to the stream as it was before attention",
    "add it to the stream that has the attention in it",
    "out",
    "",
    _rewired(out=lambda m, values: values[IN] + values["post_ffn"]),
    values=only_in(torchref.Block),
)


def _fed_before(f: Forward, m: Any, v: Any, x: Tensor, at: Tensor, mask: Tensor) -> Any:
    inner = m.pre_ffn.forward
    m.pre_ffn.__dict__["forward"] = lambda mid: inner(x)
    try:
        return f(x, at, mask)
    finally:
        del m.pre_ffn.__dict__["forward"]


add(
    "parallel-residual",
    "feeds the feed-forward from before attention (a parallel block)",
    "let the feed-forward read the stream that has the attention in it",
    "pre_ffn",
    "",
    calling(_fed_before),
    values=only_in(torchref.Block),
)
for _sum, _part in (("summed", "attn"), ("total", "ffn")):
    add(
        "residual-dropped",
        "does not add the residual stream",
        "norm the sum of the stream and the part",
        _sum,
        "",
        _rewired(**{_sum: lambda m, values, part=_part: values[part]}),
        values=only_in(torchref.PostBlock),
    )
add(
    "residual-scale-missing",
    "does not multiply the residual stream by alpha",
    "alpha * x + part, then the norm (DeepNorm)",
    ("summed", "total"),
    "",
    setting(alpha=lambda m, v: 1.0),
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
        changing(lambda m, v, y: y.detach()),
        direction="backward",
    )
add(
    "head-untied",
    "gives the embedding no gradient from its use as the head",
    "use one parameter in both places: its gradient is the sum of both",
    "embed.weight",
    "head",
    calling(lambda f, m, v, x, embed: x @ embed.weight.detach().T),
    values=only_in(TiedHead),
    direction="parameter",
)
add(
    "embedding-frozen",
    "gives the embedding no gradient from its use as the input",
    "use one parameter in both places: its gradient is the sum of both",
    "embed.weight",
    "embed",
    changing(lambda m, v, y: y.detach()),
    direction="parameter",
)
