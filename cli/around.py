"""What every verb does around its work: one message for a mistake, progress, examples."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

EVERY = 10.0  # seconds between two lines of progress in a file or a pipe
# What a module that is not there is installed by.
EXTRAS = {"torch": "torch", "transformers": "hf", "jinja2": "report", "matplotlib": "report"}


def example(*lines: str) -> str:
    """Examples for a verb's --help, one a line."""
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"  jaxtwin {line}" for line in lines)


@contextlib.contextmanager
def answering(as_json: bool = False, save: Path | None = None) -> Iterator[None]:
    """A person's mistake becomes one message and exit status 2, and never a traceback.

    A `save` that cannot be written is refused before the work.
    """
    from absl import logging

    from jaxtwin.configs import BadInput
    from jaxtwin.configs.atomic_write import file_place

    logging.set_verbosity(logging.FATAL)  # or Orbax's threads print what they raise as well
    try:
        if save is not None:
            file_place(save)
        yield
    except BadInput as error:
        message = str(error)
    except OSError as error:  # a disk, a path or a right that is not there
        message = f"{error.filename or 'the file system'}: {error.strerror or error}"
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            raise
        message = f"this verb needs {error.name}; install it with: pip install 'jaxtwin[{extra}]'"
    except typer.Exit:  # a RuntimeError, too
        raise
    except (RuntimeError, AssertionError):
        message = jax_does_not_start()
        if not message:
            raise
    else:
        return
    if as_json:
        print(json.dumps({"error": message}))
    typer.secho(f"error: {message}", fg="red", err=True)
    raise typer.Exit(2)


def jax_does_not_start() -> str:
    """Why JAX has no device to offer; empty if it has."""
    try:
        import jax

        jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        why = str(error).splitlines()[0] if str(error) else "there is no such backend here"
        return f"JAX does not start with JAX_PLATFORMS={platforms}: {why}; unset it, or set cpu"
    return ""


class Lines:
    """Progress as lines: the first at once, then no more than one each EVERY seconds, and notes."""

    def __init__(self) -> None:
        self.last = float("-inf")

    def __call__(self, step: str) -> None:
        now = time.monotonic()
        if now - self.last >= EVERY:
            self.last = now
        elif not step.startswith("note:"):
            return
        print(f"... {step}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def working(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Progress on standard error: a spinner on a terminal, a line now and then elsewhere."""
    from rich.console import Console

    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of transformers would break into these lines
    console = Console(stderr=True)
    if quiet:
        yield lambda step: None
    elif not console.is_terminal:
        yield Lines()
    else:
        with console.status("starting") as status:
            yield status.update
