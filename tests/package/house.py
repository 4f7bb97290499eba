"""What the house is like, counted: `make house`. The limits are tested in test_house.py.

Everything is read from the source; nothing of it is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

from jaxtwin.tests.helpers import ROOT

PARITY = ROOT / "parity"
MAX_FILES, MAX_LINES, MAX_FUNCTION_LINES = 15, 400, 60
NOT_OURS = {"build", "dist", "out"}


def sources(root: Path = ROOT) -> list[Path]:
    """Every Python file of the repository, tests and benchmarks too."""
    files = list(root.glob("*.py"))
    for folder in root.iterdir():
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in NOT_OURS:
            files += folder.rglob("*.py")
    return sorted(files)


def circles(package: str = "jaxtwin") -> list[list[str]]:
    """Sets of modules that import one another, directly or by way of others.

    Imports inside functions count: they only put a circle off. So do those under TYPE_CHECKING: who
    reads the file still has to know the other first.
    """
    graph = grimp.build_graph(package, cache_dir=None)
    modules = sorted(graph.modules)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in modules}
    return connected(imported)


def connected(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node."""
    reached = {node: reachable(node, edges) for node in edges}
    rings = {
        tuple(sorted(m for m in reached[node] if node in reached.get(m, ())))
        for node in edges
        if node in reached[node]
    }
    return sorted(map(list, rings))


def reachable(node: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [node]
    while waiting:
        for following in edges.get(waiting.pop(), set()) - found:
            found.add(following)
            waiting.append(following)
    return found


def files_per_room() -> dict[str, list[str]]:
    """The files of each room of parity, subfolders included; dialects (one a family) aside."""
    rooms: dict[str, list[str]] = {}
    for folder in sorted(path for path in PARITY.iterdir() if (path / "__init__.py").exists()):
        files = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
        rooms[folder.name] = [
            str(file) for file in files if not {"__pycache__", "dialects"} & set(file.parts)
        ]
    return rooms


def long_files() -> list[tuple[str, int]]:
    lengths = [(str(p.relative_to(ROOT)), len(p.read_text().splitlines())) for p in sources()]
    return [(name, lines) for name, lines in lengths if lines > MAX_LINES]


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Name and number of lines, from `def` to the last, of each function and method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def long_functions() -> list[tuple[str, int]]:
    return [
        (f"{path.relative_to(ROOT)}: {name}", lines)
        for path in sources()
        for name, lines in functions(ast.parse(path.read_text()))
        if lines > MAX_FUNCTION_LINES
    ]


def main() -> int:
    """Prints the counts; 1 where a limit is passed."""
    rings = circles()
    print(f"import circles: {len(rings)}")
    for ring in rings:
        print("   ", " <-> ".join(ring))
    print(f"\nfiles in each room of parity (at most {MAX_FILES}; dialects, one a family, aside):")
    rooms = files_per_room()
    for room, files in rooms.items():
        print(f"    {room:12} {len(files):3}")
    too_long = {
        f"files of more than {MAX_LINES} lines": long_files(),
        f"functions of more than {MAX_FUNCTION_LINES} lines": long_functions(),
    }
    for what, found in too_long.items():
        print(f"\n{what}: {len(found)}")
        for name, lines in sorted(found, key=lambda item: -item[1]):
            print(f"    {lines:4} {name}")
    crowded = any(len(files) > MAX_FILES for files in rooms.values())
    return int(bool(rings or crowded or any(too_long.values())))


if __name__ == "__main__":
    sys.exit(main())
