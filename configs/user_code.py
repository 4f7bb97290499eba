"""A person's own Python: `my_specs.py:variant` names an object in a file of theirs."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxtwin.configs.errors import BadInput, nearest
from jaxtwin.configs.spec import Model

_RUN: dict[Path, ModuleType] = {}


def is_reference(text: str) -> bool:
    """Whether it has the form FILE.py:NAME."""
    file, colon, name = text.rpartition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier()


def named(text: str) -> Any:
    """The object that FILE.py:NAME names. BadInput where file or name are not there."""
    file, _, name = text.rpartition(":")
    if not is_reference(text):
        raise BadInput(f"{text!r} is not FILE.py:NAME, such as my_model.py:GPT")
    module = run(file)
    if not hasattr(module, name):
        known = [each for each in vars(module) if not each.startswith("_")]
        raise BadInput(f"{file} has no {name!r}; {nearest(name, known)}")
    return getattr(module, name)


def run(file: str) -> ModuleType:
    """The module in that file, run once; it may import what stands beside it."""
    path = Path(file).resolve()
    if path in _RUN:
        return _RUN[path]
    if not path.is_file():
        raise BadInput(f"there is no file {file}")
    name = f"_jaxtwin_user_{path.stem}_{len(_RUN)}"
    source = importlib.util.spec_from_file_location(name, path)
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    sys.modules[name] = module  # dataclasses look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # behind all else: it hides no installed package
    try:
        source.loader.exec_module(module)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{file} does not run: {told(error, path)}") from error
    _RUN[path] = module
    return module


def told(error: BaseException, path: Path | None = None) -> str:
    """An exception of a person's code in one line, with the last line of theirs that it came by."""
    frames = traceback.extract_tb(error.__traceback__)
    files = _RUN.keys() if path is None else {path}
    lines = [f for f in frames if Path(f.filename).resolve() in files]
    at = f" (line {lines[-1].lineno} of {Path(lines[-1].filename).name})" if lines else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{at}"[:400]


def spec(text: str) -> Model:
    """The spec that FILE.py:NAME names: a `Model`, or a function of no arguments that gives one."""
    found = named(text)
    if callable(found) and not isinstance(found, Model):
        try:
            found = found()
        except Exception as error:
            raise BadInput(f"{text}() fails: {told(error)}") from error
    if not isinstance(found, Model):
        raise BadInput(f"{text} must be a jaxtwin spec (Model), and is a {type(found).__name__}")
    return found
