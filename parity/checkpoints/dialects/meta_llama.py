"""Meta's own Llama files: params.json, and tensors whose Q and K rows are in adjacent pairs.

params.json leaves much to Meta's code, which is another for each release. What a file leaves out is
settled here in one of three ways, never by a silent default: by the tensors (vocabulary, width of
the feed-forward, tying), by what no two releases share (the sizes, the base), with a note, or not
at all: then the file is refused, and the message says which key settles it. The spec read
rotates half-split pairs, so that a model has the same tensors whether it came as Meta's file or as
Hugging Face's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from jaxtwin.configs import BadInput, Block, Glu, Llama3, Model
from jaxtwin.configs.llama import llama
from jaxtwin.parity.checkpoints.dialects.base import Dialect, Fields, build_spec, differences
from jaxtwin.parity.table.row import Row

LAYER = "layers.{l}."

META_LLAMA = Dialect(
    name="meta-llama",
    pairs="adjacent",
    naming=(
        Row("embed.weight", "tok_embeddings.weight", "v d -> v d"),
        Row("layers.{l}.pre_attn.weight", LAYER + "attention_norm.weight", "d -> d"),
        Row(
            "layers.{l}.attn.q.weight",
            LAYER + "attention.wq.weight",
            "(n {theirs}) d -> (n {ours}) d",
        ),
        Row(
            "layers.{l}.attn.k.weight",
            LAYER + "attention.wk.weight",
            "(k {theirs}) d -> (k {ours}) d",
        ),
        Row("layers.{l}.attn.v.weight", LAYER + "attention.wv.weight", "(k h) d -> (k h) d"),
        Row("layers.{l}.attn.o.weight", LAYER + "attention.wo.weight", "d (n h) -> d (n h)"),
        Row("layers.{l}.pre_ffn.weight", LAYER + "ffn_norm.weight", "d -> d"),
        Row("layers.{l}.ffn.gate.weight", LAYER + "feed_forward.w1.weight", "f d -> f d"),
        Row("layers.{l}.ffn.up.weight", LAYER + "feed_forward.w3.weight", "f d -> f d"),
        Row("layers.{l}.ffn.down.weight", LAYER + "feed_forward.w2.weight", "d f -> d f"),
        Row("norm.weight", "norm.weight", "d -> d"),
        Row("head.weight", "output.weight", "v d -> v d"),
    ),
)

IGNORED = {"max_batch_size": "how text is generated"}
BASE = 10_000.0  # in the code of Llama 1 and 2, whose files do not name it
# (dim, n_layers, n_heads, n_kv_heads) of every model published with use_scaled_rope -> its factor,
# which neither the file nor the tensors hold (meta-llama/Llama-3.1-* and -3.2-*, config.json).
FACTORS = {
    (4_096, 32, 32, 8): 8.0,
    (8_192, 80, 64, 8): 8.0,
    (16_384, 126, 128, 8): 8.0,
    (2_048, 16, 32, 8): 32.0,
    (3_072, 28, 24, 8): 32.0,
}
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8_192  # constants of Meta's code, the same in 3.1 and 3.2
SCALED_LENGTH = 131_072


def from_meta(
    params: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    tied: bool,
    where: str,
    notes: list[str],
) -> Model:
    """The spec of a params.json and of the tensors' shapes; `notes` gets what it does not say.

    A BadInput names every setting that is missing, unknown or not settled, and a feed-forward whose
    width is not that of its tensor.
    """
    fields = Fields(params, where, fixed={"vocab_size": (-1,)}, ignored=IGNORED)
    d, layers, heads = (fields.positive_int(key) for key in ("dim", "n_layers", "n_heads"))
    kv = fields.positive_int("n_kv_heads", absent=heads)
    eps = fields.number("norm_eps")
    base = fields.number("rope_theta", absent=None)
    scaling = _scaling(fields, (d, layers, heads, kv), notes)
    sizes = {
        "vocab": _vocabulary(fields, shapes, notes),
        "hidden": _hidden(fields, d, shapes),
        "max_len": _length(fields, base, eps, scaling is not None, notes),
    }
    fields.finish()
    if base is None:
        base = BASE
        notes.append(f"{where} has no rope_theta: base {BASE}, as in the code of Llama 1 and 2")
    sizes |= {"d": d, "layers": layers, "heads": heads, "kv": kv, "base": base, "eps": eps}
    return build_spec(llama, where, **sizes, tied=tied, scaling=scaling, pairs="half")


def to_meta(spec: Model, notes: list[str]) -> dict[str, Any]:
    """The params.json of a spec, with no key that Meta's releases lack unless nothing else tells.

    BadInput where no params.json says the spec, naming the first difference.
    """
    first = spec.layers[0]
    attn, rope = first.attn, first.attn.rope
    if rope is None or not isinstance(first, Block) or not isinstance(first.ffn, Glu):
        raise BadInput("Meta's files are of Llamas, with rotary positions and a gated feed-forward")
    params: dict[str, Any] = {
        "dim": spec.d,
        "n_layers": len(spec.layers),
        "n_heads": attn.heads,
        "n_kv_heads": attn.kv,
        "vocab_size": spec.vocab,
        **_ffn_keys(spec.d, first.ffn.hidden),
        "norm_eps": getattr(spec.norm, "eps", None),
    }
    base: dict[str, Any] = {"rope_theta": rope.base}
    more: dict[str, Any] = {"max_seq_len": spec.max_len}
    if isinstance(rope.scaling, Llama3):
        base["use_scaled_rope"] = True
        more["rope_scaling_factor"] = rope.scaling.factor
        more["rope_high_freq_factor"] = rope.scaling.high

    def unlike(written: dict[str, Any]) -> list[tuple[str, str]]:
        return differences(spec, from_meta(written, {}, spec.tied, "params.json", []))

    for written in (params, {**params, **base}):  # as Llama 1 and 2 have it, and as Llama 3 does
        with contextlib.suppress(BadInput):  # no release is told by these
            if not unlike(written):
                return written
    written = {**params, **base, **more}
    if odd := unlike(written):
        raise BadInput(f"Meta's files say {odd[0][1]}, and this model has {odd[0][0]}")
    notes.append(f"params.json has {' and '.join(more)}, which not all of Meta's code knows")
    return written


def _ffn_keys(dim: int, hidden: int) -> dict[str, Any]:
    """What makes a feed-forward of this width: as in a release, else the multiplier that does."""
    for multiple, multiplier in ((256, None), (256, 1.5), (4_096, 1.3), (1_024, 1.3), (4_096, 1.2)):
        if ffn_width(dim, multiplier, multiple) == hidden:
            scale = {} if multiplier is None else {"ffn_dim_multiplier": multiplier}
            return {"multiple_of": multiple, **scale}
    return {"multiple_of": 1, "ffn_dim_multiplier": (hidden + 0.5) / int(2 * 4 * dim / 3)}


def ffn_width(dim: int, multiplier: float | None, multiple_of: int) -> int:
    """Meta's rule: two thirds of 4 dim, times the multiplier, up to a whole multiple."""
    hidden = int(2 * 4 * dim / 3)
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    return -(-hidden // multiple_of) * multiple_of


def _hidden(fields: Fields, dim: int | None, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    multiple = fields.positive_int("multiple_of")
    multiplier = fields.number("ffn_dim_multiplier", absent=None)
    name = "layers.0.feed_forward.w1.weight"
    if dim is None or multiple is None:
        return None
    hidden = ffn_width(dim, multiplier, multiple)
    if name in shapes and shapes[name][0] != hidden:
        fields.problems.append(
            f"multiple_of and ffn_dim_multiplier: they make a feed-forward of {hidden}, and {name} "
            f"has {shapes[name][0]}; is a consolidated file missing?"
        )
    return hidden


def _vocabulary(
    fields: Fields, shapes: Mapping[str, tuple[int, ...]], notes: list[str]
) -> int | None:
    """Llama 1 and 2 write -1, the tokenizer's size; the embedding has it too."""
    if fields.settings.get("vocab_size") != -1:
        return fields.positive_int("vocab_size")
    held = shapes.get("tok_embeddings.weight", (0,))[0]
    notes.append(f"vocab_size is -1: {held}, the rows of tok_embeddings.weight")
    return held


def _scaling(fields: Fields, sizes: tuple[int | None, ...], notes: list[str]) -> Llama3 | None:
    """Llama 3.1's frequencies; the factor is the file's, else that of the one model of such sizes.

    3.1 has 8 and 3.2 has 32, and params.json says use_scaled_rope of both.
    """
    scaled = fields.flag("use_scaled_rope", absent=False)
    factor = fields.number("rope_scaling_factor", absent=None)
    high = fields.number("rope_high_freq_factor", absent=HIGH)
    if not scaled:
        if factor is not None:
            fields.problems.append("rope_scaling_factor: given, and use_scaled_rope is not true")
        return None
    if factor is None:
        factor = FACTORS.get(sizes)  # type: ignore[arg-type]
        if factor is None:
            fields.problems.append(
                "use_scaled_rope: does not say by which factor, and no published Llama has these "
                "sizes; add rope_scaling_factor to the file (8 in Llama 3.1 and 3.3, 32 in 3.2)"
            )
            return None
        notes.append(
            f"use_scaled_rope says no factor: {factor}, that of the published Llama of these sizes"
        )
    if not factor or not high or high <= LOW:
        fields.problems.append(f"rope_scaling_factor and rope_high_freq_factor: {factor}, {high}")
        return None
    return Llama3(factor=factor, low=LOW, high=high, original=ORIGINAL)


def _length(
    fields: Fields, base: float | None, eps: float | None, scaled: bool, notes: list[str]
) -> int | None:
    """How many positions: not in the file, but each release has its own base, eps or scaling.

    It bounds the input and changes no number that is computed.
    """
    if (stated := fields.positive_int("max_seq_len", absent=None)) is not None:
        return stated
    releases: dict[tuple[float | None, float | None, bool], tuple[str, int]] = {
        (500_000.0, 1e-5, True): ("3.1 and later", SCALED_LENGTH),
        (500_000.0, 1e-5, False): ("3", 8_192),
        (None, 1e-5, False): ("2", 4_096),
        (None, 1e-6, False): ("1", 2_048),
    }
    if (base, eps, scaled) not in releases:
        fields.problems.append(
            "max_seq_len: missing, and base, eps and scaling are those of no release of Llama that "
            "would tell; add it to the file"
        )
        return None
    release, length = releases[base, eps, scaled]
    notes.append(f"no max_seq_len: {length} positions, those of Llama {release} by base and eps")
    return length
