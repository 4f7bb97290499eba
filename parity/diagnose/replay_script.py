"""The script in a replay's folder: plain, short, and made to be read and edited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxtwin.parity.sides import probes

if TYPE_CHECKING:
    from jaxtwin.parity.diagnose.recipe import Recipe
    from jaxtwin.parity.report.results import Point

WHAT = {
    "forward": "{name}, on the reference's own input.",
    "backward": "The cotangent at {name}, from the reference's own cotangents.",
    "parameter": "The gradient of {name}, from the reference's own input and cotangents.",
}

TOP = '''"""{what}

The check saw a relative L2 error of {error:.6e} here, where {band:.0e} is allowed. Exit status 1
while it is over, 0 once it is right. If it is right at once, the part is not to blame but what
calls it. Only {stages} of jaxmodel is run; what is not used here is zero.
"""

import sys
from pathlib import Path

import jax
{more}from jaxtwin.parity.diagnose import replay

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_matmul_precision", "highest")
part = replay.opened(Path(__file__).resolve().parent, "{name}", "{direction}")
'''

PROBING = "\nfrom jaxtwin.jaxmodel.probe import probing\n"

FORWARD_LAYER = """model = part.model(part.weights)
with probing(part.slots(part.seeds)) as probes:
    model.stack.layers[0](part.x, part.context, None)
sys.exit(part.verdict(probes.values["{path}"]))
"""

FORWARD = """model = part.model(part.weights)
sys.exit(part.verdict({call}))
"""

BACK_LAYER = """

def run(weights, x, seeds):
    with probing(part.slots(seeds)):
        x, _, aux = part.model(weights).stack.layers[0](x, part.context, None)
    return x.sum() + sum(aux.losses.values())


weights, x, seeds = jax.grad(run, (0, 1, 2))(part.weights, part.x, part.seeds)
sys.exit(part.verdict({got}))
"""

BACK = """

def run(weights, x):
    model = part.model(weights)
    return {total}


weights, x = jax.grad(run, (0, 1))(part.weights, part.x)
sys.exit(part.verdict({got}))
"""

CALLS = {
    "embed": "model.embed_tokens(part.ids, part.context)",
    "norm": "model.norm({x})",
    "head": "model.unembed({x})",
}


def script(point: Point, todo: Recipe, paths: Mapping[str, str]) -> str:
    """The whole of it, for what the check found at a point; `paths` are the parameters' in JAX."""
    name, layer, forward = point.probe, todo.layer is not None, point.direction == "forward"
    path = probes.part(name).replace(".", "/")
    if point.direction == "parameter":
        dst = paths[name].replace(f"/{todo.layer}/", "/0/", 1)  # of a model of one layer
        got = f'weights["{dst}"]'
    else:
        got = "x" if name == todo.entry else f'seeds["{path}"]'
    terms = [
        f'({CALLS[stage].format(x="x")} * part.cotangents["{stage}"]).sum()'
        for stage in todo.stages
        if stage in CALLS
    ]
    body = {
        (True, True): FORWARD_LAYER,
        (True, False): FORWARD,
        (False, True): BACK_LAYER,
        (False, False): BACK,
    }[forward, layer]
    call = CALLS[todo.stages[0]].format(x="part.x") if not layer else ""
    top = TOP.format(
        what=WHAT[point.direction].format(name=name),
        error=point.local_error,
        band=point.band,
        stages=" and ".join(todo.stages),
        more=PROBING if layer else "\n",
        name=name,
        direction=point.direction,
    )
    return top + body.format(path=path, call=call, got=got, total=" + ".join(terms))
