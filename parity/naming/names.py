"""A naming: for each of a person's tensors, which of torchref's it is. Data, from TOML or Python.

    [names]                                              # my_names.toml
    "wte.weight" = "embed.weight"
    "h.{l}.fc.weight" = "layers.{l}.ffn.up.weight.T"     # stored transposed, (in, out)
    "h.{l}.qkv.weight" = ["layers.{l}.attn.q.weight",    # one behind the other, along the output
                          "layers.{l}.attn.k.weight", "layers.{l}.attn.v.weight"]
    "h.{l}.mask" = ""                                    # left out

In Python the same is a dict called NAMES (None leaves a tensor out). `{l}` counts layers from 0.
Tensors that are fused in another way say how: {of = [...], axes = "(k j h) d"}, where j goes over
the tensors of the list (as many entries for each as its size asks for), and the letters are those
of the alphabet. Two names of theirs for one of ours are one tensor twice: tied.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtwin.configs import BadInput, Model, nearest, user_code
from jaxtwin.parity.table import axis_ops, decoder_table
from jaxtwin.parity.table.row import Row
from jaxtwin.parity.table.tensors import listed

Names = str | os.PathLike[str] | Mapping[str, Any]
LETTER = "j"  # what goes over the tensors that one of theirs is fused of; no letter of the alphabet
EMBED, HEAD = "embed.weight", "head.weight"


@dataclass(frozen=True)
class Entry:
    """One of their tensors: which of ours it holds; `transposed` each, and `axes` where fused."""

    theirs: str
    ours: tuple[str, ...]
    transposed: tuple[bool, ...] = ()
    axes: str | None = None


@dataclass(frozen=True)
class Naming:
    """`where` is what messages call it; `spec` what its file says the model is, if it does."""

    where: str
    entries: tuple[Entry, ...]
    spec: Model | None = None
    left_out: tuple[str, ...] = ()

    def rows(self, spec: Model) -> list[Row]:
        """The table from their names to torchref's; BadInput with all that is wrong or missing."""
        return _Rows(self, spec).all()

    def copies(self, spec: Model) -> dict[str, str]:
        """Their further names of a tensor that is there already: name -> the first name."""
        first: dict[tuple[object, ...], str] = {}
        out: dict[str, str] = {}
        for entry in self.entries:
            tied = _tied(entry.ours, spec)
            key = (tied, entry.transposed, entry.axes, "{l}" in entry.theirs)
            theirs = first.setdefault(key, entry.theirs)
            if theirs != entry.theirs:
                out |= {
                    entry.theirs.format(l=i): theirs.format(l=i) for i in range(len(spec.layers))
                }
        return out

    def leaves_out(self, name: str) -> bool:
        return any(_pattern(each).fullmatch(name) for each in self.left_out)


def _tied(ours: Sequence[str], spec: Model) -> tuple[str, ...]:
    """A tied model's head is its embedding."""
    return tuple(EMBED if name == HEAD and spec.tied else name for name in ours)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(r"\d+".join(map(re.escape, name.split("{l}"))))


class _Rows:
    """The rows of a naming for one spec, with every problem found on the way."""

    def __init__(self, naming: Naming, spec: Model):
        self.naming, self.spec = naming, spec
        self.problems: list[str] = []
        # Each layer's by itself: one name may stand for tensors of several sizes.
        self.ours = {
            move.src[0]: row for row in decoder_table.rows(spec, "unroll") for move in row.moves()
        }
        copied = naming.copies(spec)
        first = (e for e in naming.entries if e.theirs.format(l=0) not in copied)
        self.entries = [replace(e, ours=_tied(e.ours, spec)) for e in first]

    def all(self) -> list[Row]:
        found = [row for entry in self.entries for row in self._of(entry)]
        stated = {row.dst for row in found}
        for name in self.ours.keys() - stated:
            self.problems.append(f"  {name}: no tensor of yours is named for it")
        if len(stated) < len(found) and not self.problems:
            twice = sorted({row.dst for row in found if sum(r.dst == row.dst for r in found) > 1})
            self.problems += [f"  {name}: two different tensors are named for it" for name in twice]
        if self.problems:
            lines = listed(sorted(set(self.problems)))
            raise BadInput(f"{self.naming.where} does not name this model's tensors:\n{lines}")
        order = {name: i for i, name in enumerate(self.ours)}
        return sorted(found, key=lambda row: order[row.dst])

    def _of(self, entry: Entry) -> Iterator[Row]:
        """The rows of one of theirs: one for each layer, and each tensor that it is fused of."""
        holes = {"{l}" in name for name in (entry.theirs, *entry.ours)}
        if len(holes) > 1:
            self.problems.append(f"  {entry.theirs}: {{l}} must be in both names, or in neither")
            return
        for i in range(len(self.spec.layers) if holes == {True} else 1):
            ours = [name.format(l=i) for name in entry.ours]
            unknown = [name for name in ours if name not in self.ours]
            if unknown and i and holes == {True} and self._elsewhere(entry):
                continue
            for name in unknown:
                hint = nearest(name, self.ours)
                self.problems.append(f"  {entry.theirs}: this model has no {name}; {hint}")
            if unknown:
                return
            yield from self._rows(entry, entry.theirs.format(l=i), ours)

    def _elsewhere(self, entry: Entry) -> bool:
        """Whether some layer has it: a layer of another kind may not."""
        n = len(self.spec.layers)
        return any(all(name.format(l=i) in self.ours for name in entry.ours) for i in range(n))

    def _rows(self, entry: Entry, theirs: str, ours: Sequence[str]) -> Iterator[Row]:
        rows = [self.ours[name] for name in ours]
        sides = [axis_ops.sides(row.pattern)[0] for row in rows]
        shapes = [axis_ops.shape(side, row.sizes) for side, row in zip(sides, rows, strict=True)]
        groups = [axis_ops.axes(side) for side in sides]
        if any(t and len(g) < 2 for t, g in zip(entry.transposed, groups, strict=True)):
            self.problems.append(f"  {theirs}: a vector cannot be transposed")
            return
        if entry.axes is not None:
            yield from self._fused(entry, theirs, ours, shapes)
            return
        if len(ours) == 1:
            left = " ".join(reversed(groups[0])) if entry.transposed[0] else sides[0]
            sizes = rows[0].sizes
            yield Row(ours[0], theirs, f"{left} -> {sides[0]}", sizes)
            return
        if len({shape[1:] for shape in shapes}) > 1 or len(set(entry.transposed)) > 1:
            self.problems.append(f"  {theirs}: its tensors do not stand one behind the other")
            return
        total, start = sum(shape[0] for shape in shapes), 0
        rest = groups[0][1:]
        axes = [*rest[::-1], LETTER] if entry.transposed[0] else [LETTER, *rest]
        for name, shape, row in zip(ours, shapes, rows, strict=True):
            sizes = {**row.sizes, LETTER: total}
            take = (LETTER, start, start + shape[0])
            how = f"{' '.join(axes)} -> {' '.join([LETTER, *rest])}"
            yield Row(name, theirs, how, sizes, take=take)
            start += shape[0]

    def _fused(
        self, entry: Entry, theirs: str, ours: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> Iterator[Row]:
        """The rows where j goes over the tensors somewhere within an axis."""
        assert entry.axes is not None
        sizes = self.ours[ours[-1]].sizes
        inner = [a for a in axis_ops.letters(entry.axes) if a != LETTER]
        odd = [a for a in inner if a not in sizes]
        if odd or axis_ops.letters(entry.axes).count(LETTER) != 1:
            known = " ".join(sorted(sizes))
            self.problems.append(
                f"  {theirs}: axes={entry.axes!r} must have the letter {LETTER} once, and else "
                f"only {known}"
            )
            return
        one = math.prod(sizes[a] for a in inner)
        counts = [math.prod(shape) // one for shape in shapes]
        if any(math.prod(s) != n * one for s, n in zip(shapes, counts, strict=True)):
            self.problems.append(
                f"  {theirs}: axes={entry.axes!r} does not fit the shapes {shapes}"
            )
            return
        start = 0
        for name, count, shape in zip(ours, counts, shapes, strict=True):
            all_sizes = {**sizes, LETTER: sum(counts)}
            right = _without_fusing(entry.axes)
            row = Row(name, theirs, f"{entry.axes} -> {right}", all_sizes,
                      take=(LETTER, start, start + count))  # fmt: skip
            start += count
            if axis_ops.shape(right, {**all_sizes, LETTER: count}) != shape:
                self.problems.append(f"  {theirs}: {name} comes out in another shape than {shape}")
                return
            yield row


def _without_fusing(axes: str) -> str:
    """The axes of what is taken: as they are, the output's first."""
    groups = axis_ops.axes(axes)
    at = next(i for i, group in enumerate(groups) if LETTER in axis_ops.letters(group))
    return " ".join([groups[at], *groups[:at], *groups[at + 1 :]])


def read(names: Names | Naming) -> Naming:
    """The naming in a TOML or Python file (or FILE.py:NAME), or in a dict of the same form."""
    if isinstance(names, Naming):
        return names
    if isinstance(names, Mapping):
        return _checked(names, "names")
    text = os.fspath(names)
    if text.endswith(".toml"):
        return _toml(text)
    if user_code.is_reference(text):
        return _checked(user_code.named(text), text)
    if text.endswith(".py"):
        module = user_code.run(text)
        if not hasattr(module, "NAMES"):
            raise BadInput(f"{text} must have a dict called NAMES")
        spec = getattr(module, "SPEC", None)
        return replace(_checked(module.NAMES, text), spec=_spec(spec, text))
    raise BadInput(f"names are in a .toml or a .py file, and {text} is neither")


def _toml(text: str) -> Naming:
    try:
        data = tomllib.loads(Path(text).read_text("utf-8"))
    except OSError as error:
        raise BadInput(f"{text} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{text} is not TOML: {error}") from None
    if odd := sorted(data.keys() - {"names", "spec"}):
        raise BadInput(f"{text}: {odd[0]!r} is not known; it has [names] and may have spec")
    if "names" not in data:
        raise BadInput(f"{text} must have a table [names]")
    spec = data.get("spec")
    if isinstance(spec, str) and user_code.is_reference(spec):  # beside the file, wherever one is
        spec = str(Path(text).parent / spec)
    return replace(_checked(data["names"], text), spec=_spec(spec, text))


def _spec(stated: Any, where: str) -> Model | None:
    if stated is None or isinstance(stated, Model):
        return stated
    if isinstance(stated, str):
        return spec_named(stated)
    raise BadInput(f"{where}: the spec must be a Model, or the name of one, got {stated!r:.60}")


def spec_named(text: str) -> Model:
    """The spec of a preset, or of FILE.py:NAME."""
    from jaxtwin.configs import preset

    if text.endswith(".py"):
        raise BadInput(f"say which spec in {text} is meant: {text}:NAME")
    return user_code.spec(text) if user_code.is_reference(text) else preset(text)


def _checked(names: Any, where: str) -> Naming:
    if not isinstance(names, Mapping) or not names:
        raise BadInput(f"{where} must map your tensors' names to jaxtwin's, got {names!r:.60}")
    entries, left_out, problems = [], [], []
    for theirs, ours in names.items():
        if not isinstance(theirs, str) or _odd_holes(theirs):
            problems.append(f"  {theirs!r}: a name may have the hole {{l}}, and no other brace")
        elif ours is None or ours == "":
            left_out.append(theirs)
        elif _odd_holes(str(ours)) and not isinstance(ours, Mapping):
            problems.append(f"  {theirs}: a layer's number is written {{l}}, got {ours!r:.80}")
        elif (entry := _entry(theirs, ours)) is None:
            problems.append(
                f"  {theirs}: must be a name, a list of names, or {{of = [...], axes = ...}}, got "
                f"{ours!r:.80}"
            )
        elif any("?" in name for name in entry.ours):
            problems.append(f"  {theirs}: still has a question mark; say which tensor it is")
        else:
            entries.append(entry)
    if problems:
        raise BadInput(f"{where} cannot be read:\n{listed(problems)}")
    return Naming(where, tuple(entries), left_out=tuple(left_out))


def _odd_holes(name: str) -> bool:
    return bool(re.search(r"[{}]", name.replace("{l}", "")))


def _entry(theirs: str, ours: Any) -> Entry | None:
    axes = None
    if isinstance(ours, Mapping):
        if ours.keys() != {"of", "axes"} or not isinstance(ours["axes"], str):
            return None
        ours, axes = ours["of"], ours["axes"]
    names = [ours] if isinstance(ours, str) else ours
    if not isinstance(names, (list, tuple)) or not names:
        return None
    if not all(isinstance(name, str) and name and not _odd_holes(name) for name in names):
        return None
    transposed = tuple(name.endswith(".T") for name in names)
    return Entry(theirs, tuple(name.removesuffix(".T") for name in names), transposed, axes)
