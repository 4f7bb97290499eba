"""One layer: the residual wiring, in plain sight (declared as data in configs/dataflow.py)."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from jaxtwin.configs import spec as specs
from jaxtwin.jaxmodel.attention import ATTENTIONS
from jaxtwin.jaxmodel.aux import Aux
from jaxtwin.jaxmodel.axes import Maker, constrain
from jaxtwin.jaxmodel.cache import KV, AttentionContext
from jaxtwin.jaxmodel.ffn import FFNS
from jaxtwin.jaxmodel.norm import NORMS
from jaxtwin.jaxmodel.probe import probe


class Block(nnx.Module):
    """Attention, then feed-forward, each added to the stream it read through a norm."""

    def __init__(self, spec: specs.Block, make: Maker):
        self.pre_attn = NORMS[type(spec.pre_attn)](spec.pre_attn, make)
        self.attn = ATTENTIONS[type(spec.attn)](spec.attn, make)
        self.post_attn = NORMS[type(spec.post_attn)](spec.post_attn, make)
        self.pre_ffn = NORMS[type(spec.pre_ffn)](spec.pre_ffn, make)
        self.ffn = FFNS[type(spec.ffn)](spec.ffn, make)
        self.post_ffn = NORMS[type(spec.post_ffn)](spec.post_ffn, make)

    def __call__(
        self, x: Float[Array, "b t d"], context: AttentionContext, kv: KV | None
    ) -> tuple[Float[Array, "b t d"], KV | None, Aux]:
        mixed, kv = self.attn(probe(self.pre_attn(x), "pre_attn"), context, kv)
        mixed = probe(self.post_attn(probe(mixed, "attn")), "post_attn")
        x = probe(constrain(x + mixed, "b t d"), "mid")
        fed, aux = self.ffn(probe(self.pre_ffn(x), "pre_ffn"))
        x = x + probe(self.post_ffn(probe(fed, "ffn")), "post_ffn")
        return probe(constrain(x, "b t d"), "out"), kv, aux


class PostBlock(nnx.Module):
    """The wiring of 2017, the norm over the sum (arXiv 1706.03762; alpha: 2203.00555)."""

    def __init__(self, spec: specs.PostBlock, make: Maker):
        self.attn = ATTENTIONS[type(spec.attn)](spec.attn, make)
        self.post_attn = NORMS[type(spec.post_attn)](spec.post_attn, make)
        self.ffn = FFNS[type(spec.ffn)](spec.ffn, make)
        self.post_ffn = NORMS[type(spec.post_ffn)](spec.post_ffn, make)
        self.alpha = spec.alpha

    def __call__(
        self, x: Float[Array, "b t d"], context: AttentionContext, kv: KV | None
    ) -> tuple[Float[Array, "b t d"], KV | None, Aux]:
        mixed, kv = self.attn(x, context, kv)
        x = probe(self.alpha * x + probe(mixed, "attn"), "summed")
        x = probe(constrain(self.post_attn(x), "b t d"), "mid")
        fed, aux = self.ffn(x)
        x = probe(self.alpha * x + probe(fed, "ffn"), "total")
        return probe(constrain(self.post_ffn(x), "b t d"), "out"), kv, aux


BLOCKS = {specs.Block: Block, specs.PostBlock: PostBlock}
