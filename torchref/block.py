"""One layer: the residual wiring, in plain sight (declared as data in configs/dataflow.py)."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jaxtwin.configs import spec as specs
from jaxtwin.torchref.attention import ATTENTIONS
from jaxtwin.torchref.aux import Aux
from jaxtwin.torchref.ffn import FFNS
from jaxtwin.torchref.norm import NORMS


class Block(nn.Module):
    """Attention, then feed-forward, each added to the stream it read through a norm."""

    def __init__(self, spec: specs.Block, model: specs.Model):
        super().__init__()
        self.pre_attn = NORMS[type(spec.pre_attn)](spec.pre_attn, model.d)
        self.attn = ATTENTIONS[type(spec.attn)](spec.attn, model)
        self.post_attn = NORMS[type(spec.post_attn)](spec.post_attn, model.d)
        self.pre_ffn = NORMS[type(spec.pre_ffn)](spec.pre_ffn, model.d)
        self.ffn = FFNS[type(spec.ffn)](spec.ffn, model)
        self.post_ffn = NORMS[type(spec.post_ffn)](spec.post_ffn, model.d)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        positions: Int[Tensor, "b t"],
        mask: Bool[Tensor, "b t s"],
    ) -> tuple[Float[Tensor, "b t d"], Aux]:
        x = x + self.post_attn(self.attn(self.pre_attn(x), positions, mask))
        fed, aux = self.ffn(self.pre_ffn(x))
        x = x + self.post_ffn(fed)
        return x, aux


class PostBlock(nn.Module):
    """The wiring of 2017, the norm over the sum (arXiv 1706.03762; alpha: 2203.00555)."""

    def __init__(self, spec: specs.PostBlock, model: specs.Model):
        super().__init__()
        self.attn = ATTENTIONS[type(spec.attn)](spec.attn, model)
        self.post_attn = NORMS[type(spec.post_attn)](spec.post_attn, model.d)
        self.ffn = FFNS[type(spec.ffn)](spec.ffn, model)
        self.post_ffn = NORMS[type(spec.post_ffn)](spec.post_ffn, model.d)
        self.alpha = spec.alpha

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        positions: Int[Tensor, "b t"],
        mask: Bool[Tensor, "b t s"],
    ) -> tuple[Float[Tensor, "b t d"], Aux]:
        x = self.post_attn(self.alpha * x + self.attn(x, positions, mask))
        fed, aux = self.ffn(x)
        x = self.post_ffn(self.alpha * x + fed)
        return x, aux


BLOCKS = {specs.Block: Block, specs.PostBlock: PostBlock}
