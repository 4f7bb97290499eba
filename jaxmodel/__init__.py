"""The decoder in JAX (Flax NNX): the fast mirror of torchref."""

from jaxtwin.jaxmodel.model import Decoder, abstract
from jaxtwin.jaxmodel.sample import generate

__all__ = ["Decoder", "abstract", "generate"]
