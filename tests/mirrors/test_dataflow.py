"""The dataflow that configs/dataflow.py declares is the one that both mirrors compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import torch

from jaxtwin import jaxmodel
from jaxtwin.configs import dataflow
from jaxtwin.configs.spec import Block, Model, PostBlock
from jaxtwin.jaxmodel import attention as jax_attention
from jaxtwin.jaxmodel import block as jax_block
from jaxtwin.jaxmodel.probe import probing
from jaxtwin.parity.selftest.tiny_models import shapes, weights
from jaxtwin.parity.sides import probes, runs
from jaxtwin.parity.sides.inputs import check_inputs

SHAPES = shapes()


def test_every_block_and_attention_is_declared() -> None:
    assert dataflow.WIRING.keys() == jax_block.BLOCKS.keys()
    assert dataflow.INSIDE.keys() == jax_attention.ATTENTIONS.keys()


@pytest.mark.parametrize("block", [Block, PostBlock])
def test_the_parts_are_the_blocks_fields(block: type) -> None:
    fields = {f.name for f in dataclasses.fields(block)}
    assert set(dataflow.parts(block)) == fields - {"kind", "alpha"}


@pytest.mark.parametrize("name", SHAPES)
def test_jaxmodel_computes_the_steps_in_their_order(name: str) -> None:
    spec = SHAPES[name]
    model = jaxmodel.abstract(spec, layout="unroll")

    def run(model: Any) -> Any:
        with probing({}) as context:
            model(np.ones((1, 8), np.int32))
        paths.extend(context.values)
        return context.values

    paths: list[str] = []
    jax.eval_shape(run, model)
    beside = ("/attn/mask", "/attn/positions")  # not computed: what attention is told
    seen = [
        path.removeprefix("stack/").replace("/", ".") for path in paths if not path.endswith(beside)
    ]
    assert seen == list(dataflow.model_steps(spec))


@pytest.mark.parametrize("name", SHAPES)
def test_torchref_computes_each_step_from_its_inputs_by_its_parts(name: str) -> None:
    """Sums are sums of the values named; a part, given the value named, gives the next."""
    spec = SHAPES[name]
    model, values = traced(spec)
    for i, block in enumerate(spec.layers):
        layer = model.layers[i]
        entry = values["embed"] if i == 0 else values[f"layers.{i - 1}.out"]
        for step in dataflow.WIRING[type(block)]:
            of_layer = (
                entry if n == dataflow.IN else values[f"layers.{i}.{n}"] for n in step.inputs
            )
            tensors = [torch.from_numpy(np.array(x)) for x in of_layer]
            if step.parts == ("attn",):
                continue  # its own steps are seen inside
            if step.parts:
                (part,) = step.parts
                out = getattr(layer, part)(*tensors)
                want = (out[0] if isinstance(out, tuple) else out).detach().numpy()
            else:
                want = (getattr(block, "alpha", 1.0) * tensors[0] + tensors[1]).numpy()
            np.testing.assert_allclose(values[f"layers.{i}.{step.name}"], want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", SHAPES)
def test_every_weight_is_of_a_step(name: str) -> None:
    spec = SHAPES[name]
    named = [part for step in dataflow.model_steps(spec).values() for part in step.parts]
    for weight in weights(spec, 0):
        assert any(weight.startswith(f"{part}.") for part in named), weight


def traced(spec: Model) -> tuple[Any, dict[str, np.ndarray]]:
    tensors, given = weights(spec, 0), check_inputs(spec, 12, 0)
    reference = runs.Reference(spec, tensors, given)
    return reference.model, reference.run().values


def test_a_probe_has_one_layer_and_one_part() -> None:
    assert (probes.layer("layers.3.attn.q"), probes.part("layers.3.attn.q")) == (3, "attn.q")
    assert (probes.layer("head"), probes.part("head")) == (None, "head")
