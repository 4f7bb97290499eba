"""Mistakes that people make in a decoder's forward pass, as things the reference can be made to do.

The JAX side may be any function: nobody can reach into it and mend it. But the reference can be
made to commit the same mistake, and where it then agrees, the mistake is the cause. Each one here
is written in torch, apart from the faults that `faults.py` makes in JAX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchref.ffn import ACTIVATIONS
from torchref.position import PAIRS

Forward = Callable[..., Any]
ANY = "*"  # any part whose module the mistake can be made in
NORM_SLOTS = ("pre_attn", "post_attn", "pre_ffn", "post_ffn", "norm")
ROTATED = ("attn.q", "attn.k")


@dataclass(frozen=True)
class Mistake:
    """One mistake in one kind of module.

    `parts` are the probes that show it when every part is fed the reference's input, and `module`
    is what is edited, named within its layer ("{part}": the part itself). `values` are what it may
    depend on (a base, a scale): tried in turn or, with `fits`, searched between them.
    """

    name: str
    about: str
    advice: str
    parts: tuple[str, ...]
    module: str
    edit: Callable[[nn.Module, Any], None]
    values: Callable[[nn.Module], Sequence[Any]] = lambda module: (None,)
    fits: bool = False
    direction: str = "forward"
    rounds: str = ""  # a dtype: it only costs digits, and two frameworks lose different ones


@dataclass(frozen=True)
class Edit:
    """A mistake at a place: modules by name, and its value."""

    mistake: Mistake
    modules: tuple[str, ...]
    value: Any = None

    def say(self, text: str) -> str:
        value = f"{self.value:.6g}" if isinstance(self.value, float) else str(self.value)
        return text.replace("{}", value)


@contextlib.contextmanager
def edited(model: nn.Module, edits: Sequence[Edit]) -> Iterator[None]:
    """Within: the model makes these mistakes."""
    saved = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        for edit in edits:
            for name in edit.modules:
                edit.mistake.edit(model.get_submodule(name), edit.value)
        yield
    finally:
        for module, state in saved:
            module.__dict__.clear()
            module.__dict__.update(state)


MISTAKES: list[Mistake] = []


def _add(
    name: str, about: str, advice: str, parts: Any, module: str, edit: Any, **how: Any
) -> None:
    parts = (parts,) if isinstance(parts, str) else tuple(parts)
    MISTAKES.append(Mistake(name, about, advice, parts, module, edit, **how))


def calling(call: Callable[..., Any]) -> Callable[[nn.Module, Any], None]:
    """The module answers with call(its forward, itself, the value, *its arguments)."""

    def edit(module: nn.Module, value: Any) -> None:
        inner = module.forward
        module.__dict__["forward"] = lambda *args: call(inner, module, value, *args)

    return edit


def setting(**values: Callable[[Any, Any], Any]) -> Callable[[nn.Module, Any], None]:
    """Attributes of the module, from (module, value)."""

    def edit(module: nn.Module, value: Any) -> None:
        module.__dict__.update({name: make(module, value) for name, make in values.items()})

    return edit


def _kind(*names: str) -> Callable[[nn.Module], Sequence[Any]]:
    """The mistake is possible in modules of these classes alone."""
    return lambda module: (None,) if type(module).__name__ in names else ()


# ---- positions ----------------------------------------------------------------------------------


def _rotary(*values: Any) -> Callable[[nn.Module], Sequence[Any]]:
    return lambda m: values if type(m).__name__ == "Rotary" else ()


def _other_pairs(module: Any, value: Any, at: int) -> Any:
    other = {"split_adjacent": "half", "split_half": "adjacent"}[module.split.__name__]
    return PAIRS[other][at]


def _based(module: Any, base: float) -> list[float]:
    width = 2 * len(module.frequency)
    return [base ** (-i / width) for i in range(0, width, 2)]


_add(
    "rope-pairing",
    "turns the other coordinate pairs (adjacent where half-split belongs, or the reverse)",
    "use the pairing that the weights were stored for, or permute the rows of q and k",
    ROTATED,
    "attn.rotate",
    setting(split=lambda m, v: _other_pairs(m, v, 0), join=lambda m, v: _other_pairs(m, v, 1)),
    values=_rotary(None),
)
_add(
    "rope-missing",
    "does not rotate q and k",
    "apply rotary positions to q and k in these layers",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: x),
    values=_rotary(None),
)
_add(
    "rope-backwards",
    "turns q and k the wrong way (the sign of the angle)",
    "check the sign of sin: first * cos - second * sin, first * sin + second * cos",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: f(x, -at)),
    values=_rotary(None),
)
_add(
    "position-offset",
    "takes angles from positions that are {} places off",
    "count positions from 0, in every segment",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: f(x, at + v)),
    values=_rotary(1, -1, 2, -2),
)
_add(
    "position-off-by-one",
    "counts every position after the first one place too far",
    "count positions from 0 without a gap",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: f(x, at + (at > 0))),
    values=_rotary(None),
)
_add(
    "positions-ignored",
    "counts positions by slot, whatever positions it is given",
    "take the angles from the positions argument: padding and packing start again at 0",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: f(x, torch.arange(at.shape[1]).expand_as(at))),
    values=_rotary(None),
)
_add(
    "rope-float32",
    "computes the rotation in float32",
    "keep angles, cos and sin in the input's dtype where that is float64",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: f(x.float(), at).to(x.dtype)),
    values=_rotary(None),
    rounds="float32",
)


def _narrow(module: Any, width: int, x: Tensor, at: Tensor) -> Tensor:
    """The first coordinates alone, turned as a head of that width would be."""
    base = module.frequency[1] ** -len(module.frequency)
    angle = at[..., None].to(x.dtype) * torch.tensor(
        [base ** (-i / width) for i in range(0, width, 2)], dtype=x.dtype
    )
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    first, second = module.split(x)
    return module.join(first * cos - second * sin, first * sin + second * cos)


_add(
    "rope-partial",
    "turns only the first {} coordinates of a head",
    "rotate the whole head width",
    ROTATED,
    "attn.rotate",
    calling(lambda f, m, v, x, at: torch.cat((_narrow(m, v, x[..., :v], at), x[..., v:]), -1)),
    values=lambda m: (
        list(range(2, 2 * len(m.frequency), 2)) if type(m).__name__ == "Rotary" else ()
    ),
)
_add(
    "rope-base",
    "uses the RoPE base {}",
    "read the base from the checkpoint's own configuration",
    ROTATED,
    "attn.rotate",
    setting(frequency=_based),
    values=_rotary(*(10.0**e for e in (1, 2, 3, 3.5, 4, 4.25, 4.5, 5, 5.5, 6, 6.5, 7, 8))),
    fits=True,
)
_add(
    "position-scaled",
    "multiplies positions by {}",
    "remove the scaling of positions (or give the reference the same rope scaling)",
    ROTATED,
    "attn.rotate",
    setting(frequency=lambda m, v: [v * f for f in m.frequency]),
    values=_rotary(*(2.0**e for e in range(-6, 4))),
    fits=True,
)


# ---- attention ----------------------------------------------------------------------------------


def attend(
    m: Any,
    x: Tensor,
    at: Tensor,
    mask: Tensor,
    *,
    scale: float | None = None,
    tile: bool = False,
    cap: float | None = None,
    narrow: torch.dtype | None = None,
) -> Tensor:
    """torchref's attention, with what may be wrong in it laid open."""
    b, t, _ = x.shape
    q = m.q(x).view(b, t, m.heads, m.width)
    k = m.k(x).view(b, t, m.kv, m.width)
    v = m.v(x).view(b, t, m.kv, m.width)
    q, k = m.rotate(q, at), m.rotate(k, at)
    groups = m.heads // m.kv
    if tile:
        k, v = k.repeat(1, 1, groups, 1), v.repeat(1, 1, groups, 1)
    else:
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * (m.width**-0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min)
    weights = scores.to(narrow or scores.dtype).softmax(-1).to(x.dtype)
    mixed = torch.einsum("bnts,bsnh->btnh", weights, v)
    return m.o(mixed.reshape(b, t, -1))


def _attending(**how: Any) -> Callable[[nn.Module, Any], None]:
    def call(f: Forward, m: Any, value: Any, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        chosen = {k: make(m, value) if callable(make) else make for k, make in how.items()}
        return attend(m, x, at, mask, **chosen)

    return calling(call)


def _masked(change: Callable[[Tensor, Any], Tensor]) -> Callable[[nn.Module, Any], None]:
    return calling(lambda f, m, v, x, at, mask: f(x, at, change(mask, v)))


def _grouped(m: Any) -> Sequence[Any]:
    return (None,) if m.heads > m.kv > 1 else ()


def _causal(mask: Tensor) -> Tensor:
    return torch.ones_like(mask).tril()


def _later(mask: Tensor) -> Tensor:
    return mask | F.pad(mask[:, :, :-1], (1, 0))


def _near(mask: Tensor, window: int) -> Tensor:
    return mask & torch.ones_like(mask).triu(1 - window)


def _windows(m: Any) -> Sequence[int]:
    return (1, 2, 3, 4, 6, 8, 12, 16, 24, 31, 32, 33, 48, 64, 96, 127, 128, 129, 256)


def _turning_values(f: Forward, m: Any, value: Any, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
    """The values rotated where they are made."""
    inner = m.v.forward

    def turned(x: Tensor) -> Tensor:
        v = inner(x).view(*x.shape[:2], m.kv, m.width)
        return type(m.rotate).forward(m.rotate, v, at).flatten(-2)

    m.v.__dict__["forward"] = turned
    try:
        return f(x, at, mask)
    finally:
        m.v.__dict__["forward"] = inner


MIXED = "attn.mixed"
_add(
    "tile-not-repeat",
    "tiles the key/value heads (0 1 0 1) instead of repeating each (0 0 1 1)",
    "let K/V head j serve the query heads j n/k ... (j+1) n/k - 1: repeat, not tile",
    MIXED,
    "attn",
    _attending(tile=True),
    values=_grouped,
)
_add(
    "scale-missing",
    "does not divide the scores by sqrt(head width)",
    "multiply the scores by head width ** -0.5",
    MIXED,
    "attn",
    _attending(scale=1.0),
)
_add(
    "causal-corner",
    "lets each token see the one after it",
    "mask with key position <= query position: the diagonal is the last one seen",
    MIXED,
    "attn",
    _masked(lambda mask, v: _later(mask)),
)
_add(
    "not-causal",
    "lets every token see the whole sequence",
    "apply the causal mask",
    MIXED,
    "attn",
    _masked(lambda mask, v: torch.ones_like(mask)),
)
_add(
    "diagonal-hidden",
    "hides each token from itself",
    "mask with key position <= query position, not <",
    MIXED,
    "attn",
    _masked(lambda mask, v: mask & torch.ones_like(mask).tril(-1)),
)
_add(
    "documents-leak",
    "lets packed documents (and padding) see each other",
    "mask by segment as well: positions that start again do not block attention",
    MIXED,
    "attn",
    _masked(lambda mask, v: _causal(mask)),
)
_add(
    "window",
    "sees only the last {} tokens",
    "remove the sliding window (or count the query itself in it: W keys in all)",
    MIXED,
    "attn",
    _masked(_near),
    values=_windows,
)
_add(
    "rope-on-values",
    "rotates the values too",
    "rotate q and k, never v",
    ("attn.v",),
    "attn",
    calling(_turning_values),
    values=lambda m: (None,) if type(m.rotate).__name__ == "Rotary" else (),
)
_add(
    "softmax-float32",
    "computes the softmax in float32",
    "keep scores and softmax in float64 where the input is",
    MIXED,
    "attn",
    _attending(narrow=torch.float32),
    rounds="float32",
)
_add(
    "softmax-bfloat16",
    "computes the softmax in bfloat16",
    "compute scores and softmax in float32 at least",
    MIXED,
    "attn",
    _attending(narrow=torch.bfloat16),
    rounds="bfloat16",
)
_add(
    "scale-off",
    "multiplies the scores by {}",
    "multiply the scores by head width ** -0.5 (or by the scale in the configuration)",
    MIXED,
    "attn",
    _attending(scale=lambda m, v: v),
    values=lambda m: [m.width**-0.5 * 2.0**e for e in range(-5, 6)],
    fits=True,
)
_add(
    "soft-cap",
    "caps the scores at {} by a tanh",
    "remove the soft-cap of the scores",
    MIXED,
    "attn",
    _attending(cap=lambda m, v: v),
    values=lambda m: [2.0**e for e in range(-3, 9)],
    fits=True,
)

# ---- norms --------------------------------------------------------------------------------------


def _unit(m: Any, x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _norm(name: str, about: str, advice: str, call: Any, **how: Any) -> None:
    values = how.pop("values", lambda m: (None,))
    _add(
        name,
        about,
        advice,
        NORM_SLOTS,
        "{part}",
        calling(lambda f, m, v, x: call(m, v, x)),
        values=lambda m: values(m) if type(m).__name__ == "RMSNorm" else (),
        **how,
    )


_norm(
    "layer-norm",
    "subtracts the mean (LayerNorm where RMSNorm belongs)",
    "use RMSNorm: no mean is subtracted",
    lambda m, v, x: _unit(m, x - x.mean(-1, keepdim=True), m.eps) * m.weight,
)
_norm(
    "norm-plus-one",
    "scales by 1 + w where w is stored",
    "scale by the stored weight (the unit offset is Gemma's)",
    lambda m, v, x: _unit(m, x, m.eps) * (1 + m.weight),
)
_norm(
    "norm-scale-missing",
    "does not apply the norm's scale",
    "multiply by the stored weight",
    lambda m, v, x: _unit(m, x, m.eps),
)
_norm(
    "norm-missing",
    "leaves the norm out",
    "apply the norm here",
    lambda m, v, x: x,
)
_norm(
    "norm-eps-outside",
    "adds eps to the root and not under it",
    "x * rsqrt(mean(x^2) + eps)",
    lambda m, v, x: x / (x.square().mean(-1, keepdim=True).sqrt() + m.eps) * m.weight,
)
_norm(
    "norm-sum",
    "divides by the root of the sum of squares and not of their mean",
    "take the mean over the width",
    lambda m, v, x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + m.eps) * m.weight,
)
_norm(
    "norm-float32",
    "computes the norm in float32",
    "keep float64 where the input is",
    lambda m, v, x: (_unit(m, x.float(), m.eps) * m.weight.float()).to(x.dtype),
    rounds="float32",
)
_norm(
    "norm-eps",
    "uses the norm eps {}",
    "read the eps from the checkpoint's own configuration",
    lambda m, v, x: _unit(m, x, v) * m.weight,
    values=lambda m: [10.0**e for e in range(-12, 1)],
    fits=True,
)

# ---- feed-forward -------------------------------------------------------------------------------

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "none": lambda x: x,
}
_add(
    "activation",
    "uses the activation {}",
    "use the activation that the configuration names",
    "ffn",
    "ffn",
    setting(act=lambda m, v: ACTS[v]),
    values=lambda m: [name for name, act in ACTS.items() if act is not m.act],
)
_add(
    "activation-on-up",
    "activates up where gate belongs (the two matrices exchanged)",
    "down(act(gate x) * up x): exchange gate and up",
    "ffn",
    "ffn",
    calling(lambda f, m, v, x: m.down(m.gate(x) * m.act(m.up(x)))),
)
_add(
    "gate-missing",
    "leaves the gate out",
    "down(act(gate x) * up x)",
    "ffn",
    "ffn",
    calling(lambda f, m, v, x: m.down(m.act(m.up(x)))),
)

# ---- any part -----------------------------------------------------------------------------------

_add(
    "input-added",
    "adds what the part was given to what it returns (the residual stream twice)",
    "add the residual once, outside the part",
    ("attn", "ffn"),
    "{part}",
    calling(lambda f, m, v, x, *more: f(x, *more) + x),
)
_add(
    "dropped",
    "returns zeros: the part is left out",
    "call the part and add what it returns",
    ("embed", "attn", "ffn", "head"),
    "{part}",
    calling(lambda f, m, v, *args: 0 * f(*args)),
)
_add(
    "output-float32",
    "computes in float32",
    "keep float64 where the input is",
    ("attn", "ffn", "head", "embed"),
    "{part}",
    calling(lambda f, m, v, *args: f(*args).float().to(f(*args).dtype)),
    rounds="float32",
)
_add(
    "scaled",
    "multiplies what the part returns by {}",
    "remove the factor (an embedding scale, a logit temperature, a residual multiplier), or give "
    "it to the reference too",
    ("embed", "attn", "ffn", "head", *NORM_SLOTS, ANY),
    "{part}",
    calling(lambda f, m, v, *args: v * f(*args)),
    values=lambda m: [
        -(2.0**3),
        -2.0,
        -0.5,
        0.03,
        0.125,
        0.5,
        0.9,
        1.1,
        2.0,
        4.0,
        8.0,
        32.0,
        128.0,
    ],
    fits=True,
)
_add(
    "logit-soft-cap",
    "caps the logits at {} by a tanh",
    "remove the cap of the logits",
    "head",
    "head",
    calling(lambda f, m, v, *args: v * torch.tanh(f(*args) / v)),
    values=lambda m: [2.0**e for e in range(-3, 9)],
    fits=True,
)

# ---- torch's own modules, in a model of another kind --------------------------------------------

_add(
    "gelu-flavour",
    "uses the {} GELU",
    "torch's nn.GELU is exact, jax.nn.gelu the tanh approximation unless approximate=False",
    ANY,
    "{part}",
    setting(approximate=lambda m, v: v),
    values=lambda m: (
        [v for v in ("none", "tanh") if v != m.approximate] if isinstance(m, nn.GELU) else ()
    ),
)
_add(
    "layer-norm-eps",
    "uses the layer norm eps {}",
    "torch's nn.LayerNorm has 1e-5, Flax's 1e-6: give it",
    ANY,
    "{part}",
    setting(eps=lambda m, v: v),
    values=lambda m: [10.0**e for e in range(-12, 1)] if isinstance(m, nn.LayerNorm) else (),
    fits=True,
)
_add(
    "bias-missing",
    "leaves the bias out",
    "add the bias",
    ANY,
    "{part}",
    calling(lambda f, m, v, x: F.linear(x, m.weight)),
    values=lambda m: (None,) if isinstance(m, nn.Linear) and m.bias is not None else (),
)
_add(
    "matrix-transposed",
    "multiplies by the transposed matrix",
    "torch's Linear stores (out, in): x @ weight.T",
    ANY,
    "{part}",
    calling(lambda f, m, v, x: F.linear(x, m.weight.T, m.bias)),
    values=lambda m: (
        (None,) if isinstance(m, nn.Linear) and m.in_features == m.out_features else ()
    ),
)

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


_add(
    "residual-dropped",
    "does not add the residual stream",
    "x + attention, then + feed-forward",
    "mid",
    "",
    _wired(lambda x, part: part, _last),
)
_add(
    "residual-doubled",
    "adds the residual stream twice",
    "add it once",
    "mid",
    "",
    _wired(lambda x, part: 2 * x + part, _last),
)
_add(
    "residual-dropped",
    "does not add the residual stream",
    "x + attention, then + feed-forward",
    "out",
    "",
    _wired(_plus, lambda x, y, part: part),
)
_add(
    "residual-doubled",
    "adds the residual stream twice",
    "add it once",
    "out",
    "",
    _wired(_plus, lambda x, y, part: 2 * y + part),
)
_add(
    "residual-from-before",
    "adds the feed-forward to the stream as it was before attention",
    "add it to the stream that has the attention in it",
    "out",
    "",
    _wired(_plus, lambda x, y, part: x + part),
)


_add(
    "parallel-residual",
    "feeds the feed-forward from before attention (a parallel block)",
    "let the feed-forward read the stream that has the attention in it",
    "pre_ffn",
    "",
    calling(lambda f, m, v, x, at, mask: _fed_before(m, x, at, mask)),
)


def _fed_before(m: Any, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
    y = x + m.post_attn(m.attn(m.pre_attn(x), at, mask))
    inner = m.pre_ffn.forward
    m.pre_ffn.__dict__["forward"] = lambda given: inner(x)
    try:
        return y + m.post_ffn(m.ffn(m.pre_ffn(y)))
    finally:
        del m.pre_ffn.__dict__["forward"]


# ---- the backward pass --------------------------------------------------------------------------

for _part, _probe in (
    ("attn", "attn.mixed"),
    ("ffn", "pre_ffn"),
    ("pre_attn", "out"),
    ("pre_ffn", "mid"),
):
    _add(
        "gradient-stopped",
        f"lets no gradient through {_part}",
        "remove the stop_gradient (or the conversion that loses the gradient)",
        _probe,
        _part,
        calling(lambda f, m, v, *args: f(*args).detach()),
        direction="backward",
    )
_add(
    "head-untied",
    "gives the embedding no gradient from its use as the head",
    "use one parameter in both places: its gradient is the sum of both",
    "embed.weight",
    "head",
    calling(lambda f, m, v, x, embed: x @ embed.weight.detach().T),
    values=_kind("TiedHead"),
    direction="parameter",
)
_add(
    "embedding-frozen",
    "gives the embedding no gradient from its use as the input",
    "use one parameter in both places: its gradient is the sum of both",
    "embed.weight",
    "embed",
    calling(lambda f, m, v, ids: f(ids).detach()),
    direction="parameter",
)
