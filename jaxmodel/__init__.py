"""The decoder in JAX (Flax NNX): the fast mirror of torchref."""

from jaxmodel.model import Decoder, abstract
from jaxmodel.sample import generate

__all__ = ["Decoder", "abstract", "generate"]
