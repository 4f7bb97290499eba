"""What a dialect is: rows from a published naming (source) to torchref's names (destination).

A dialect lists a row for every kind of tensor that its naming has a place for. `{l}` counts the
layers. Where rows of Q and K are stored in the order of their rotary pairs, the head axis is
written "{theirs}" (published) and "{ours}" (torchref's): it is split into pairs and put in the
order that the spec rotates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from jaxtwin.configs import BadInput, Model, nearest
from jaxtwin.configs.spec import to_json
from jaxtwin.parity.table import decoder_table
from jaxtwin.parity.table.row import Row

if TYPE_CHECKING:
    import pydantic

# The head axis h = 2 c, split: p is which of the two that turn together, c counts the pairs.
PAIRED = {"half": "p c", "adjacent": "c p"}

ANY = object()


@dataclass(frozen=True)
class Dialect:
    """`naming`: a row for each kind of tensor; `pairs`: how Q and K rows are ordered in files.

    `prefix`: what every name but the head's begins with, and what some files leave out.
    """

    name: str
    naming: tuple[Row, ...]
    pairs: Literal["adjacent", "half"]
    prefix: str = ""

    def rows(self, spec: Model) -> list[Row]:
        """The rows of that model, or a BadInput with every tensor that this naming lacks."""
        known = {row.dst: row for row in self.naming}
        out, unmapped = [], []
        for ours in decoder_table.rows(spec, "unroll"):
            row = known.get(ours.src)
            if row is None:
                unmapped.append(ours.src.format(**{h: v[0] for h, v in ours.holes.items()}))
                continue
            theirs, ordered = self._heads(spec, ours)
            pattern = row.pattern.format(theirs=theirs, ours=ordered)
            sizes = {**ours.sizes, **row.sizes, "p": 2, "c": ours.sizes.get("h", 0) // 2}
            out.append(replace(row, pattern=pattern, sizes=sizes, holes=ours.holes))
        if unmapped:
            raise BadInput(f"the {self.name} naming has no name for {', '.join(unmapped[:8])}")
        return out

    def _heads(self, spec: Model, row: Row) -> tuple[str, str]:
        """The head axis in the file and in the spec's own order; unsplit where those are one."""
        layer = row.holes.get("l")
        attn = spec.layers[layer[0]].attn if layer else None
        if attn is None or attn.rope is None or attn.rope.pairs == self.pairs:
            return "h", "h"
        if attn.rope.width not in (None, attn.width):
            raise BadInput(
                f"the {self.name} naming is for {self.pairs} rotary pairs; heads of which a part "
                f"rotates, in {attn.rope.pairs} pairs, cannot be reordered"
            )
        return PAIRED[self.pairs], PAIRED[attn.rope.pairs]

    def published(self, dst: str) -> str:
        """The published name of a tensor outside the layers, e.g. "embed.weight"."""
        return next(row.src for row in self.naming if row.dst == dst)


class Fields:
    """A file's settings, each of which must be read, be `fixed` or be `ignored`.

    `fixed`: settings that must have one of the listed values, since only those are supported.
    `ignored`: settings that change nothing computed, with the reason. `defaults`: what `whose`
    implementation takes for a setting that is not there; each that is used is noted. `ignore`:
    unknown settings that the user says change nothing; None for every one. `noted`: which of the
    `ignored` are named in a note where they are set to something. All problems are collected and
    raised together, as one BadInput.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        where: str,
        *,
        fixed: Mapping[str, tuple[Any, ...]],
        ignored: Mapping[str, str],
        defaults: Mapping[str, Any] | None = None,
        ignore: Collection[str] | None = (),
        noted: Collection[str] = (),
        whose: str = "transformers' class",
    ):
        self.settings, self.where, self.fixed, self.ignored = settings, where, fixed, ignored
        self.defaults, self.whose, self.ignore = defaults or {}, whose, ignore
        self.noted = noted
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.taken: set[str] = set()

    def positive_int(self, key: str, *, absent: Any = ANY, null: Any = ANY) -> Any:
        """A positive integer.

        `absent` is what a missing or null one means, where it may be; `null` what null alone does.
        """
        good = lambda x: type(x) is int and x > 0  # noqa: E731
        return self._take(key, absent, good, "a positive integer", null)

    def count(self, key: str) -> Any:
        """An integer of 0 or more."""
        return self._take(key, ANY, lambda x: type(x) is int and x >= 0, "an integer of 0 or more")

    def number(self, key: str, *, absent: Any = ANY, null: Any = ANY) -> Any:
        """A number of 0 or more, as a float."""
        value = self._take(key, absent, is_number, "a number of 0 or more", null)
        return float(value) if is_number(value) else value

    def numbers(self, key: str) -> Any:
        """A list of numbers of 0 or more, as a tuple of floats."""
        good = lambda x: isinstance(x, list) and all(map(is_number, x))  # noqa: E731
        value = self._take(key, ANY, good, "a list of numbers of 0 or more")
        return None if value is None else tuple(map(float, value))

    def flag(self, key: str, *, absent: Any = ANY) -> Any:
        return self._take(key, absent, lambda x: type(x) is bool, "true or false")

    def choice(self, key: str, choices: Mapping[Any, Any]) -> Any:
        """One of the known words, as the spec spells it."""
        value = self._take(
            key, ANY, lambda x: isinstance(x, str) and x in choices, " or ".join(map(repr, choices))
        )
        return choices.get(value)

    def words(self, key: str, choices: Collection[str], count: int) -> Any:
        """A list of so many known words, or None where it is missing or null."""
        good = lambda x: isinstance(x, list) and all(word in choices for word in x)  # noqa: E731
        kind = f"a list of {' or '.join(map(repr, choices))}"
        value = self._take(key, None, good, kind)
        if value is not None and len(value) != count:
            self.problems.append(f"{key}: {len(value)} words for {count} layers")
        return value

    def alias(self, *keys: str) -> str:
        """Which of several names of one setting the file uses; all that it uses must agree."""
        self.taken |= set(keys)
        present = [key for key in keys if self.settings.get(key) is not None]
        if any(self.settings[key] != self.settings[present[0]] for key in present):
            listed = ", ".join(f"{key}={as_json(self.settings[key])}" for key in present)
            self.problems.append(f"names of one setting disagree: {listed}")
        return present[0] if present else keys[0]

    def _take(self, key: str, absent: Any, good: Any, kind: str, null: Any = ANY) -> Any:
        self.taken.add(key)
        value = self.settings.get(key)
        if value is None and key in self.settings and null is not ANY:
            return null
        if value is None and absent is not ANY:
            return absent
        if key not in self.settings:
            if key in self.defaults:
                return self.default(key)
            self.problems.append(f"{key}: missing, and never guessed")
        elif not good(value):
            self.problems.append(f"{key}: must be {kind}, got {as_json(value)}")
        else:
            return value
        return None

    def default(self, key: str) -> Any:
        """What the implementation takes for a setting that the file leaves out; adds the note."""
        value = self.defaults[key]
        self.notes.append(f"no {key}: {as_json(value)}, the default of {self.whose}")
        return value

    def leftovers(self) -> None:
        """Adds the problem of every setting that was not read."""
        known = self.taken | self.fixed.keys() | self.ignored.keys()
        for key in sorted(self.settings.keys() - self.taken - self.ignored.keys()):
            value = self.settings[key]
            if key in self.fixed:
                if not any(value == good for good in self.fixed[key]):
                    only = " or ".join(map(as_json, self.fixed[key]))
                    self.problems.append(f"{key}: {as_json(value)} is not supported, only {only}")
            elif self.ignore is None or key in self.ignore or key.startswith("_"):
                if self.ignore is not None:
                    how = "private" if key.startswith("_") else "as was asked"
                    self.notes.append(f"{key}: {as_json(value):.60} is ignored, {how}")
            else:
                self.problems.append(
                    f"{key}: unknown setting; {nearest(key, known)} If it changes nothing that is "
                    f"computed: --ignore {key}"
                )
        passed: dict[str, list[str]] = {}
        for key in sorted(self.settings.keys() & set(self.noted)):
            if self.settings[key]:
                of = f"{key} {as_json(self.settings[key]):.40}"
                passed.setdefault(self.ignored[key], []).append(of)
        self.notes += [f"passed over, {why}: {', '.join(keys)}" for why, keys in passed.items()]

    def finish(self) -> None:
        """Raises the BadInput, if anything is wrong or was not read."""
        self.leftovers()
        if self.problems:
            lines = "\n".join(f"  {problem}" for problem in self.problems)
            raise BadInput(f"{self.where} cannot be read:\n{lines}")


def as_json(value: Any) -> str:
    """A setting as its file spells it: true and null, not True and None."""
    return json.dumps(value, default=repr)


def is_number(x: Any) -> bool:
    """A number from 0 up to the greatest float; an integer in JSON may be greater."""
    numeric = isinstance(x, (int, float)) and not isinstance(x, bool)
    return numeric and 0 <= x <= sys.float_info.max


def build_spec(build: Any, where: str, **sizes: Any) -> Model:
    """`build(**sizes)`; a value that the spec refuses becomes a BadInput that names the file."""
    import pydantic

    try:
        return build(**sizes)
    except pydantic.ValidationError as error:
        raise BadInput(f"{where}: {'; '.join(complaints(error))}") from None
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from None


def complaints(error: pydantic.ValidationError) -> list[str]:
    """What a spec class refuses, each as "field: why"."""
    found = error.errors(include_url=False)
    return [": ".join([*map(str, e["loc"][-1:]), e["msg"]]) for e in found]


def differences(one: Model, other: Model) -> list[tuple[str, str]]:
    """Every decision that the two do not share, as "name = value" of each.

    Layer by layer; the order of rotary pairs left out, and how layers are put into runs.
    """
    a, b = _decisions(one), _decisions(other)
    names = [*a, *(name for name in b if name not in a)]
    return [
        (f"{name} = {a.get(name)!r}", f"{name} = {b.get(name)!r}")
        for name in names
        if a.get(name, ...) != b.get(name, ...)
    ]


def _decisions(spec: Model) -> dict[str, Any]:
    """Every decision of the model by its name, what stands for a default written out."""

    def walk(name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, Mapping):
            inner = [walk(f"{name}.{k}", v) for k, v in value.items() if k != "pairs"]
            return {
                name: value.get("kind", "present"),
                **{k: v for d in inner for k, v in d.items()},
            }
        return {name: value}

    data = to_json(spec)
    runs = data.pop("runs")
    layers = [block for run in runs for block in run["blocks"] * run["repeats"]]
    out = walk("model", data)
    for i, block in enumerate(layers):
        attn = block["attn"]
        attn["scale"] = attn["scale"] or attn["width"] ** -0.5
        if attn["rope"]:
            attn["rope"]["width"] = attn["rope"]["width"] or attn["width"]
        out |= walk(f"layers.{i}", block)
    return out
