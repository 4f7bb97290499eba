"""Hugging Face's Llama: tensor names, Q and K rows in half-split pairs, and config.json.

The config is read strictly: every key is taken, or is known to change nothing, or is refused by
name. Both spellings of the rotary base are read (transformers 4: rope_theta beside rope_scaling;
transformers 5: rope_parameters) and both are written, so that either version reads what we write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from configs import BadInput, Model, Run
from configs.llama import llama
from configs.spec import to_json
from parity.dialects.base import Dialect, Fields, is_number, made
from parity.table import Row

LAYER = "model.layers.{l}."

HF_LLAMA = Dialect(
    name="hf-llama",
    pairs="half",
    naming=(
        Row("embed.weight", "model.embed_tokens.weight", "v d -> v d"),
        Row("layers.{l}.pre_attn.weight", LAYER + "input_layernorm.weight", "d -> d"),
        Row(
            "layers.{l}.attn.q.weight",
            LAYER + "self_attn.q_proj.weight",
            "(n {theirs}) d -> (n {ours}) d",
        ),
        Row(
            "layers.{l}.attn.k.weight",
            LAYER + "self_attn.k_proj.weight",
            "(k {theirs}) d -> (k {ours}) d",
        ),
        Row("layers.{l}.attn.v.weight", LAYER + "self_attn.v_proj.weight", "(k h) d -> (k h) d"),
        Row("layers.{l}.attn.o.weight", LAYER + "self_attn.o_proj.weight", "d (n h) -> d (n h)"),
        Row("layers.{l}.pre_ffn.weight", LAYER + "post_attention_layernorm.weight", "d -> d"),
        Row("layers.{l}.ffn.gate.weight", LAYER + "mlp.gate_proj.weight", "f d -> f d"),
        Row("layers.{l}.ffn.up.weight", LAYER + "mlp.up_proj.weight", "f d -> f d"),
        Row("layers.{l}.ffn.down.weight", LAYER + "mlp.down_proj.weight", "d f -> d f"),
        Row("norm.weight", "model.norm.weight", "d -> d"),
        Row("head.weight", "lm_head.weight", "v d -> v d"),
    ),
)

# Keys that change the computation, with the only values under which it is the one we do.
MUST: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "architectures": (["LlamaForCausalLM"], None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "layer_types": (None,),
    "quantization_config": (None,),
    "auto_map": (None,),
    "is_llama_config": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
}
# Keys that may hold anything, and why.
FREE: dict[str, str] = {
    "_name_or_path": "where it came from",
    "name_or_path": "where it came from",
    "transformers_version": "who wrote it",
    "unsloth_version": "who wrote it",
    "unsloth_fixed": "who wrote it",
    "transformers.js_config": "for another runtime",
    "torch_dtype": "the tensors' own dtype counts; see agreement of the two spellings",
    "dtype": "the tensors' own dtype counts; see agreement of the two spellings",
    "_attn_implementation": "which kernel computes it",
    "_attn_implementation_autoset": "which kernel computes it",
    "use_cache": "how text is generated",
    "pretraining_tp": "how training split a product; the product is the same",
    "is_decoder": "causal in either case in this class",
    "bos_token_id": "about text, kept beside the weights",
    "eos_token_id": "about text, kept beside the weights",
    "pad_token_id": "about text, kept beside the weights",
    "sep_token_id": "about text",
    "decoder_start_token_id": "about text",
    "tokenizer_class": "about text",
    "prefix": "about text",
    "task_specific_params": "about text",
    "output_attentions": "what is returned beside the logits",
    "output_hidden_states": "what is returned beside the logits",
    "return_dict": "what is returned beside the logits",
    "do_sample": "how text is generated",
    "max_length": "how text is generated",
    "temperature": "how text is generated",
    "top_k": "how text is generated",
    "top_p": "how text is generated",
    "torchscript": "what is returned beside the logits",
    "use_bfloat16": "of other frameworks",
    "tf_legacy_loss": "of other frameworks",
    "id2label": "of classifiers",
    "label2id": "of classifiers",
    "num_labels": "of classifiers",
    "problem_type": "of classifiers",
    "finetuning_task": "of classifiers",
}
ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def decoder_config(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """The decoder's own settings where they are nested in text_config, and notes for the user.

    The inner value counts. Where the outer part says otherwise, that is an error for all but the
    keys that change nothing, and for tying, whose outer value readers are known to get wrong.
    """
    if "text_config" not in config:
        return dict(config), []
    outer = {k: v for k, v in config.items() if k != "text_config"}
    inner = config["text_config"]
    if not isinstance(inner, Mapping):
        raise BadInput(f"{where}: text_config must hold settings, got {inner!r}")
    notes = []
    for key in sorted(k for k in outer.keys() & inner.keys() if outer[k] != inner[k]):
        said = f"{where}: {key} is {outer[key]!r} outside and {inner[key]!r} in text_config"
        if key not in FREE and key != "tie_word_embeddings":
            raise BadInput(said)
        notes.append(f"{said}; the inner one counts")
    return {**outer, **inner}, notes


def from_hf(config: Mapping[str, Any], where: str = "config.json") -> Model:
    """The spec of a Hugging Face Llama config.

    A BadInput lists every key that is missing, unknown (with the nearest known one), out of range
    or has a value that is not supported, and every pair of spellings that disagree.
    """
    config, _ = decoder_config(config, where)
    fields = Fields(config, where, must=MUST, free=FREE)
    heads = fields.whole("num_attention_heads")
    sizes = {
        "vocab": fields.whole("vocab_size"),
        "d": fields.whole("hidden_size"),
        "layers": fields.whole("num_hidden_layers"),
        "heads": heads,
        "kv": fields.whole("num_key_value_heads", absent=heads),
        "hidden": fields.whole("intermediate_size"),
        "max_len": fields.whole("max_position_embeddings"),
        "eps": fields.number("rms_norm_eps"),
        "width": fields.whole("head_dim", absent=None),
        "tied": fields.flag("tie_word_embeddings", absent=False),
    }
    init_std = fields.number("initializer_range", absent=None)
    act = fields.choice("hidden_act", ACTS)
    base = rope_base(fields)
    one_dtype(fields)
    fields.finish()
    spec = made(llama, where, **sizes, base=base, pairs=HF_LLAMA.pairs)
    run = spec.runs[0]
    block = replace(run.blocks[0], ffn=replace(run.blocks[0].ffn, act=act))
    spec = replace(spec, runs=(Run(blocks=(block,), times=run.times),))
    if init_std is None:
        return spec
    return made(lambda init_std: replace(spec, init_std=init_std), where, init_std=init_std)


def rope_base(fields: Fields) -> float | None:
    """The base of plain rotary positions, from whichever spellings there are; they must agree."""
    bases: dict[str, Any] = {}
    types: dict[str, Any] = {}
    fields.taken |= {"rope_theta", "rope_scaling", "rope_parameters"}
    if fields.given.get("rope_theta") is not None:
        bases["rope_theta"] = fields.given["rope_theta"]
    for group in ("rope_scaling", "rope_parameters"):
        inside = fields.given.get(group)
        if inside is None:
            continue
        if not isinstance(inside, Mapping):
            fields.problems.append(f"{group}: must hold settings or null, got {inside!r}")
            continue
        for key, value in inside.items():
            if key == "rope_theta":
                bases[f"{group}.{key}"] = value
            elif key in ("rope_type", "type"):
                types[f"{group}.{key}"] = value
            elif not _plain(key, value):
                fields.problems.append(f"{group}.{key}: {value!r} is not supported")
    fields.problems += [
        f"{where}: rope type {kind!r} is not supported, only 'default'"
        for where, kind in types.items()
        if kind != "default"
    ]
    for kind, said in (("base", bases), ("rope type", types)):
        if len(set(map(repr, map(_same, said.values())))) > 1:
            listed = ", ".join(f"{key}={value!r}" for key, value in said.items())
            fields.problems.append(f"two spellings of the {kind} disagree: {listed}")
    if not bases:
        fields.problems.append(
            "rope_theta: missing, and so is rope_parameters.rope_theta; a base is never guessed"
        )
    elif not all(is_number(base) and base > 0 for base in bases.values()):
        fields.problems.append(f"the rotary base must be a number above 0, got {bases}")
    else:
        return float(next(iter(bases.values())))
    return None


def _plain(key: str, value: Any) -> bool:
    """Whether a setting inside a rope group leaves plain rotary positions plain."""
    unread = key == "original_max_position_embeddings"  # read by scaled types only
    return unread or (key in ("factor", "partial_rotary_factor") and value in (1, None))


def _same(value: Any) -> Any:
    return float(value) if is_number(value) else value


def one_dtype(fields: Fields) -> None:
    old, new = fields.given.get("torch_dtype"), fields.given.get("dtype")
    if old is not None and new is not None and old != new:
        fields.problems.append(
            f"two spellings of the dtype disagree: torch_dtype={old!r}, dtype={new!r}"
        )


def to_hf(spec: Model, dtype: str = "float32", ids: Mapping[str, Any] | None = None) -> dict:
    """The config.json of a spec; `ids` are token ids to write in it.

    A BadInput when Hugging Face's Llama does not compute what the spec says, naming the first
    difference. (Only the order of rotary pairs may differ: the rows of Q and K are reordered.)
    """
    block = spec.layers[0]
    attn, norm = block.attn, spec.norm
    if norm is None or attn.rope is None:
        missing = "final norm" if norm is None else "rotary positions"
        raise BadInput(f"a Hugging Face Llama always has {missing}, and this model has none")
    if spec.d % attn.heads:
        raise BadInput(
            f"transformers refuses a Llama whose hidden_size ({spec.d}) is not a multiple of its "
            f"heads ({attn.heads}); this model cannot be written for it"
        )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab,
        "hidden_size": spec.d,
        "intermediate_size": block.ffn.hidden,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": attn.heads,
        "num_key_value_heads": attn.kv,
        "head_dim": attn.width,
        "hidden_act": next(theirs for theirs, ours in ACTS.items() if ours == block.ffn.act),
        "max_position_embeddings": spec.max_len,
        "rms_norm_eps": norm.eps,
        "rope_theta": attn.rope.base,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": attn.rope.base},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": dtype,
        "use_cache": True,
        **{key: (ids or {}).get(key) for key in TOKEN_IDS},  # absent ones would become 1 and 2
    }
    back = from_hf(config, "the config to be written")
    for ours, theirs in zip(_listed(spec), _listed(back), strict=True):
        if ours != theirs:
            raise BadInput(f"a Hugging Face Llama has {theirs}, and this model has {ours}")
    return config


def _listed(spec: Model) -> list[str]:
    """Every decision of the model, layer by layer, as "name = value"; pairs left out."""

    def walk(name: str, value: Any) -> list[str]:
        if isinstance(value, Mapping):
            return [
                line for k, v in value.items() if k != "pairs" for line in walk(f"{name}.{k}", v)
            ]
        return [f"{name} = {value!r}"]

    whole = to_json(spec)
    runs = whole.pop("runs")
    layers = [block for run in runs for block in run["blocks"] * run["times"]]
    parts = [line for i, block in enumerate(layers) for line in walk(f"layers.{i}", block)]
    return walk("model", whole) + parts
