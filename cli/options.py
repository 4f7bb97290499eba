"""The arguments and options of the verbs: what --help says of each."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Target(StrEnum):
    jax = "jax"
    hf = "hf"
    meta = "meta"
    torch = "torch"


class Layout(StrEnum):
    scan = "scan"
    unroll = "unroll"


class Dtype(StrEnum):
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


State = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="A state dict: .pt, .pth, .bin or .safetensors."),
]
Src = Annotated[str, typer.Argument(metavar="SRC", help="The model: see `jaxtwin --help`.")]
Save = Annotated[Path | None, typer.Option(help="Write that JSON object to a file too.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Seed = Annotated[
    int,
    typer.Option(
        min=0, max=2**32 - 1, help="Seed of a preset's random weights, inputs and sampling."
    ),
]
LayoutOption = Annotated[Layout, typer.Option(help="Layers stacked, or one by one.")]

Names = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="What your own state dict's tensors are: .toml or .py."),
]
SpecOption = Annotated[
    str | None,
    typer.Option("--spec", metavar="SPEC", help="A preset or FILE.py:NAME; goes with --names."),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY", help="A key of config.json that changes nothing; may be repeated."),
]
Module = Annotated[
    str | None,
    typer.Option(metavar="FILE.py:NAME", help="Your own torch module: JAX must be that too."),
]

# names
Like = Annotated[
    str, typer.Option(metavar="SPEC", help="What the model is: a preset or FILE.py:NAME.")
]
NamesOut = Annotated[
    Path | None, typer.Option(help="Write the names to a new file, my_names.toml.")
]


def _version(wanted: bool) -> None:
    if wanted:
        import jaxtwin

        print(f"jaxtwin {jaxtwin.__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop."),
]

# convert
Dst = Annotated[Path, typer.Argument(help="A new folder (jax, hf, meta) or .pt file (torch).")]
To = Annotated[Target, typer.Option(help="What to write.")]
DryRun = Annotated[bool, typer.Option(help="Prove and print the plan; write nothing.")]

# check
Dtypes = Annotated[
    list[Dtype] | None, typer.Option(help="May be repeated; float64 and float32 by default.")
]
Tokens = Annotated[int, typer.Option(min=8, help="Length of the two input rows.")]
Witness = Annotated[bool, typer.Option(help="Let transformers take part.")]
Export = Annotated[
    bool, typer.Option(help="Export a Hugging Face folder again, for transformers to compare.")
]
Against = Annotated[
    str | None, typer.Option(metavar="SRC", help="Load the JAX model from this instead of SRC.")
]
Probes = Annotated[
    bool, typer.Option("--probes", help="Judge every part alone too, in every dtype.")
]
ShowAll = Annotated[bool, typer.Option("--all", help="Show every comparison.")]
Html = Annotated[Path | None, typer.Option(help="Write a page for a browser.")]
Junit = Annotated[Path | None, typer.Option(help="Write JUnit XML, for CI.")]
Baseline = Annotated[Path | None, typer.Option(help="Say what changed since that file of --save.")]
Replay = Annotated[
    Path | None, typer.Option(help="A new folder for what fails: scripts that run it alone.")
]
CheckSteps = Annotated[
    int | None, typer.Option(min=1, help="Train both sides for that many AdamW steps too.")
]
CheckRun = Annotated[
    Path | None, typer.Option(help="Take the optimizer of this run file; needs --steps.")
]

# faults
Faults = Annotated[list[str] | None, typer.Argument(help="Faults to make; all by default.")]
Controls = Annotated[int, typer.Option(min=0, help="Random fault-free models, which must pass.")]
Pairs = Annotated[int, typer.Option(min=0, help="Random models with two faults, in two layers.")]
FaultsIn = Annotated[
    str | None,
    typer.Option("--in", metavar="SPEC", help="Make them in this model: a preset or FILE.py:NAME."),
]
Workers = Annotated[int, typer.Option(min=1, help="Worker processes.")]

# generate
Prompt = Annotated[str | None, typer.Option(help="Text to continue.")]
Ids = Annotated[str | None, typer.Option(help="Token ids to continue, by commas.")]
NewTokens = Annotated[int, typer.Option(help="How many tokens to add at most.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the k likeliest.")]
Stop = Annotated[bool, typer.Option(help="Stop at the model's EOS tokens.")]
GenerateDtype = Annotated[Dtype, typer.Option(help="Dtype of the computation.")]

# train, demo
Config = Annotated[Path, typer.Argument(help="A TOML run file; see configs/runs/.")]
TrainSteps = Annotated[int | None, typer.Option(help="Override the file's number of steps.")]
Out = Annotated[Path | None, typer.Option(help="Override the file's run folder.")]
DemoOut = Annotated[
    Path | None,
    typer.Option(help="A new folder for what it writes; by default out/demo, or out/demo-2 ..."),
]
DemoSteps = Annotated[int, typer.Option(min=10, help="Fine-tuning steps.")]
