"""The decoder in PyTorch: plain, slow and obviously right. The mirror that jaxmodel is held to."""

from jaxtwin.torchref.model import Decoder, generate

__all__ = ["Decoder", "generate"]
