"""A run: what training decides, apart from what the model is.

Read from a TOML file; `configs/runs/` holds examples. Validated as strictly as a spec: a wrong
type, an unknown field, or two decisions that contradict each other are refused, and the message
names the file and the field.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field, model_validator

from jaxtwin.configs.errors import BadInput
from jaxtwin.configs.fields import Above0, Size, Small, spec, validated

Count = Annotated[int, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


@spec
class Mesh:
    """How many ways each kind of parallelism splits; the product is the number of devices.

    data: rows of the batch. fsdp: rows too, and every parameter and moment along the model width.
    tensor: heads, ffn hidden width and vocabulary.
    """

    data: Size = 1
    fsdp: Size = 1
    tensor: Size = 1

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def row_shards(self) -> int:
        """How many devices hold different rows."""
        return self.data * self.fsdp


@spec
class AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) and its learning rate.

    The rate of update i, counted from 0, is `peak * i / warmup` before i = warmup; then it falls as
    half a cosine, or holds, until `floor` at i = steps. So with a warm-up the first update moves
    nothing and only fills the moments, as in Hugging Face's and optax's schedules.
    """

    peak: Above0
    warmup: Count
    schedule: Literal["cosine", "constant"]
    floor: Small = 0.0
    b1: Beta
    b2: Beta
    eps: Above0
    weight_decay: Small
    clip: Above0 | None = None  # the gradient's global norm is brought down to this

    @model_validator(mode="after")
    def _agrees(self) -> AdamW:
        if self.floor > self.peak:
            raise ValueError(f"floor={self.floor} is above peak={self.peak}")
        if self.schedule == "constant" and self.floor:
            raise ValueError(f"floor={self.floor} has no effect on a constant schedule")
        return self


@spec
class Data:
    """What to train on. "stdlib" is the source text of the running Python's standard library.

    `max_bytes` of it are tokenized, whole files in the order of their paths. `eos` ends a document;
    left out, the checkpoint's own end token is used.
    """

    source: Literal["stdlib"]
    max_bytes: Size
    eos: Count | None = None


@spec
class Training:
    """One training run, in full.

    `batch` rows of `length` predicted tokens make a step. With `accumulate` = k they pass through
    the model in k parts, and it is still one step of the optimizer and of the schedule. Parameters
    and moments are float32 always; `compute` is the dtype of the forward and backward pass.
    """

    model: str  # a preset's name, a folder, a file: whatever the front door reads
    names: str | None = None  # of a state dict under a person's own names: a .toml or .py file
    spec: str | None = None  # of that state dict, where the names' file has none
    ignore: tuple[str, ...] = ()  # keys of a config.json that are not known and change nothing
    folder: str  # checkpoints; a run that finds a complete step here resumes from it
    steps: Size
    batch: Size
    length: Size
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    optimizer: AdamW
    data: Data
    mesh: Mesh = Mesh()
    accumulate: Size = 1
    compute: Literal["float32", "bfloat16"] = "float32"
    layout: Literal["scan", "unroll"] = "scan"
    remat: Literal["none", "dots", "full"] = "none"
    devices: Size | None = None  # simulated CPU devices; left out, the machine's own are used
    save_every: Size
    keep: Size = 2  # complete steps to keep; older ones go once a newer one is durable
    log_every: Size = 1

    @model_validator(mode="after")
    def _agrees(self) -> Training:
        shards = self.accumulate * self.mesh.row_shards
        if self.batch % shards:
            raise ValueError(
                f"batch={self.batch} rows do not divide by accumulate={self.accumulate} x "
                f"mesh.data={self.mesh.data} x mesh.fsdp={self.mesh.fsdp}; "
                f"the nearest batch that does is {max(1, round(self.batch / shards)) * shards}"
            )
        if self.devices is not None and self.devices != self.mesh.devices:
            raise ValueError(f"devices={self.devices}, but the mesh needs {self.mesh.devices}")
        if self.optimizer.warmup >= self.steps:
            raise ValueError(
                f"optimizer.warmup={self.optimizer.warmup} leaves no step of steps={self.steps}"
            )
        return self


_TRAINING: pydantic.TypeAdapter[Training] = pydantic.TypeAdapter(Training)


def read(path: str | os.PathLike[str]) -> Training:
    """The run in a TOML file, or a BadInput that names the file and every field at fault."""
    try:
        with Path(path).open("rb") as file:
            data = tomllib.load(file)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not TOML: {error}") from None
    plain = json.loads(json.dumps(data, default=str))  # TOML has dates; no field here takes one
    return validated(_TRAINING, plain, str(path))


def changed(run: Training, where: str, **new: object) -> Training:
    """The run with some fields overridden (None leaves a field alone), validated anew."""
    fields = _TRAINING.dump_python(run, mode="json")
    changes = {name: value for name, value in new.items() if value is not None}
    return validated(_TRAINING, {**fields, **changes}, f"{where}, with {changes}")
