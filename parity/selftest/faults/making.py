"""How a fault is made in a finished JAX model: parts that answer, or are set, otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxtwin.configs import dataflow
from jaxtwin.configs import spec as specs
from jaxtwin.jaxmodel.attention import Attention
from jaxtwin.jaxmodel.aux import NO_AUX
from jaxtwin.jaxmodel.block import Block
from jaxtwin.jaxmodel.position import Rotary
from jaxtwin.jaxmodel.probe import probe
from jaxtwin.parity.selftest.faults.base import NoPlace

if TYPE_CHECKING:
    from jaxtwin.jaxmodel import Decoder

ModelEdit = Callable[["Decoder"], None]


def parts(model: Any, *classes: type) -> list[Any]:
    """Every module of these classes, found by walking the model."""
    from flax import nnx

    return [m for _, m in nnx.iter_modules(model) if isinstance(m, classes)]


def setting(part: type, change: Callable[[Any], None]) -> ModelEdit:
    """Every module of that class changed."""

    def edit(model: Decoder) -> None:
        found = parts(model, part)
        if not found:
            raise NoPlace(f"the model has no {part.__name__}")
        for module in found:
            change(module)

    return edit


def without(*classes: type) -> Callable[[ModelEdit], ModelEdit]:
    """The edit, for models that have no such part: with one it would be another fault."""

    def restricted(edit: ModelEdit) -> ModelEdit:
        def checked(model: Decoder) -> None:
            if parts(model, *classes):
                raise NoPlace(f"the model has a {' or '.join(c.__name__ for c in classes)}")
            edit(model)

        return checked

    return restricted


def where_present(part: type, edit: ModelEdit) -> ModelEdit:
    """The edit, for models that have such a part."""

    def checked(model: Decoder) -> None:
        if not parts(model, part):
            raise NoPlace(f"the model has no {part.__name__}")
        edit(model)

    return checked


def answering(module: Any, call: Callable[..., Any]) -> None:
    """The module answers with call(original, module, *arguments)."""
    cls = type(module)

    def wrapped(self: Any, *args: Any) -> Any:
        def original(*passed: Any) -> Any:
            return cls.__call__(self, *passed)

        original.__wrapped__ = cls.__call__  # type: ignore[attr-defined]
        return call(original, self, *args)

    module.__class__ = type(cls.__name__, (cls,), {"__call__": wrapped})


def calling(part: type, call: Callable[..., Any]) -> ModelEdit:
    """Every module of that class answers with call(original, module, *arguments)."""
    return setting(part, lambda module: answering(module, call))


def changing(part: type, change: Callable[[Any], Any]) -> ModelEdit:
    """Every module of that class returns change(its output); what it returns beside stays."""

    def call(original: Any, self: Any, *args: Any) -> Any:
        out = original(*args)
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    return calling(part, call)


def tiled(attention: Any) -> None:
    """K/V heads tiled (0 1 0 1): query head n is served by K/V head n mod k, not n // (n/k)."""
    kv, groups = attention.groups

    def group(q: Any) -> Any:
        return q.reshape(*q.shape[:2], groups, kv, q.shape[3]).swapaxes(2, 3)

    def ungroup(mixed: Any) -> Any:
        return mixed.swapaxes(2, 3).reshape(*mixed.shape[:2], -1, mixed.shape[-1])

    def in_order(original: Any, self: Any, scores: Any, *more: Any) -> Any:
        """What has a number for each query head is to meet the heads in their own order."""
        b, _, _, t, s = scores.shape
        heads = scores.swapaxes(1, 2).reshape(b, kv, groups, t, s)
        return original(heads, *more).reshape(b, groups, kv, t, s).swapaxes(1, 2)

    attention.group, attention.ungroup = group, ungroup
    answering(attention.relative, in_order)
    answering(attention.softmax, in_order)


def rotated_values(attend: Any, self: Any, x: Any, context: Any, kv: Any) -> Any:
    """Attention whose values turn as its keys do."""
    changed = copy.copy(self)

    def bias_and_turn(v: Any) -> Any:
        return self.rotate(self.v_bias(v), context.positions, context.length)

    object.__setattr__(changed, "v_bias", bias_and_turn)
    return attend.__wrapped__(changed, x, context, kv)


def turning(turn: Callable[..., Any]) -> ModelEdit:
    """Rotary positions that answer with turn(rotate, module, x, positions)."""

    def call(rotate: Any, self: Any, x: Any, positions: Any, length: Any) -> Any:
        return turn(lambda x, positions: rotate(x, positions, length), self, x, positions)

    return calling(Rotary, call)


def rewired(**changes: Callable[[Any, dict[str, Any]], Any]) -> ModelEdit:
    """Blocks in which the steps of these names are change(block, the values so far) instead."""

    def call(block: Any, self: Any, x: Any, context: Any, kv: Any) -> Any:
        values, aux = {dataflow.IN: x}, NO_AUX
        for step in dataflow.WIRING[specs.Block]:
            inputs = [values[name] for name in step.inputs]
            if step.name in changes:
                y = changes[step.name](self, values)
            elif step.parts == ("attn",):
                y, kv = self.attn(*inputs, context, kv)
            elif step.parts == ("ffn",):
                y, aux = self.ffn(*inputs)
            elif step.parts:
                y = getattr(self, step.parts[0])(*inputs)
            else:
                y = inputs[0] + inputs[1]
            values[step.name] = probe(y, step.name)
        return values["out"], kv, aux

    return calling(Block, call)


def attending(change: Callable[[Any], dict[str, Any]]) -> ModelEdit:
    """Attention whose context is changed so."""

    def call(attend: Any, self: Any, x: Any, context: Any, kv: Any) -> Any:
        return attend(x, context._replace(**change(context)), kv)

    return calling(Attention, call)


def set_to(**values: Any) -> Callable[[Any], None]:
    """A change of a module's attributes, each a value or a function of the module."""

    def change(module: Any) -> None:
        new = {name: value(module) if callable(value) else value for name, value in values.items()}
        for name, value in new.items():
            setattr(module, name, value)

    return change
