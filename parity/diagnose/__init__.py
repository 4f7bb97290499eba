"""From a difference to its proven cause: hypotheses made in torch until it agrees with JAX.

Exports `search.diagnose`, the catalogue in `hypotheses`, and `replay.save`.
"""
