"""What the config.json of every Hugging Face decoder has in common: keys, words and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtwin.configs import BadInput, Model
from jaxtwin.configs.spec import MOST, Block, Norm, PostBlock, Run
from jaxtwin.parity.checkpoints.dialects.base import Dialect, Fields
from jaxtwin.parity.checkpoints.dialects.hf_rope import length_of
from jaxtwin.parity.table.row import Row

# Keys that change the computation, with the only values under which it is the one we do.
FIXED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "auto_map": (None,),
    "is_encoder_decoder": (False,),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "per_layer_config": (None,),
    "tie_last_hidden_states": (None,),
}
# Keys that may hold anything, and why.
IGNORED: dict[str, str] = {
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
    "pretraining_tp": "how training split a product; the product is the same",
    "is_decoder": "causal in either case in these classes",
    "bos_token_id": "about text, kept beside the weights",
    "eos_token_id": "about text, kept beside the weights",
    "pad_token_id": "about text, kept beside the weights",
    "unk_token_id": "about text",
    "sep_token_id": "about text",
    "decoder_start_token_id": "about text",
    "tokenizer_class": "about text",
    "prefix": "about text",
    "task_specific_params": "about text",
    "output_attentions": "what is returned beside the logits",
    "output_hidden_states": "what is returned beside the logits",
    "return_dict": "what is returned beside the logits",
    "torchscript": "what is returned beside the logits",
    "use_bfloat16": "of other frameworks",
    "tf_legacy_loss": "of other frameworks",
    "id2label": "of classifiers",
    "label2id": "of classifiers",
    "num_labels": "of classifiers",
    "problem_type": "of classifiers",
    "finetuning_task": "of classifiers",
}
# The keys of a generation_config.json, which old files have in their config.json.
GENERATION = [
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "constraints",
    "disable_compile",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "length_penalty",
    "low_memory",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "max_time",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_logits",
    "output_scores",
    "penalty_alpha",
    "prefill_chunk_size",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "return_dict_in_generate",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "temperature",
    "token_healing",
    "top_k",
    "top_p",
    "typical_p",
    "use_cache",
    "watermarking_config",
]
# How somebody trained it.
IN_TRAINING = [
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "gradient_checkpointing",
    "layerdrop",
]
IGNORED |= dict.fromkeys(GENERATION, "how text is generated")
IGNORED |= dict.fromkeys(IN_TRAINING, "in training alone")
NOTED = {*GENERATION, *IN_TRAINING} - {"use_cache"}  # which nearly every file has
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2_048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

BODY = "model."  # before every name but the head's
HEAD = Row("head.weight", "lm_head.weight", "v d -> v d")
# The names of a Llama, which most families share; the four norms of a layer are each family's own.
LLAMA_NAMES = (
    Row("embed.weight", "model.embed_tokens.weight", "v d -> v d"),
    Row("norm.weight", "model.norm.weight", "d -> d"),
    HEAD,
)


def layer(*rows: tuple[str, str, str], prefix: str = "model.layers.{l}.") -> tuple[Row, ...]:
    """Rows of a layer, each (our name, theirs, pattern)."""
    return tuple(Row("layers.{l}." + ours, prefix + theirs, how) for ours, theirs, how in rows)


LLAMA_LAYER = layer(
    ("attn.q.weight", "self_attn.q_proj.weight", "(n {theirs}) d -> (n {ours}) d"),
    ("attn.k.weight", "self_attn.k_proj.weight", "(k {theirs}) d -> (k {ours}) d"),
    ("attn.v.weight", "self_attn.v_proj.weight", "(k h) d -> (k h) d"),
    ("attn.o.weight", "self_attn.o_proj.weight", "d (n h) -> d (n h)"),
    ("attn.q.bias", "self_attn.q_proj.bias", "(n {theirs}) -> (n {ours})"),
    ("attn.k.bias", "self_attn.k_proj.bias", "(k {theirs}) -> (k {ours})"),
    ("attn.v.bias", "self_attn.v_proj.bias", "(k h) -> (k h)"),
    ("attn.o.bias", "self_attn.o_proj.bias", "d -> d"),
    ("ffn.gate.weight", "mlp.gate_proj.weight", "f d -> f d"),
    ("ffn.up.weight", "mlp.up_proj.weight", "f d -> f d"),
    ("ffn.down.weight", "mlp.down_proj.weight", "d f -> d f"),
)
PRE_NORMS = layer(
    ("pre_attn.weight", "input_layernorm.weight", "d -> d"),
    ("pre_ffn.weight", "post_attention_layernorm.weight", "d -> d"),
)
HEAD_NORMS = layer(
    ("attn.q_norm.norm.weight", "self_attn.q_norm.weight", "({theirs}) -> ({ours})"),
    ("attn.k_norm.norm.weight", "self_attn.k_norm.weight", "({theirs}) -> ({ours})"),
)


@dataclass(frozen=True)
class Family:
    """One class of transformers: its names, and its config.json read and written.

    `read` takes the fields (and calls `finish`, so that all that is wrong is told at once); `write`
    gives the keys of the model, all but architecture, model_type, dtype and token ids, and BadInput
    where the class has no such model. `tied`: the class's own answer where the file has none.
    `wide`: in float64 the class computes in float64, but for a softmax. `defaults`: what its config
    class takes for a key that the file leaves out (transformers 5.24; a test asks it): each that is
    used is noted. Keys whose absence has a meaning of its own (head_dim: d / heads) are `read`'s.
    """

    model_type: str
    architecture: str
    dialect: Dialect
    read: Callable[[Fields], Model]
    write: Callable[[Model], dict[str, Any]]
    tied: bool
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    wide: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def fields(
        self, config: Mapping[str, Any], where: str, ignore: Collection[str] | None = ()
    ) -> Fields:
        body = re.sub(r"(ForCausalLM|LMHeadModel)$", "Model", self.architecture)
        known = ([self.architecture], [body], [body.replace("Model", "TextModel")], None)
        identity = {"model_type": (self.model_type,), "architectures": known}
        fixed = {key: values for key, values in FIXED.items() if key not in self.ignored}
        return Fields(
            config,
            where,
            fixed={**fixed, **identity, **self.fixed},
            ignored={**IGNORED, **self.ignored},
            defaults=self.defaults,
            ignore=ignore,
            noted=NOTED,
        )


@dataclass(frozen=True)
class Sizes:
    """What every config of the Llama kind says about sizes."""

    vocab: int
    d: int
    layers: int
    heads: int
    kv: int
    width: int
    hidden: int
    length: int
    eps: float
    init_std: float | None


def sizes(fields: Fields, *, kv: str = "given", derived: bool = False) -> Sizes:
    """Read. Where the fields have problems, so may the sizes.

    `kv`: a missing num_key_value_heads is as many as heads ("heads"), null alone is ("null"), or
    neither ("given"). `derived`: so is a missing or null head_dim d / heads.
    """
    heads, d = fields.positive_int("num_attention_heads"), fields.positive_int("hidden_size")
    means = {"heads": {"absent": heads}, "null": {"null": heads}, "given": {}}[kv]
    k = fields.positive_int("num_key_value_heads", **means)
    width = (
        fields.positive_int("head_dim", absent=0) if derived else fields.positive_int("head_dim")
    )
    if width == 0 and heads and d:
        width = d // heads
        if d % heads:
            problem = f"hidden_size: {d} is not a multiple of heads={heads}; give head_dim"
            fields.problems.append(problem)
    return Sizes(
        vocab=fields.positive_int("vocab_size"),
        d=d,
        layers=depth(fields, "num_hidden_layers"),
        heads=heads,
        kv=k,
        width=width,
        hidden=fields.positive_int("intermediate_size"),
        length=fields.positive_int(fields.alias("max_position_embeddings", "max_sequence_length")),
        eps=fields.number("rms_norm_eps"),
        init_std=fields.number("initializer_range", absent=None),
    )


def depth(fields: Fields, key: str) -> int:
    """How many layers; 0 and a problem where no machine could list them."""
    layers = fields.positive_int(key) or 0
    if layers > MOST:
        fields.problems.append(f"{key}: repeats={layers} is more than {MOST} repetitions")
        return 0
    return int(layers)


def written_sizes(spec: Model, block: Block) -> dict[str, Any]:
    """The inverse of `sizes`, and what such a config says beside it."""
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.d,
        "intermediate_size": block.ffn.hidden,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": block.attn.heads,
        "num_key_value_heads": block.attn.kv,
        "head_dim": block.attn.width,
        "max_position_embeddings": length_of(spec),
        "rms_norm_eps": spec.norm.eps if spec.norm else None,
        "attention_dropout": 0.0,
        **beside(spec),
    }


def beside(spec: Model) -> dict[str, Any]:
    """What every config says."""
    return {
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        "use_cache": True,
    }


def first_layer(spec: Model, name: str, ffn: type, *, rotary: bool = True) -> Block:
    """The first layer, where it is of the family's kind at all; a BadInput where it is not."""
    block = spec.layers[0]
    wanted = {
        "a residual sum that no norm follows": isinstance(block, Block),
        f"a feed-forward of the kind {ffn.__name__}": isinstance(block.ffn, ffn),
        "rotary positions": not rotary or block.attn.rope is not None,
        "a final norm": spec.norm is not None,
    }
    for what, src in wanted.items():
        if not src:
            raise BadInput(f"a Hugging Face {name} always has {what}, and this model does not")
    assert isinstance(block, Block)
    return block


def layer_types(spec: Model) -> tuple[list[str], int | None]:
    """Which layers slide, and the window of the first that does."""
    windows = [block.attn.window for block in spec.layers]
    words = ["full_attention" if w is None else "sliding_attention" for w in windows]
    return words, next((w for w in windows if w is not None), None)


def model(layers: Sequence[Block], *, init_std: float | None, norm: Norm, **more: Any) -> Model:
    """The model of these layers, written as runs; an absent spread is the spec's own."""
    std: dict[str, Any] = {} if init_std is None else {"init_std": init_std}
    return Model(runs=runs(layers), norm=norm, **more, **std)


def runs(layers: Sequence[Block | PostBlock]) -> tuple[Run, ...]:
    """The layers as the smallest pattern that repeats, and the rest; else equal ones together.

    Five local, one global, ... of 26 are 4 times six and 2 times one.
    """
    if not layers:
        return ()
    n = len(layers)
    period = next(
        p for p in range(1, n + 1) if all(layers[i] == layers[i - p] for i in range(p, n))
    )
    if period == n:
        period = next((i for i in range(n) if layers[i] != layers[0]), n)
        return (Run(blocks=(layers[0],), repeats=period), *runs(layers[period:]))
    repeats = n // period
    first = Run(blocks=tuple(layers[:period]), repeats=repeats)
    return (first, *runs(layers[period * repeats :]))


def one_dtype(fields: Fields) -> None:
    old, new = fields.settings.get("torch_dtype"), fields.settings.get("dtype")
    if old is not None and new is not None and old != new:
        fields.problems.append(
            f"two spellings of the dtype disagree: torch_dtype={old!r}, dtype={new!r}"
        )


def word(act: str, words: Mapping[str, str]) -> str:
    """The published word for an activation."""
    for theirs, ours in words.items():
        if ours == act:
            return theirs
    raise BadInput(f"no published word for the activation {act!r}; known: {', '.join(words)}")
