"""What `import jaxtwin` offers: each function imports what it needs when it is called."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxtwin.configs.runs import Training
    from jaxtwin.jaxmodel import Decoder
    from jaxtwin.parity.report.results import Report
    from jaxtwin.train.loop import Result


def load(
    src: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    layout: str = "scan",
    seed: int = 0,
) -> Decoder:
    """The model that SRC names (`jaxtwin --help`), in JAX, in its own dtype unless given.

    With a mesh (`jaxtwin.train.mesh.build`) it is sharded as the trainer shards it, and each device
    reads its slices alone. `layout` is "scan" (stacked layers) or "unroll"; `seed` is for a
    preset's random weights. Needs torch only where SRC is a torch file. BadInput where SRC cannot
    be read, or does not fit the mesh.
    """
    from jaxtwin.parity.checkpoints.loading import decoder
    from jaxtwin.parity.checkpoints.source import open_source

    return decoder(open_source(src, seed=seed), mesh=mesh, layout=layout, dtype=dtype)


def save(
    model: Decoder,
    dst: str | os.PathLike[str],
    to: str = "jax",
    *,
    like: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Writes a jaxmodel as a checkpoint of ours ("jax"), a Hugging Face folder ("hf") or a .pt.

    `like` names the source that it was loaded from: its tokenizer, token ids and config.json travel
    with the weights. Returns what `convert` returns. BadInput where DST cannot be written, or the
    target has no such model; nothing is written then.
    """
    from jaxtwin.parity.checkpoints.convert import convert
    from jaxtwin.parity.checkpoints.loading import source_of
    from jaxtwin.parity.checkpoints.source import open_source

    return convert(source_of(model, None if like is None else open_source(like)), dst, to)


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: str = "jax",
    *,
    layout: str = "scan",
    dry_run: bool = False,
    seed: int = 0,
    sha256: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Writes the model that SRC names as a checkpoint of ours ("jax"), a Hugging Face folder ("hf")
    or a .pt file ("torch"); returns the JSON of `jaxtwin convert` (docs/json.md).

    Every tensor is proven to have its place before a byte is written. BadInput on anything that is
    wrong with SRC or DST.
    """
    from jaxtwin.parity.checkpoints import convert as conversion

    return conversion.convert(
        src,
        dst,
        to,
        layout=layout,
        dry_run=dry_run,
        seed=seed,
        sha256=sha256,
        progress=progress,
    )


def generate(
    model: Decoder,
    ids: Any,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    eos: int | Sequence[int] | None = None,
    seed: int = 0,
) -> Any:
    """The prompt ids (b t) with up to `new_tokens` more, as a NumPy array of integers.

    At temperature 0 the likeliest token is taken. A row is finished at the first `eos` that it
    generates. ValueError on arguments out of range (`jaxtwin.jaxmodel.sample.generate`).
    """
    from jaxtwin.jaxmodel import sample

    return sample.generate(
        model, ids, new_tokens, temperature=temperature, top_k=top_k, eos=eos, seed=seed
    )


def fit(
    run: str | os.PathLike[str] | Training,
    *,
    steps: int | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Result:
    """Trains as a run says: a TOML file (configs/runs/), or a `jaxtwin.configs.runs.Training`.

    `steps` and `folder` take the place of the run's own. Started again it resumes at the newest
    complete step. BadInput where model, mesh, data and folder do not go together.
    """
    from jaxtwin.configs import runs
    from jaxtwin.parity.checkpoints.convert import carried, jax_tensors
    from jaxtwin.parity.checkpoints.source import open_source
    from jaxtwin.train import loop, mesh

    named = "the run" if isinstance(run, runs.Training) else os.fspath(run)
    config = run if isinstance(run, runs.Training) else runs.read(run)
    path = None if folder is None else os.fspath(folder)
    config = runs.changed(config, named, steps=steps, folder=path)
    if config.devices is not None:
        mesh.simulate(config.devices)  # before the source is opened: a preset's is drawn by JAX
    source = open_source(config.model, seed=config.seed)
    start = loop.Start(
        spec=source.spec,
        arrays=lambda: jax_tensors(source, config.layout),
        carry=carried(source),
        eos=source.eos,
    )
    return loop.run(config, start)


def check(
    src: str | os.PathLike[str],
    *,
    steps: int | None = None,
    run: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Report:
    """Is the JAX model the PyTorch model? `.equal` of the report is the answer.

    `src` is what `jaxtwin check` takes. The options, each with its flag there, if it has one:

    - `dtypes` (--dtype): names in a list; ("float64", "float32") by default
    - `tokens` (--tokens): length of the two input rows; 300
    - `layout` (--layout): "scan", layers stacked, or "unroll", one by one
    - `witness` (--witness): whether transformers takes part, where it has the model; True
    - `export` (--export): export a Hugging Face folder again, for transformers to compare; False
    - `against` (--against): a source that the JAX side is built from instead of `src`
    - `probes` (--probes): judge every part alone too, in every dtype; False
    - `replay` (--replay): a new folder for what fails, with scripts that run it alone
    - `steps` (--steps): train both sides for that many AdamW steps too
    - `run` (--run): a run file, whose optimizer they are trained with; needs `steps`
    - `seed` (--seed): of a preset's random weights, and of the inputs; 0
    - `diagnose`: follow a failure in float64 to its cause; True
    - `injected`: a fault for the JAX side (parity/selftest/faults), to see it caught
    - `progress`: called with a line for each step of the work

    BadInput (a ValueError) where a source cannot be read, or something is at `replay`.
    """
    from jaxtwin.configs import BadInput

    if importlib.util.find_spec("torch") is None:
        raise BadInput("the check needs PyTorch, which is not installed: pip install 'jaxtwin[hf]'")
    from jaxtwin.parity.check.source_check import check
    from jaxtwin.parity.training.training_check import plan

    if steps is not None or run is not None:
        options["training"] = plan(steps, run)
    return check(os.fspath(src), **options)


def compare(torch_module: Any, jax_side: Any, table: Any, inputs: Any, **options: Any) -> Report:
    """Any torch module against any JAX function or NNX module: docs/your-own-model.md.

    `table` is a list of `jaxtwin.Row`, one for each parameter, and `inputs` a list with one array
    for each argument. The options:

    - `params`: the JAX function's parameters, {path: array}; an NNX module has its own
    - `probes`: a list of rows between names of `jaxtwin.probe` in JAX and torch's submodules
    - `dtypes`: names in a list; ("float64", "float32") by default
    - `jit`: False compiles nothing, which for a tiny model is faster; True

    BadInput (a ValueError) where an argument or a table does not fit.
    """
    from jaxtwin.parity.check.any_model import compare

    return compare(torch_module, jax_side, table, inputs, **options)


def probe(x: Any, name: str) -> Any:
    """x, which a comparison may see under this name: `jaxtwin.jaxmodel.probe`."""
    from jaxtwin.jaxmodel.probe import probe

    return probe(x, name)


def assert_parity(subject: str | os.PathLike[str] | Report, **options: Any) -> Report:
    """For a test: AssertionError where the JAX model is not the PyTorch model.

    `subject` is a source, which is checked (with the options of `check`), or a report of
    `check` or `compare`, and then there are none. The error tells the verdict, where the two first
    diverge, and why, as far as it is known.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    from jaxtwin.parity.report.results import Report
    from jaxtwin.parity.report.wording import complaint

    if isinstance(subject, Report):
        if options:
            raise TypeError(f"a finished report is not checked again: {', '.join(options)}")
        report = subject
    else:
        report = check(subject, **options)
    if not report.equal:
        raise AssertionError(complaint(report))
    return report
