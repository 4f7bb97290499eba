"""What every spec is made of: the types of its fields, and a dataclass that validates strictly."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar, cast, dataclass_transform

import pydantic
from pydantic import ConfigDict, Field

from jaxtwin.configs.errors import BadInput

Size = Annotated[int, Field(gt=0, description="a count of something: a positive integer")]
Small = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeast1 = Annotated[float, Field(ge=1, allow_inf_nan=False)]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def spec(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass that refuses wrong types and unknown fields."""
    config = ConfigDict(strict=True, extra="forbid")
    built = pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=True, config=config)
    return cast(type[T], built)


def validated(adapter: pydantic.TypeAdapter[T], data: Any, where: str) -> T:
    """JSON-like data as the adapter's type, or a BadInput that lists every field at fault."""
    try:
        return adapter.validate_json(json.dumps(data))
    except pydantic.ValidationError as error:
        lines = []
        for e in error.errors(include_url=False):
            field = ".".join(map(str, e["loc"])) or "(whole)"
            got = "" if e["type"] in ("missing", "value_error") else f", got {e['input']!r:.60}"
            lines.append(f"  {field}: {e['msg']}{got}")
        raise BadInput(f"{where} is not valid:\n" + "\n".join(lines)) from None
