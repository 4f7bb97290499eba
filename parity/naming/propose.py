"""A naming proposed from names and shapes: what they settle, and what they leave open.

Every one of a person's tensors gets the list of all that it may be. A list of one is settled; of
several, each is told, and none is guessed. Layers are one kind: `{l}` stands for their numbers.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtwin.configs import BadInput, Model
from jaxtwin.parity.naming.names import EMBED, Naming, read
from jaxtwin.parity.table import axis_ops, decoder_table

MOST = 5_000  # complete namings that are tried one by one, at most
# What a name must have in it to say plainly which tensor it is. Numbered names (w1, fc2, ln_1) say
# it in one person's code alone, and are taken for nothing here.
PLAIN = {
    "embed": r"wte|(?<!un)embed|tok_emb|token",
    "position": r"wpe|pos",
    "head": r"lm_head|unembed|^output|^head",
    "norm": r"ln_f|^norm|final",
    "attn.q_norm": r"q_?(layer)?norm",
    "attn.k_norm": r"k_?(layer)?norm",
    "attn.q": r"(^|[._])(q|wq|q_?proj|query|to_q)([._]|$)",
    "attn.k": r"(^|[._])(k|wk|k_?proj|key|to_k)([._]|$)",
    "attn.v": r"(^|[._])(v|wv|v_?proj|value|to_v)([._]|$)",
    "attn.o": r"(^|[._])(o|wo|o_?proj|out_?proj|to_out)([._]|$)|attn.*c_proj|att.*dense",
    "ffn.gate": r"gate",
    "ffn.up": r"(^|[._])up|c_fc|h_to_4h",
    "ffn.down": r"down|mlp.*c_proj|4h_to_h",
    "pre_attn": r"input_?(layer)?norm|att\w*_norm|norm_att\w*|pre_att",
    "pre_ffn": r"post_attention_?(layer)?norm|(ffn|mlp)_norm|norm_(ffn|mlp)|pre_(ffn|mlp)",
}
FUSED = (("attn.q", "attn.k", "attn.v"), ("attn.k", "attn.v"), ("ffn.gate", "ffn.up"))
FUSED_NAMES = r"qkv|c_attn|query_key_value|in_proj|gate_up|kv"


@dataclass(frozen=True)
class Choice:
    """One thing that a tensor may be, as a naming says it; `ours` are the tensors it uses."""

    value: Any
    ours: tuple[str, ...]

    @property
    def text(self) -> str:
        """As TOML writes it."""
        if self.value is None:
            return '""'
        if isinstance(self.value, str):
            return f'"{self.value}"'
        if isinstance(self.value, Mapping):
            return f'{{ of = {_array(self.value["of"])}, axes = "{self.value["axes"]}" }}'
        return _array(self.value)


LEFT_OUT = Choice(None, ())
UNKNOWN = Choice("?", ())  # fits nothing: whether it may be left out is the person's to say


@dataclass
class Proposal:
    """For each of a person's names (with {l} for layers): all that it may be."""

    spec: Model
    choices: dict[str, list[Choice]]
    copies: set[str] = field(default_factory=set)  # second names of a tied embedding

    @property
    def open(self) -> dict[str, list[Choice]]:
        return {name: some for name, some in self.choices.items() if len(some) != 1}

    def naming(self) -> Naming:
        """Where nothing is open."""
        return read({name: some[0].value for name, some in self.choices.items()})

    def complete(self) -> Iterator[dict[str, Choice]]:
        """Every way to choose so that each of the spec's tensors is there once."""
        yield from self._rest(dict(self.choices), frozenset(_kinds(self.spec)), {})

    def _rest(
        self, open_: Mapping[str, list[Choice]], left: frozenset[str], chosen: dict[str, Choice]
    ) -> Iterator[dict[str, Choice]]:
        """The name with the fewest choices first, so that what cannot be is seen at once."""
        if not open_:
            if not left:
                yield dict(chosen)
            return
        viable = {name: [c for c in some if self._needed(name, c) <= left]
                  for name, some in open_.items()}  # fmt: skip
        covered = {ours for some in viable.values() for choice in some for ours in choice.ours}
        if not left <= covered:
            return
        name = min(viable, key=lambda name: len(viable[name]))
        rest = {other: some for other, some in viable.items() if other != name}
        for choice in viable[name]:
            chosen[name] = choice
            yield from self._rest(rest, left - self._needed(name, choice), chosen)
            del chosen[name]

    def _needed(self, name: str, choice: Choice) -> frozenset[str]:
        return frozenset() if name in self.copies else frozenset(choice.ours)

    def narrowed(self) -> Proposal:
        """Only what takes part in some complete naming. BadInput where there is none."""
        seen: dict[str, list[Choice]] = defaultdict(list)
        every = list(itertools.islice(self.complete(), MOST))
        if len(every) == MOST:
            return self
        for some in every:
            for name, choice in some.items():
                if choice not in seen[name]:
                    seen[name].append(choice)
        if not seen:
            lines = [f"  {name}: {', '.join(c.text for c in some) or 'nothing fits its shape'}"
                     for name, some in self.choices.items() if len(some) != 1]  # fmt: skip
            raise BadInput(
                "these tensors are not those of the spec: no naming uses each of them once\n"
                + "\n".join(lines[:12])
            )
        return Proposal(self.spec, {name: seen[name] for name in self.choices}, self.copies)

    def to_json(self) -> dict[str, Any]:
        """The settled names, and the choices of those that are open."""
        settled = {name: some[0].value for name, some in self.choices.items() if len(some) == 1}
        choices = {name: [c.value for c in some] for name, some in self.open.items()}
        return {"names": settled, "open": choices}

    def toml(self, spec: str) -> str:
        """A file of names; what is open has a question mark and its choices behind it."""
        lines = [f'spec = "{spec}"', "", "[names]"]
        for name, some in self.choices.items():
            if len(some) == 1:
                lines.append(f'"{name}" = {some[0].text}')
            else:
                known = "   ".join(choice.text for choice in some if choice is not UNKNOWN)
                lines.append(f'"{name}" = "?"  # one of: {known}')
        return "\n".join(lines) + "\n"


def propose(
    shapes: Mapping[str, tuple[int, ...]],
    spec: Model,
    *,
    no_weights: Sequence[str] = (),
    stored: Mapping[str, str] | None = None,
) -> Proposal:
    """What each tensor may be, by its name and shape.

    `no_weights` are known to be none (buffers, or integers). `stored` says of a name how its module
    holds a matrix: "(out, in)", "(in, out)" or "embedding", where the module's class tells.
    """
    _of_these_sizes(shapes, spec)
    theirs = templates(shapes, len(spec.layers))
    out = [name for name in theirs if any(n in no_weights for n in theirs[name])]
    choices: dict[str, list[Choice]] = {}
    copies: set[str] = set()
    for name, members in theirs.items():
        shape = tuple(shapes[members[0]])
        if name in out:
            choices[name] = [LEFT_OUT]
            continue
        how = (stored or {}).get(members[0], "")
        found = list(_fitting(shape, "{l}" in name, spec, how))
        choices[name] = _plainly(name, found) if found else [LEFT_OUT, UNKNOWN]
    if spec.tied:
        both = [n for n, some in choices.items() if any(c.ours == (EMBED,) for c in some)]
        copies = set(sorted(both, key=lambda n: bool(re.search(PLAIN["head"], n)))[1:])
    return Proposal(spec, choices, copies).narrowed()


def _of_these_sizes(shapes: Mapping[str, tuple[int, ...]], spec: Model) -> None:
    """BadInput where the spec is of another depth, or no tensor can be its embedding.

    Said first: else every tensor would be one that fits nothing.
    """
    wrong = []
    # Other lists than the layers' may be numbered too; the layers' is the one most names are of.
    counted = [len(members) for name, members in _numbered(shapes).items() if "{l}" in name]
    if counted and len(spec.layers) not in counted:
        most = Counter(counted).most_common(1)[0][0]
        wrong.append(f"it has {len(spec.layers)} layers, and the names count {most}")
    if (spec.vocab, spec.d) not in map(tuple, shapes.values()):
        matrices = {tuple(s): name for name, s in shapes.items() if len(s) == 2}
        wrong.append(f"its embedding is {(spec.vocab, spec.d)}, and no tensor has that shape")
        if matrices:
            longest = max(matrices, key=max)
            wrong[-1] += f" (the longest is {matrices[longest]}, {longest})"
    if wrong:
        raise BadInput(
            f"the spec is of other sizes: {'; '.join(wrong)}. Write one of the model's own sizes, "
            "such as SPEC = dataclasses.replace(...) in a file, and name it FILE.py:SPEC"
        )


def templates(names: Mapping[str, Any], layers: int) -> dict[str, list[str]]:
    """Names with {l} for the number of the layer, each with the names it stands for."""
    out = _numbered(names)
    for name, members in list(out.items()):
        if "{l}" in name and len(members) != layers:
            del out[name]
            out |= {member: [member] for member in members}
    return dict(out)


def _numbered(names: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names with {l} for their first number, each with the names it stands for."""
    out: dict[str, list[str]] = defaultdict(list)
    for name in names:
        out[re.sub(r"(^|\.)\d+(?=\.)", r"\1{l}", name, count=1)].append(name)
    return out


def _kinds(spec: Model) -> dict[str, Any]:
    """Our names with {l}, each with the row of its first layer."""
    return {row.src: row for row in reversed(decoder_table.rows(spec, "unroll"))}


def _fitting(shape: tuple[int, ...], layered: bool, spec: Model, stored: str) -> Iterator[Choice]:
    """All that a tensor of that shape may be."""
    kinds = _kinds(spec)
    sizes = {
        name: axis_ops.shape(axis_ops.sides(row.pattern)[0], row.sizes)
        for name, row in kinds.items()
        if ("{l}" in name) == layered
    }
    straight, turned = stored != "(in, out)", stored in ("", "(in, out)")
    tables = (EMBED, "position.weight")
    if stored:  # tied, a linear layer's matrix is the embedding too
        sizes = {n: s for n, s in sizes.items() if (n in tables) == (stored == "embedding")
                 or (spec.tied and n == EMBED)}  # fmt: skip
    for name, size in sizes.items():
        if size == shape and (straight or len(size) < 2):
            yield Choice(name, (name,))
        if size == shape[::-1] and len(size) == 2 and turned and name not in tables:
            yield Choice(f"{name}.T", (name,))
    for parts, end in itertools.product(FUSED, ("weight", "bias")):
        names = [f"layers.{{l}}.{part}.{end}" for part in parts]
        if all(name in sizes for name in names):
            yield from _fused(shape, names, sizes, kinds, (straight, turned))


def _fused(
    shape: tuple[int, ...],
    names: Sequence[str],
    sizes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, Any],
    ways: tuple[bool, bool],
) -> Iterator[Choice]:
    """One behind the other, in any order; or group by group of heads."""
    total = sum(sizes[name][0] for name in names)
    full = (total, *sizes[names[0]][1:])
    straight, turned = ways[0] and shape == full, ways[1] and shape == full[::-1]
    turned = turned and len(full) == 2
    for order in itertools.permutations(names):
        if straight:
            yield Choice(list(order), tuple(order))
        if turned:
            yield Choice([f"{name}.T" for name in order], tuple(order))
    if "attn" not in names[0] or kinds[names[-1]].sizes["k"] == 1:
        return
    behind = " d" if len(full) == 2 else ""
    if straight:
        yield Choice({"of": list(names), "axes": f"(k j h){behind}"}, tuple(names))
    if turned:
        yield Choice({"of": list(names), "axes": "d (k j h)"}, tuple(names))


def _plainly(name: str, choices: Sequence[Choice]) -> list[Choice]:
    """The choices that a name says plainly, or all of them where it says nothing."""
    rest = name.replace("{l}", "")
    ending = rest.rpartition(".")[2]
    if ending in ("weight", "bias"):
        biases = ending == "bias"
        choices = [c for c in choices if all(("bias" in ours) == biases for ours in c.ours)]
    if re.search(FUSED_NAMES, rest):
        return [c for c in choices if len(c.ours) > 1] or list(choices)
    plain = [
        c
        for c in choices
        for ours in c.ours
        if (hint := PLAIN.get(_part(ours))) and re.search(hint, rest)
    ]
    longest = max((len(_part(c.ours[0])) for c in plain), default=0)
    return [c for c in plain if len(_part(c.ours[0])) == longest] if plain else list(choices)


def _part(ours: str) -> str:
    """ "layers.{l}.attn.q.weight" -> "attn.q"; "norm.bias.weight" -> "norm"."""
    return re.sub(r"\.(norm\.)?(bias\.)?(weight|bias)$", "", ours.removeprefix("layers.{l}."))


def _array(names: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
