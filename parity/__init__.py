"""The same model on both sides: converted without a changed bit, and proven equal."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxmodel import Decoder
    from parity.findings import Report
    from parity.table import Row


def load(
    src: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    layout: str = "scan",
) -> Decoder:
    """The model that SRC names (see `parity.source`), in JAX, in its own dtype unless given.

    With a mesh (`train.mesh.build`) it is cut as the trainer cuts it, and each device's slices are
    read alone. `layout` is "scan", layers stacked, or "unroll". Needs torch only where SRC is a
    torch file. BadInput where SRC cannot be read, or does not fit the mesh.
    """
    from parity.loading import decoder
    from parity.source import open_source

    return decoder(open_source(src), mesh=mesh, layout=layout, dtype=dtype)


def check(src: str | os.PathLike[str], **how: Any) -> Report:
    """Is the JAX model the PyTorch model? `.equal` of the report is the answer.

    `src` is what `jaxtwin check` takes. The keywords, each with its option there, if it has one:

    - `dtypes` (--dtype): names in a list; ("float64", "float32") by default
    - `tokens` (--tokens): length of the two input rows; 300
    - `layout` (--layout): "scan", layers stacked, or "unroll", one by one
    - `use_witness` (--witness): whether transformers takes part, where it has the model; True
    - `export` (--export): export a Hugging Face folder again, for transformers to compare; False
    - `against` (--against): a source that the JAX side is built from instead of `src`
    - `look` (--probes): judge every part alone too, in every dtype; False
    - `keep` (--replay): a new folder for what fails, with scripts that run it alone
    - `train` (--steps, --run): `parity.trained.plan(steps, run_file)`, to train both sides too
    - `seed` (--seed): of a preset's random weights, and of the inputs; 0
    - `wrong`: a mistake for the JAX side to make (parity/faults), to see it caught
    - `progress`: called with a line for each step of the work

    BadInput (a ValueError) where a source cannot be read, or something is at `keep`.
    """
    from configs import BadInput

    if importlib.util.find_spec("torch") is None:
        raise BadInput("the check needs PyTorch, which is not installed: pip install 'jaxtwin[hf]'")
    from parity.proof import check

    return check(os.fspath(src), **how)


def compare(torch_module: Any, jax_side: Any, table: Any, inputs: Any, **how: Any) -> Report:
    """Any torch module against any JAX function or NNX module: docs/your-own-model.md.

    `table` is a list of `parity.table.Row`, one for each parameter, and `inputs` a list with one
    array for each argument. The keywords:

    - `params`: the JAX function's parameters, {path: array}; an NNX module has its own
    - `probes`: a list of rows between names of `parity.probe` in JAX and torch's submodules
    - `dtypes`: names in a list; ("float64", "float32") by default
    - `jit`: False compiles nothing, which for a tiny model is faster; True

    BadInput (a ValueError) where an argument or a table does not fit.
    """
    from parity.pair import compare

    return compare(torch_module, jax_side, table, inputs, **how)


def sized(table: Any, tensors: Any) -> list[Row]:
    """The rows with the sizes of their single letters, read off torch's tensors (by name)."""
    from parity.pair import sized

    return sized(table, tensors)


def probe(x: Any, name: str) -> Any:
    """x, which a comparison may look at under this name: see `jaxmodel.probe`."""
    from jaxmodel.probe import probe

    return probe(x, name)


def assert_parity(subject: str | os.PathLike[str] | Report, **how: Any) -> Report:
    """For a test: AssertionError where the JAX model is not the PyTorch model.

    `subject` is a source, which is checked (`how` has the keywords of `check`), or a report already
    made, of `check` or `compare`, and then there are none. The error says the verdict, where the
    two part first, and why, as far as it is known.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    from parity.findings import Report
    from parity.wording import complaint

    if isinstance(subject, Report):
        if how:
            raise TypeError(f"a finished report is not checked again: {', '.join(how)}")
        report = subject
    else:
        report = check(subject, **how)
    if not report.equal:
        raise AssertionError(complaint(report))
    return report
