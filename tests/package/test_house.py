"""The house keeps its shape: no import circles, small rooms, short files, words of the field."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from jaxtwin.tests.helpers import ROOT
from jaxtwin.tests.package import house


def test_no_import_circles() -> None:
    assert house.circles() == []


def test_a_circle_is_seen() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d", "a"}}
    assert house.connected(edges) == [["b", "c"], ["d"]]


def test_rooms_are_small() -> None:
    rooms = house.files_per_room()
    assert len(rooms) == 11
    assert {room: len(files) for room, files in rooms.items() if len(files) > 15} == {}


def test_files_are_short() -> None:
    assert house.long_files() == []


def test_functions_are_short() -> None:
    assert house.long_functions() == []


def test_a_long_method_is_seen() -> None:
    source = "class A:\n    @cached\n    def f(self):\n" + 61 * "        x = 1\n"
    assert list(house.functions(ast.parse(source))) == [("f", 62)]


def test_every_file_is_looked_at() -> None:
    names = {str(path.relative_to(ROOT)) for path in house.sources()}
    assert {"api.py", "benchmarks/memory.py", "parity/checkpoints/dialects/hf.py"} <= names
    assert "tests/package/test_house.py" in names
    assert not any(name.startswith(".") for name in names)


# --- one vocabulary

# Names that a definition in the package may not have: each once stood for something that the field
# has a word for, or had several meanings.
WORDS = """
    here there say steady whole used times through within Looking looking Seen ago visible settle
    hurry free forced truth alone ends own Wrong Fault Mistake Edit Slip Suspect suspect must
    spelling homeless no none said made given asked
"""
RETIRED = frozenset(WORDS.split())
# The decoder's methods are named for what they do; `read` is the word for a lazy tensor's values.
RETIRED_OF_CLASS = {"Decoder": {"read"}}


def definitions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a module names: functions, classes, parameters, fields,
    variables, attributes that are set, and what imports and patterns bind."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name
                banned = RETIRED_OF_CLASS.get(name, set())
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part.name in banned:
                        yield part.lineno, f"{name}.{part.name}"
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name


def retired(source: str) -> list[str]:
    named = {f"{cls}.{name}" for cls, names in RETIRED_OF_CLASS.items() for name in names}
    found = definitions(ast.parse(source))
    return [f"{line}: {name}" for line, name in found if name in RETIRED | named]


PACKAGE = [
    path
    for path in house.sources()
    if path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks")
]


def test_no_definition_has_a_retired_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{place}"
        for path in PACKAGE
        for place in retired(path.read_text())
    ]
    assert found == []


def test_no_module_has_a_retired_name() -> None:
    assert [str(path.relative_to(ROOT)) for path in PACKAGE if path.stem in RETIRED] == []


@pytest.mark.parametrize(
    "source",
    [
        "def settle(): pass",
        "async def settle(): pass",
        "class Seen: pass",
        "def f(whole): pass",
        "def f(*, whole): pass",
        "f = lambda whole: 1",
        "no: dict = {}",
        "a, (no, b) = x",
        "[1 for no in x]",
        "with f() as no: pass",
        "for no in x: pass",
        "if (no := 1): pass",
        "self.whole = 1",
        "import a as no",
        "try: pass\nexcept E as no: pass",
        "match x:\n    case [*no]: pass",
        "class Decoder:\n    def read(self): pass",
    ],
)
def test_a_retired_name_is_seen(source: str) -> None:
    assert len(retired(source)) == 1


def test_a_use_is_no_definition() -> None:
    assert retired("x.whole(no=1); class_ = Seen\nclass Tensor:\n    def read(self): pass") == []
