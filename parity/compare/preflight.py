"""Before any tensor is computed: do the two sides start from the same thing?

Spec against spec, weights against weights (through the table, in torch's names and layout). What
differs is reported first, and where a known mistake turns one into the other, it is the cause.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxtwin.configs import Model
from jaxtwin.configs.spec import to_json
from jaxtwin.parity.report import metrics
from jaxtwin.parity.report.results import Difference

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Explanation:
    """How a difference came about: a cause's name, what the JAX side has, and what to change."""

    name: str
    about: str
    advice: str


def spec(torch: Model, jax: Model) -> list[Difference]:
    """Every field in which the two specs differ."""
    src, dst = dict(_flat(to_json(torch))), dict(_flat(to_json(jax)))
    odd = [
        field
        for field in sorted(src.keys() | dst.keys())
        if src.get(field, "absent") != dst.get(field, "absent")
    ]
    # Where one side has a part and the other none, the part is the difference, not its fields; and
    # where a list is longer, its length.
    parts = [part + "." for part in odd]
    for field in odd:
        if field.endswith(".length") and field in src and field in dst:
            few, many = sorted((src[field], dst[field]))
            parts += [field.removesuffix("length") + f"{i}." for i in range(few, many)]
    shown = [(field, _shown(src, field), _shown(dst, field)) for field in odd]
    return [
        Difference("spec", field, t, j)
        for field, t, j in shown
        if t != j and not field.startswith(tuple(parts))
    ]


def _flat(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _flat(value, f"{path}.{key}" if path else key)
    elif isinstance(data, list):
        yield f"{path}.length", len(data)
        for i, value in enumerate(data):
            yield from _flat(value, f"{path}.{i}")
    else:
        yield path, data


def _shown(flat: Mapping[str, Any], field: str) -> str:
    if any(name.startswith(field + ".") for name in flat):
        return "present"
    return "absent" if flat.get(field) is None else str(flat[field])


FIELDS = {
    "rope.pairs": Explanation("rope-pairing", "turns {jax} pairs", "turn {torch} pairs"),
    "rope.base": Explanation("rope-base", "uses the RoPE base {jax}", "use the base {torch}"),
    "rope": Explanation("rope-missing", "has rotary positions {jax}", "make them {torch}"),
    "eps": Explanation("norm-eps", "uses the norm eps {jax}", "use the eps {torch}"),
    "act": Explanation("activation", "uses the activation {jax}", "use {torch}"),
    "tied": Explanation("head-untied", "has tied={jax}", "set tied={torch}"),
}


def field_explanation(difference: Difference) -> Explanation:
    """The cause that a differing field of the spec is."""
    field = difference.place
    known = [name for name in FIELDS if field.endswith("." + name) or field == name]
    explanation = FIELDS[max(known, key=len)] if known else None
    if explanation is None:
        name = field.rsplit(".", 1)[-1]
        explanation = Explanation(f"spec-{name}", "has " + name + " {jax}", "set it to {torch}")
    values = {"torch": difference.torch, "jax": difference.jax}
    return Explanation(
        explanation.name, explanation.about.format(**values), explanation.advice.format(**values)
    )


def weights(
    spec: Model | None,
    torch: Arrays,
    jax: Arrays,
    stored: Mapping[str, np.dtype] | None = None,
) -> list[tuple[Difference, Explanation | None]]:
    """Every tensor that is not the same, bit for bit, and the mistake behind it where it is known.

    Both are named and laid out as torch's. Without a spec nothing is known of heads. `stored` are
    the dtypes that the values came in, where these are wider: hashes and roundings are of those.
    """
    out = []
    for name in [n for n in torch if n in jax]:
        want, got = torch[name], jax[name]
        if stored is not None:
            want, got = (narrowed(x, stored[name]) for x in (want, got))
        if want.dtype == got.dtype and want.shape == got.shape and _bytes(want) == _bytes(got):
            continue
        explanation = (
            explanation_of(spec, name, want, got, torch) if want.shape == got.shape else None
        )
        about = explanation.about.removeprefix("differs: ") if explanation else _where(want, got)
        out.append((Difference("weight", name, _print(want), _print(got), about), explanation))
    for name in sorted(torch.keys() ^ jax.keys()):
        side = (_print(torch[name]), "absent") if name in torch else ("absent", _print(jax[name]))
        out.append((Difference("weight", name, *side), None))
    return out


def narrowed(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """In that dtype, if no value changes."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = x.astype(dtype)
        return narrow if np.array_equal(narrow.astype(x.dtype), x, equal_nan=True) else x


def _bytes(x: np.ndarray) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def _print(x: np.ndarray) -> str:
    shape = " x ".join(map(str, x.shape))
    return f"{shape} {x.dtype} sha256 {hashlib.sha256(_bytes(x)).hexdigest()[:12]}"


def _where(want: np.ndarray, got: np.ndarray) -> str:
    if want.shape != got.shape:
        return f"expected shape {want.shape}, got {got.shape}"
    wide = [x.astype(np.float64) for x in (got, want)]
    unlike = ~((wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1])))
    if not unlike.any():
        return "signs of zero, or bits of a NaN, differ"
    with np.errstate(invalid="ignore"):
        gap = np.abs(wide[0] - wide[1])
    gap[unlike & np.isnan(gap)] = np.inf  # a NaN, or an infinity, on one side alone
    at = tuple(int(i) for i in np.unravel_index(np.where(unlike, gap, -1).argmax(), gap.shape))
    return (
        f"{int(unlike.sum())} of {gap.size} elements differ, most at {list(at)}: "
        f"expected {want[at]}, got {got[at]} (relative L2 {metrics.relative_l2(got, want):.2e})"
    )


# ---- mistakes -----------------------------------------------------------------------------------


def explanation_of(
    spec: Model | None, name: str, want: np.ndarray, got: np.ndarray, others: Arrays
) -> Explanation | None:
    """The mistake that turns the tensor `want` into `got`, or None."""
    for other, x in others.items():
        if other != name and x.shape == got.shape and _same(x, got):
            return _exchanged(name, other)
    heads = _heads(spec, name) if spec is not None else None
    for known, about, change in _changes(heads, want):
        if _same(change, got):
            return Explanation(known, about, ADVICE[known])
    return _numbers(want, got) or _reordered(want, got, heads)


ADVICE = {
    "transposed": "transpose it: torch's Linear stores (out, in), a Flax kernel (in, out)",
    "rope-pairing-weights": "permute each head's rows, or use the other rotary pairing",
    "head-order": "split the rows as (head width), head first",
    "layer-order": "match layers by their number",
    "weights-swapped": "exchange the two",
    "norm-plus-one": "store w and let the forward add the one, or neither",
    "rounded": "keep the stored dtype from end to end",
    "constant": "load the checkpoint's tensor: this one was left at its initial value",
    "scaled-weight": "store the weight as it is and scale in the forward",
    "heads-rotated": "keep the heads in their order",
    "rows-reordered": "keep the rows in their order",
    "columns-reordered": "keep the columns in their order",
    "one-element": "copy the tensor again: single elements were changed",
}


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    return x.shape == y.shape and bool((x == y).all())


def _exchanged(name: str, other: str) -> Explanation:
    from jaxtwin.parity.sides.probes import layer, part

    if part(name) == part(other) and layer(name) != layer(other):
        return Explanation(
            "layer-order", f"holds layer {layer(other)}'s tensor", ADVICE["layer-order"]
        )
    return Explanation("weights-swapped", f"holds {other}", ADVICE["weights-swapped"])


PROJECTIONS = [f"attn.{x}.weight" for x in "qkvo"] + [f"attn.{x}.bias" for x in "qkv"]


def _heads(spec: Model, name: str) -> tuple[int, int, int] | None:
    """Heads, head width and the axis that has them, of a projection of attention."""
    from jaxtwin.parity.sides.probes import layer, part

    if layer(name) is None or part(name) not in PROJECTIONS:
        return None
    attn = spec.layers[layer(name) or 0].attn
    which = part(name).split(".")[1]
    return (attn.kv if which in "kv" else attn.heads), attn.width, int(which == "o")


def _changes(
    heads: tuple[int, int, int] | None, want: np.ndarray
) -> Iterator[tuple[str, str, np.ndarray]]:
    if want.ndim == 2 and want.shape[0] == want.shape[1]:
        yield "transposed", "is transposed (a square matrix hides it)", want.T
    if heads is not None:
        n, h, axis = heads
        x = np.moveaxis(want, axis, 0)
        rest = x.shape[1:]
        split = x.reshape(n, h, *rest)

        def back(y: np.ndarray) -> np.ndarray:
            return np.moveaxis(y.reshape(n * h, *rest), 0, axis)

        yield "head-order", "has (head, width) as (width, head)", back(split.swapaxes(0, 1))
        flat = x.reshape(h, n, *rest)
        yield "head-order", "has (width, head) as (head, width)", back(flat.swapaxes(0, 1))
        if h % 2 == 0 and axis == 0:
            pairs = split.reshape(n, h // 2, 2, *rest).swapaxes(1, 2)
            yield "rope-pairing-weights", "has adjacent rotary rows as halves", back(pairs)
            pairs = split.reshape(n, 2, h // 2, *rest).swapaxes(1, 2)
            yield "rope-pairing-weights", "has half-split rotary rows as adjacent", back(pairs)
        for by in range(1, n):
            about = f"has its heads {by} place{'s' * (by > 1)} on"
            yield "heads-rotated", about, back(np.roll(split, by, axis=0))
    yield "norm-plus-one", "is w + 1", want + np.asarray(1, want.dtype)
    yield "norm-plus-one", "is w - 1", want - np.asarray(1, want.dtype)
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float32):
        if np.dtype(dtype).itemsize < want.dtype.itemsize:
            about = f"went through {np.dtype(dtype)}"
            yield "rounded", about, want.astype(dtype).astype(want.dtype)


def _numbers(want: np.ndarray, got: np.ndarray) -> Explanation | None:
    """Mistakes of value: left constant, multiplied by a number, a few elements changed."""
    if got.size > 1 and (got == got.flat[0]).all():
        return Explanation("constant", f"is {got.flat[0]} everywhere", ADVICE["constant"])
    scale, rest = metrics.best_fit(got, want)
    if rest < 1e-2 * abs(scale - 1) and rest < float(ml_dtypes.finfo(want.dtype).eps):
        return Explanation(
            "scaled-weight", f"is multiplied by {scale:.6g}", ADVICE["scaled-weight"]
        )
    changed = int((got != want).sum())
    if changed <= max(1, want.size // 100):
        return Explanation("one-element", f"differs: {_where(want, got)}", ADVICE["one-element"])
    return None


def _reordered(
    want: np.ndarray, got: np.ndarray, heads: tuple[int, int, int] | None
) -> Explanation | None:
    """The same rows, or columns, in another order."""
    for name, axis in (("rows-reordered", 0), ("columns-reordered", 1)):
        if axis < want.ndim:
            a, b = (np.moveaxis(x, axis, 0) for x in (want, got))
            if sorted(map(_bytes, a)) == sorted(map(_bytes, b)):
                moved = int(sum(_bytes(x) != _bytes(y) for x, y in zip(a, b, strict=True)))
                what = "rows" if axis == 0 else "columns"
                return Explanation(
                    name, f"has {moved} of {len(a)} {what} in other places", ADVICE[name]
                )
    return None
