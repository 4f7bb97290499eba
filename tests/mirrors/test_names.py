"""The mirror rule, read off the source: the same names in the same order on both sides.

And what the mirrors' dicts of builders promise: whatever one side can build, the other can, and the
table has rows for it.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from jaxtwin import jaxmodel, torchref
from jaxtwin.configs import spec as spec_module
from jaxtwin.jaxmodel import attention as jax_attention
from jaxtwin.jaxmodel import block as jax_block
from jaxtwin.jaxmodel import ffn as jax_ffn
from jaxtwin.jaxmodel import norm as jax_norm
from jaxtwin.jaxmodel import position as jax_position
from jaxtwin.parity.table import decoder_table
from jaxtwin.torchref import attention as torch_attention
from jaxtwin.torchref import block as torch_block
from jaxtwin.torchref import ffn as torch_ffn
from jaxtwin.torchref import norm as torch_norm
from jaxtwin.torchref import position as torch_position

JAX = Path(jaxmodel.__file__).parent
TORCH = Path(torchref.__file__).parent

# Files that the plain side has no need of: it stacks nothing, caches nothing, shards nothing.
ONLY_JAX_FILES = {
    "axes.py", "cache.py", "stack.py", "sample.py", "checkpoint.py", "probe.py", "sharding.py",
    "stream.py", "lazy.py",
}  # fmt: skip

# Names that stand on one side alone, each with its reason.
ONLY_JAX = {
    "attention.py": {
        "Attention.group": "no head is repeated: queries are viewed by the K/V head they share",
        "Attention.ungroup": "and back",
    },
    "norm.py": {"over": "torchref norms the last axis alone: its heads are views"},
    "position.py": {
        "Rotary.frequencies": "traced, where torchref computes them anew",
        "DynamicRotary": "frequencies that depend on a traced length",
        "DynamicRotary.__init__": "",
        "DynamicRotary.frequencies": "",
        "LongRotary": "frequencies that depend on a traced length",
        "LongRotary.__init__": "",
        "LongRotary.frequencies": "",
        "GROWING": "which scalings those are for",
        "max_cacheable_len": "up to where a cache holds",
        "rotary": "chooses among the three",
    },
    "model.py": {
        "Decoder.forward": "the computation, without a cache",
        "Decoder.start": "an empty cache",
        "Decoder.extend": "a step with the cache",
        "Decoder.logits_uncached": "a step where no cache holds",
        "check_room": "of a cache",
        "check_dtype": "torch refuses or keeps a dtype by itself",
        "abstract": "shapes without memory; torch has its meta device",
    },
}
ONLY_TORCH = {
    "attention.py": {
        "Attention.project": "for a cache in torch (parity/diagnose/torch_cache.py)",
        "Attention.mix": "the other half",
        "Attention.repeat": "the plain way: every K/V head for each of its query heads",
        "Attention.hide": "a step that hypotheses replace (parity/diagnose/hypotheses)",
    },
    "model.py": {
        "Decoder.reset": "a JAX parameter is drawn where it is declared",
        "COLDEST": "stands in jaxmodel/sample.py",
        "generate": "stands in jaxmodel/sample.py",
    },
}

FORWARDS = {"forward", "__call__", "extend"}


def names(path: Path) -> list[str]:
    """Classes, functions, methods and dicts of builders, in order; `forward` is `__call__`."""
    torch_side = path.parent == TORCH
    out = []
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef():
                out.append(node.name)
                for part in node.body:
                    if isinstance(part, ast.FunctionDef):
                        name = part.name
                        name = "__call__" if torch_side and name == "forward" else name
                        out.append(f"{node.name}.{name}")
            case ast.FunctionDef():
                out.append(node.name)
            case ast.Assign(targets=[ast.Name(id=name)]) if name.isupper():
                out.append(name)
            case ast.AnnAssign(target=ast.Name(id=name)) if name.isupper():
                out.append(name)
    return out


def test_the_same_files() -> None:
    mirrored = {path.name for path in JAX.glob("*.py")} - ONLY_JAX_FILES
    assert mirrored == {path.name for path in TORCH.glob("*.py")}


@pytest.mark.parametrize("file", sorted(path.name for path in TORCH.glob("*.py")))
def test_the_same_names_in_the_same_order(file: str) -> None:
    only_jax, only_torch = ONLY_JAX.get(file, {}), ONLY_TORCH.get(file, {})
    in_jax, in_torch = names(JAX / file), names(TORCH / file)
    assert set(only_jax) <= set(in_jax), "listed as different, and is not"
    assert set(only_torch) <= set(in_torch), "listed as different, and is not"
    assert [n for n in in_jax if n not in only_jax] == [n for n in in_torch if n not in only_torch]


def docs(path: Path) -> dict[str, str]:
    """The first line of every class's docstring."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    return {node.name: (ast.get_docstring(node) or "").split("\n")[0] for node in classes}


@pytest.mark.parametrize(
    "file", ["attention.py", "block.py", "cap.py", "ffn.py", "norm.py", "position.py"]
)
def test_a_part_is_described_alike(file: str) -> None:
    only_jax = ONLY_JAX.get(file, {})
    in_jax = {name: doc for name, doc in docs(JAX / file).items() if name not in only_jax}
    assert in_jax == docs(TORCH / file)


def test_both_mirrors_have_the_same_keys_and_the_table_has_them_all() -> None:
    builders = [
        (jax_norm.NORMS, torch_norm.NORMS),
        (jax_position.POSITIONS, torch_position.POSITIONS),
        (jax_position.SCALINGS, torch_position.SCALINGS),
        (jax_position.ROTARIES, torch_position.ROTARIES),
        (jax_position.RELATIVES, torch_position.RELATIVES),
        (jax_attention.QK_NORMS, torch_attention.QK_NORMS),
        (jax_attention.ATTENTIONS, torch_attention.ATTENTIONS),
        (jax_ffn.FFNS, torch_ffn.FFNS),
        (jax_block.BLOCKS, torch_block.BLOCKS),
    ]
    for in_jax, in_torch in builders:
        assert in_jax.keys() == in_torch.keys()
        for part, builder in in_jax.items():
            assert builder.__name__.lower() == in_torch[part].__name__.lower()
    assert set().union(*(in_jax for in_jax, _ in builders)) == decoder_table.ROWS.keys()
    assert set(decoder_table.ROWS) - {type(None)} == set(spec_module.PARTS)
    assert jax_position.PAIRS.keys() == torch_position.PAIRS.keys()
    assert jax_ffn.ACTIVATIONS.keys() == torch_ffn.ACTIVATIONS.keys()


def ours(x: object) -> bool:
    """A spec class, and not one that pydantic lends."""
    return dataclasses.is_dataclass(x) and getattr(x, "__module__", "").startswith(
        "jaxtwin.configs."
    )


def test_every_part_of_a_spec_is_listed() -> None:
    """A part is a spec class with a kind."""
    classes = [x for x in vars(spec_module).values() if ours(x)]
    parts = [x for x in classes if any(f.name == "kind" for f in dataclasses.fields(x))]
    assert set(parts) == set(spec_module.PARTS)


def reads_of_spec(function: ast.FunctionDef) -> list[int]:
    """Lines that read a spec, apart from the check of the ids."""
    checked = {
        id(node)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") in ("check_ids", "check_beside")
        for node in ast.walk(call)
    }
    return [
        node.lineno
        for node in ast.walk(function)
        if id(node) not in checked
        and (
            (isinstance(node, ast.Attribute) and node.attr == "spec")
            or (isinstance(node, ast.Name) and node.id in ("spec", "specs", "isinstance", "type"))
        )
        and not _in_annotation(function, node)
    ]


def _in_annotation(function: ast.FunctionDef, node: ast.AST) -> bool:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    annotations = [a.annotation for a in arguments] + [function.returns]
    return any(node in ast.walk(a) for a in annotations if a is not None)


@pytest.mark.parametrize(
    "path",
    sorted([*JAX.glob("*.py"), *TORCH.glob("*.py")]),
    ids=lambda p: f"{p.parent.name}/{p.name}",
)
def test_no_forward_reads_a_spec(path: Path) -> None:
    """What is computed is decided at construction."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in FORWARDS:
            assert reads_of_spec(node) == [], f"{path.name}: {node.name}"


def test_reading_a_spec_would_be_seen() -> None:
    source = "def forward(self, x: spec.X):\n    check_ids(x, self.spec)\n    return self.spec.d"
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert reads_of_spec(function) == [3]
