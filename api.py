"""What `import jaxtwin` offers: each function imports what it needs when it is called."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flax.nnx import Module as NnxModule
    from jax.sharding import Mesh
    from torch.nn import Module as TorchModule

    from jaxtwin.configs import Model
    from jaxtwin.configs.runs import Training
    from jaxtwin.jaxmodel import Decoder
    from jaxtwin.parity.naming.names import Names
    from jaxtwin.parity.report.results import Report
    from jaxtwin.parity.sides.runs import InjectedFault
    from jaxtwin.parity.table.row import Row
    from jaxtwin.train.loop import Result
else:  # typing.get_type_hints looks names up here, and must not import a framework for them
    NnxModule = Mesh = TorchModule = Model = Training = Decoder = Any
    Names = Report = InjectedFault = Row = Result = Any


def load(
    src: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    layout: str = "scan",
    seed: int = 0,
    names: Names | None = None,
    spec: Model | str | None = None,
    ignore: Sequence[str] = (),
) -> Decoder:
    """The model that SRC names (`jaxtwin --help`), in JAX, in its own dtype unless given.

    With a mesh (`jaxtwin.train.mesh.build`) it is sharded as the trainer shards it, and each device
    reads its slices alone. `layout` is "scan" (stacked layers) or "unroll"; `seed` is for a
    preset's random weights. `names` and `spec` are for a state dict under names of your own
    (docs/own-names.md), `ignore` for keys of a config.json that are not known here and change
    nothing that is computed. Needs torch only where SRC is a torch file. BadInput where SRC cannot
    be read, or does not fit the mesh.
    """
    from jaxtwin.parity.checkpoints.loading import decoder
    from jaxtwin.parity.checkpoints.source import open_source

    source = open_source(src, seed=seed, names=names, spec=spec, ignore=ignore)
    return decoder(source, mesh=mesh, layout=layout, dtype=dtype)


def adopt(
    state: Mapping[str, Any],
    spec: Model | str,
    names: Names,
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    layout: str = "scan",
) -> Decoder:
    """A state dict under names of your own (torch tensors or NumPy arrays), as a model in JAX.

    `spec` says what it computes: a `Model`, a preset's name or FILE.py:NAME. `names` says which of
    your tensors is which: a dict, or a .toml or .py file (docs/own-names.md). BadInput where a
    tensor has no place, or is not of its shape; no value is ever changed.
    """
    from jaxtwin.parity.checkpoints.loading import adopted, decoder

    return decoder(adopted(state, spec, names), mesh=mesh, dtype=dtype, layout=layout)


def release(model: Decoder, names: Names) -> dict[str, Any]:
    """The inverse of `adopt`: a state dict of torch tensors, for your module's `load_state_dict`.

    What `names` leaves out, such as buffers, is not in it: load it with `strict=False` then.
    """
    from jaxtwin.parity.checkpoints.loading import released
    from jaxtwin.parity.table.bridge import to_torch

    return {name: to_torch(array) for name, array in released(model, names).items()}


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
    names: Names | None = None,
    spec: Model | str | None = None,
    ignore: Sequence[str] = (),
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Writes the model that SRC names as a checkpoint of ours ("jax"), a Hugging Face folder
    ("hf"), a folder of Meta's ("meta") or a .pt file ("torch"); returns the JSON of `convert`
    (docs/json.md).

    `names` (with a `spec`, if the file has none) are those of a state dict of your own: of SRC, or
    where SRC is another kind of model, of the .pt that is written.
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
        reading={"names": names, "spec": spec, "ignore": ignore},
        progress=progress,
    )


def register_activation(
    name: str, *, torch: Callable[[Any], Any], jax: Callable[[Any], Any]
) -> None:
    """Makes an activation of your own known to specs by that name: f(x), in torch and in JAX."""
    from jaxtwin.configs import own_parts

    own_parts.register_activation(name, torch=torch, jax=jax)


def register_norm(name: str, *, torch: Callable[..., Any], jax: Callable[..., Any]) -> None:
    """Makes a norm of your own known to `OwnNorm(name=...)`: f(x, weight, eps), over the last axis.

    `weight` has one number for each entry of that axis, 1 at first; a bias is the spec's and is
    added afterwards. What it returns has the dtype of x.
    """
    from jaxtwin.configs import own_parts

    own_parts.register_norm(name, torch=torch, jax=jax)


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
    from jaxtwin.parity.checkpoints.convert import carried
    from jaxtwin.parity.checkpoints.loading import jax_tensors
    from jaxtwin.parity.checkpoints.source import open_source
    from jaxtwin.train import loop, mesh

    named = "the run" if isinstance(run, runs.Training) else os.fspath(run)
    config = run if isinstance(run, runs.Training) else runs.read(run)
    path = None if folder is None else os.fspath(folder)
    config = runs.changed(config, named, steps=steps, folder=path)
    if config.devices is not None:
        mesh.simulate(config.devices)  # before the source is opened: a preset's is drawn by JAX
    source = open_source(
        config.model, seed=config.seed, names=config.names, spec=config.spec, ignore=config.ignore
    )
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
    dtypes: Sequence[str] = ("float64", "float32"),
    tokens: int = 300,
    layout: str = "scan",
    witness: bool = True,
    export: bool = False,
    against: str | os.PathLike[str] | None = None,
    names: Names | None = None,
    spec: Model | str | None = None,
    ignore: Sequence[str] = (),
    module: Any = None,
    probes: bool = False,
    replay: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    run: str | os.PathLike[str] | None = None,
    seed: int = 0,
    diagnose: bool = True,
    injected: InjectedFault | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Report:
    """Is the JAX model the PyTorch model? `.equal` of the report is the answer.

    `src` and the options are those of `jaxtwin check` (its --help says more). `dtypes`, `tokens` (a
    row), `layout`: what is compared. `names`, `spec` and `ignore` say how `src` is read, as in
    `load`; `module` is your own module, FILE.py:NAME or what builds it, which JAX must be too;
    `against` is what the JAX side is built from instead. `witness`: transformers takes part;
    `export`: a Hugging Face folder is exported again. `probes`: every part is judged alone too;
    `replay`: a new folder for what fails. With `steps` both sides are trained for as many steps, as
    the file `run` says. `seed` is that of random weights and inputs. `diagnose`: a failure in
    float64 is followed to its cause; `injected`: a fault for the JAX side, to see it caught;
    `progress` is called with a line for each step. BadInput where a source cannot be read.
    """
    from jaxtwin.configs import BadInput

    if importlib.util.find_spec("torch") is None:
        raise BadInput("the check needs PyTorch, which is not installed: pip install 'jaxtwin[hf]'")
    from jaxtwin.parity.check.source_check import check
    from jaxtwin.parity.training.training_check import plan

    training = None if steps is None and run is None else plan(steps, run)
    how: dict[str, Any] = {"dtypes": dtypes, "tokens": tokens, "layout": layout, "seed": seed}
    how |= {"probes": probes, "replay": replay, "diagnose": diagnose, "injected": injected}
    how |= {"witness": witness, "export": export, "against": against, "training": training}
    reading = {"names": names, "spec": spec, "ignore": ignore}
    return check(os.fspath(src), reading=reading, module=module, progress=progress, **how)


def compare(
    torch_module: TorchModule,
    jax_side: Callable[..., Any] | NnxModule,
    table: Sequence[Row],
    inputs: Sequence[Any],
    *,
    params: Mapping[str, Any] | None = None,
    probes: Sequence[Row] = (),
    dtypes: Sequence[str] = ("float64", "float32"),
    jit: bool = True,
    baseline: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Report:
    """Any torch module against any JAX function or Flax module: docs/your-own-model.md.

    `table` is a list of `jaxtwin.Row`, one for each parameter, and `inputs` a list with one array
    for each argument. The options:

    - `params`: the parameters of a JAX function or a linen module, nested or {path: array}; an NNX
      module has its own
    - `probes`: a list of rows between names of `jaxtwin.probe` in JAX and those in torch, or
      torch's submodules ("NAME" for what one returns, "NAME:in" for its first argument)
    - `dtypes`: names in a list; ("float64", "float32") by default
    - `jit`: False compiles nothing, which for a tiny model is faster; True
    - `baseline`: an earlier report's JSON, or its file; the notes tell what has changed

    BadInput (a ValueError) where an argument or a table does not fit.
    """
    from jaxtwin.parity.any_model.compare import compare
    from jaxtwin.parity.report.baseline import note_changes

    report = compare(
        torch_module,
        jax_side,
        table,
        inputs,
        params=params,
        probes=probes,
        dtypes=dtypes,
        jit=jit,
    )
    note_changes(report, baseline)
    return report


def probe(x: Any, name: str) -> Any:
    """x, an array of JAX or a tensor of torch, which a comparison may see under this name."""
    if type(x).__module__.partition(".")[0] == "torch":
        from jaxtwin.parity.sides.marks import mark

        return mark(x, name)
    from jaxtwin.jaxmodel.probe import probe

    return probe(x, name)


def assert_parity(
    subject: str | os.PathLike[str] | Report,
    *,
    baseline: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """For a test: AssertionError where the JAX model is not the PyTorch model.

    `subject` is a source, which is checked (with the options of `check`), or a report of
    `check` or `compare`, and then there are none. The error tells the verdict, where the two first
    diverge, and why, as far as it is known. `baseline` is an earlier report's JSON, or its file:
    what has changed since is told too.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    from jaxtwin.parity.report.baseline import note_changes
    from jaxtwin.parity.report.results import Report
    from jaxtwin.parity.report.wording import complaint

    if isinstance(subject, Report):
        if options:
            raise TypeError(f"a finished report is not checked again: {', '.join(options)}")
        report = subject
    else:
        report = check(subject, **options)
    note_changes(report, baseline)
    if not report.equal:
        raise AssertionError(complaint(report))
    return report
