"""What a model is and what a run does, as data. Imports no machine-learning framework."""

from configs.errors import BadInput, nearest
from configs.presets import PRESETS, preset
from configs.spec import GQA, LEGEND, LN, RMS, Block, Glu, Model, Rope, Run

__all__ = [
    "GQA",
    "LEGEND",
    "LN",
    "PRESETS",
    "RMS",
    "BadInput",
    "Block",
    "Glu",
    "Model",
    "Rope",
    "Run",
    "nearest",
    "preset",
]
