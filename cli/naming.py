"""What the verb `names` does: our names of a spec's tensors, or a proposal for somebody's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtwin.configs import BadInput
from jaxtwin.configs.atomic_write import write_file
from jaxtwin.parity.naming.names import spec_named
from jaxtwin.parity.table import axis_ops, decoder_table


def ours(like: str) -> dict[str, dict[str, Any]]:
    """The names of a spec's tensors, those of layers once: their shapes and axes."""
    found: dict[str, dict[str, Any]] = {}
    for row in decoder_table.rows(spec_named(like), "unroll"):
        axes = axis_ops.sides(row.pattern)[0]
        shape = list(axis_ops.shape(axes, row.sizes))
        found.setdefault(row.src, {"shape": shape, "axes": axes})
    return found


def listed(found: dict[str, dict[str, Any]]) -> str:
    """One a line, in columns."""
    width = max(map(len, found))
    return "\n".join(
        f"{name:<{width}}  {tuple(each['shape'])!s:<16}  {each['axes']}"
        for name, each in found.items()
    )


def proposal(
    state: Path,
    like: str,
    module: str | None,
    out: Path | None,
    progress: Callable[[str], None],
) -> tuple[Any, list[str]]:
    """The proposal, written to `out` where one is named, and notes on how the file was read."""
    from jaxtwin.parity.check.propose_names import proposed
    from jaxtwin.parity.checkpoints import state_dict

    if out is not None and out.exists():
        raise BadInput(f"{out} exists and is left as it is: name a new file")
    notes: list[str] = []
    held = state_dict.unwrapped(state_dict.opened(state, notes), (), notes)
    answer = proposed(held, spec_named(like), module, progress)
    if out:
        write_file(out, answer.proposal.toml(like))
    return answer, notes
