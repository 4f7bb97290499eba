"""The front door: one verb for each thing people come for.

Every verb is a thin wrapper over a function of the rooms, which are imported only when the verb
runs: `jaxtwin --help` answers at once, and converting needs no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from jaxtwin.cli import options
from jaxtwin.cli.around import answering, example, working

app = typer.Typer(
    name="jaxtwin",
    help="A PyTorch decoder and its JAX twin: converted without a changed bit, proven equal.",
    epilog="SRC is an installed model package (smollm2-135m), an HF folder, a .gguf, .pt or golden "
    ".npz file, a checkpoint or run folder of ours, or a preset (random weights from a seed).",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback()
def root(version: options.Version = False) -> None:
    """The options before a verb."""


@app.command(
    epilog=example(
        "convert smollm2-135m out/smollm2 --to jax",
        "convert out/smollm2 out/hf --to hf",
        "convert ./my-llama out/my-llama --to jax --dry-run",
        "convert my.pt out/mine --names my_names.toml",
        "convert out/mine back.pt --to torch --names my_names.toml",
    )
)
def convert(
    src: options.Src,
    dst: options.Dst,
    to: options.To = options.Target.jax,
    layout: options.LayoutOption = options.Layout.scan,
    dry_run: options.DryRun = False,
    names: options.Names = None,
    spec: options.SpecOption = None,
    ignore: options.Ignore = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Move a model's weights between frameworks: no value changes, and the way back is exact."""
    with answering(as_json):
        from jaxtwin import convert as run

        with working() as progress:
            how: dict[str, Any] = {"layout": layout.value, "dry_run": dry_run, "seed": seed}
            how |= {"names": names, "spec": spec, "ignore": ignore or (), "sha256": as_json}
            report = run(src, dst, to.value, **how, progress=progress)
        if as_json:
            print(json.dumps(report))
        else:
            from jaxtwin.parity.report.console import show_conversion

            show_conversion(report)


@app.command(
    epilog=example(
        "check smollm2-135m",
        "check ./my-llama --dtype float64 --dtype float32 --dtype bfloat16",
        "check tests/golden/reference_gqa_tied.npz --json",
        "check ./my-llama --against out/my-jax-run --html report.html",
        "check ./my-llama --against out/my-jax-run --replay out/replay",
        "check ./my-llama --save new.json --baseline old.json --html report.html",
        "check reference-tiny --steps 50 --run configs/runs/train-reference-tiny.toml",
        "check my.pt --names my_names.toml --module my_model.py:GPT",
    )
)
def check(
    src: options.Src,
    dtype: options.Dtypes = None,
    tokens: options.Tokens = 300,
    layout: options.LayoutOption = options.Layout.scan,
    witness: options.Witness = True,
    export: options.Export = True,
    against: options.Against = None,
    names: options.Names = None,
    spec: options.SpecOption = None,
    ignore: options.Ignore = None,
    module: options.Module = None,
    probes: options.Probes = False,
    show_all: options.ShowAll = False,
    seed: options.Seed = 0,
    as_json: options.Json = False,
    save: options.Save = None,
    html: options.Html = None,
    junit: options.Junit = None,
    baseline: options.Baseline = None,
    replay: options.Replay = None,
    steps: options.CheckSteps = None,
    run: options.CheckRun = None,
) -> None:
    """Prove that the JAX model is the PyTorch model: exit status 0 equal, 1 not equal."""
    with answering(as_json):
        from jaxtwin import check as prove
        from jaxtwin.parity.report.output_files import Files

        files = Files(save, html, junit, baseline, replay)
        dtypes = dtype or [options.Dtype.float64, options.Dtype.float32]
        how: dict[str, Any] = {"dtypes": [d.value for d in dtypes], "layout": layout.value}
        how |= {"names": names, "spec": spec, "ignore": ignore or (), "module": module}
        how |= {"witness": witness, "export": export and against is None, "against": against}
        how |= {"tokens": tokens, "probes": probes, "replay": replay, "steps": steps, "run": run}
        with working() as progress:
            report = prove(src, **how, seed=seed, progress=progress)
        changes = files.write(report, src)
        if as_json:
            changed = {} if changes is None else {"changes": changes}
            print(json.dumps(report.to_json() | changed))
        else:
            from jaxtwin.parity.report.console import printer, show, show_changes

            show(report, printer(100), show_all)
            if changes is not None:
                show_changes(changes, printer(100))
    raise typer.Exit(0 if report.equal else 1)


@app.command(
    epilog=example(
        "names --like gpt2",
        "names my.pt --like gpt2",
        "names my.pt --like my_specs.py:mine --module my_model.py:GPT --out my_names.toml",
    )
)
def names(
    like: options.Like,
    state: options.State = None,
    module: options.Module = None,
    out: options.NamesOut = None,
    as_json: options.Json = False,
) -> None:
    """Propose names for a state dict of your own: exit status 0 settled, 1 something is open.

    Without FILE, list jaxtwin's own names of that model's tensors, with their shapes.
    """
    with answering(as_json, out):
        from jaxtwin.cli import naming

        if state is None:
            found = naming.ours(like)
            print(json.dumps(found) if as_json else naming.listed(found))
            return
        with working() as progress:
            answer, notes = naming.proposal(state, like, module, out, progress)
        found = answer.proposal
        if as_json:
            print(json.dumps(found.to_json() | {"how": answer.how, "notes": notes}))
        else:
            print(found.toml(like), end="")
            for note in notes:
                typer.echo(f"note: {note}", err=True)
            n = len(found.open)
            more = "say which" if module else "give --module, or say which"
            left = f"{n} open: {more}" if n else "settled"
            typer.echo(f"{answer.how}: {left}", err=True)
    raise typer.Exit(1 if found.open else 0)


@app.command(
    epilog=example(
        "faults",
        "faults rope-base tile-not-repeat --controls 0 --pairs 0",
        "faults --in my_specs.py:mine",
    )
)
def faults(
    names: options.Faults = None,
    controls: options.Controls = 200,
    pairs: options.Pairs = 50,
    workers: options.Workers = 2,
    model: options.FaultsIn = None,
    as_json: options.Json = False,
    save: options.Save = None,
) -> None:
    """The check checked: makes every known fault, and tells whether it is caught and named."""
    with answering(as_json, save):
        from jaxtwin.configs.atomic_write import write_file
        from jaxtwin.parity.selftest.kill_table import passed
        from jaxtwin.parity.selftest.kill_table import run as kill

        with working() as progress:
            how: dict[str, Any] = {"controls": controls, "pairs": pairs, "workers": workers}
            how |= {"model": model}
            table = kill(names=names or (), **how, progress=progress)
        if save:
            write_file(save, json.dumps(table, indent=1))
        if as_json:
            print(json.dumps(table))
        else:
            from jaxtwin.parity.report.console import printer, show_faults

            show_faults(table, printer(100))
    raise typer.Exit(0 if passed(table) else 1)


@app.command(
    epilog=example(
        'generate smollm2-135m --prompt "def fibonacci(n):" --tokens 48',
        "generate tests/golden/reference_gqa_tied.npz --ids 1,2,3,4 --tokens 8",
    )
)
def generate(
    src: options.Src,
    prompt: options.Prompt = None,
    ids: options.Ids = None,
    tokens: options.NewTokens = 64,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    stop: options.Stop = True,
    dtype: options.GenerateDtype = options.Dtype.float32,
    names: options.Names = None,
    spec: options.SpecOption = None,
    ignore: options.Ignore = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Continue a prompt with the JAX model."""
    with answering(as_json):
        from jaxtwin.cli.model_facts import Continuation, continuation
        from jaxtwin.configs import BadInput

        if (prompt is None) == (ids is None):
            raise BadInput(
                "give the prompt as text (--prompt) or as ids (--ids 1,2,3), one of them"
            )
        if top_k is not None and temperature == 0:
            raise BadInput("--top-k has no effect at --temperature 0; give a temperature above 0")
        wanted = Continuation(
            prompt,
            ids,
            tokens,
            temperature,
            top_k,
            stop,
            dtype.value,
            seed,
            names,
            spec,
            ignore or (),
        )
        with working() as progress:
            answer = continuation(src, wanted, progress)
        print(json.dumps(answer) if as_json else answer["text"])


@app.command(epilog=example("inspect smollm2-135m", "inspect reference-100m --json"))
def inspect(
    src: options.Src,
    names: options.Names = None,
    spec: options.SpecOption = None,
    ignore: options.Ignore = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """What is in SRC: spec, parameters, bytes. Reads headers only."""
    with answering(as_json):
        from jaxtwin.cli.model_facts import inspected
        from jaxtwin.parity.checkpoints.source import open_source
        from jaxtwin.parity.report.console import show_model

        source = open_source(src, seed=seed, names=names, spec=spec, ignore=ignore or ())
        facts = inspected(source)
        if as_json:
            print(json.dumps(facts))
        else:
            show_model(facts, source.spec)


@app.command(epilog=example("presets", "presets --json"))
def presets(as_json: options.Json = False) -> None:
    """The models that are known by name: their sizes, and which tokenizer and weights there are."""
    with answering(as_json):
        from jaxtwin.cli.model_facts import known_presets
        from jaxtwin.parity.report.console import show_presets

        found = known_presets()
        if as_json:
            print(json.dumps(found))
        else:
            show_presets(found)


@app.command(
    epilog=example("train configs/runs/train-reference-tiny.toml", "train my-run.toml --steps 100")
)
def train(
    config: options.Config,
    steps: options.TrainSteps = None,
    out: options.Out = None,
    as_json: options.Json = False,
    save: options.Save = None,
) -> None:
    """Train or fine-tune on a mesh of devices; started again, it resumes where it stopped."""
    with answering(as_json, save):
        from jaxtwin.configs.atomic_write import write_file
        from jaxtwin.parity.report.console import show_facts

        summary = trained(config, steps=steps, out=out)
        if save:
            write_file(save, json.dumps(summary, indent=1))
        if as_json:
            print(json.dumps(summary))
        else:
            show_facts({key: value for key, value in summary.items() if key != "steps"})


@app.command(epilog=example("demo", "demo --out out/demo"))
def demo(out: options.DemoOut = None, steps: options.DemoSteps = 20) -> None:
    """The whole job on SmolLM2-135M: convert, check, generate, fine-tune, export."""
    with answering():
        from jaxtwin.cli.demo import demonstrate, unused

        demonstrate(out or unused(Path("out/demo")), steps, working)


def trained(path: Path, *, steps: int | None = None, out: Path | None = None) -> dict[str, Any]:
    """The run of a TOML file, from start or resumed to its end; the JSON of `train`."""
    import dataclasses

    from jaxtwin import fit

    result = fit(path, steps=steps, folder=out)
    done = result.steps
    return {
        "folder": str(result.folder),
        "resumed": result.resumed,
        "loss": {"first": done[0].loss, "last": done[-1].loss} if done else None,
        "skipped": result.skipped,
        "compile_seconds": result.compile_seconds,
        "tokens_per_second": result.tokens_per_second,
        "steps": [dataclasses.asdict(step) for step in done],
    }


def main() -> None:
    """The command `jaxtwin`."""
    app(prog_name="jaxtwin")  # also with `python -m jaxtwin`


if __name__ == "__main__":
    main()
