"""The decoder, read in one sitting: embedding, layers, final norm, head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from jaxtwin.configs import spec as specs
from jaxtwin.configs.spec import Learned
from jaxtwin.torchref.aux import Aux, merged
from jaxtwin.torchref.block import BLOCKS
from jaxtwin.torchref.cap import Cap
from jaxtwin.torchref.norm import NORMS
from jaxtwin.torchref.position import POSITIONS
from jaxtwin.torchref.skip import Skip


class Embedding(nn.Module):
    """A row of the table for each id."""

    def __init__(self, model: specs.Model):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.vocab, model.d))

    def forward(self, ids: Integer[Tensor, "b t"]) -> Float[Tensor, "b t d"]:
        return self.weight[ids.long()]  # torch reads a uint8 index as a mask


class Scale(nn.Module):
    """x * scale, the scale first rounded to x's dtype: bfloat16's sqrt(2304) is 48 (Gemma)."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        return x * torch.tensor(self.scale, dtype=x.dtype, device=x.device)


class TiedHead(nn.Module):
    """Logits from the embedding's own table: one parameter, used twice."""

    def forward(self, x: Float[Tensor, "b t d"], embed: Embedding) -> Float[Tensor, "b t v"]:
        return x @ embed.weight.T


class Head(nn.Module):
    """Logits from a matrix of its own."""

    def __init__(self, model: specs.Model):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.vocab, model.d))

    def forward(self, x: Float[Tensor, "b t d"], embed: Embedding) -> Float[Tensor, "b t v"]:
        return x @ self.weight.T


class Decoder(nn.Module):
    """A decoder-only language model: the plain reference.

    No cache, no fusion, no stacked layers. Parameters are float32 until `.to(dtype)`, and their
    dtype is the dtype of the computation.
    """

    def __init__(self, spec: specs.Model, *, seed: int = 0):
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec)
        self.scale = Skip() if spec.embed_scale is None else Scale(spec.embed_scale)
        self.position = POSITIONS[type(spec.position)](spec.position, spec)
        self.embed_norm = NORMS[type(spec.embed_norm)](spec.embed_norm, spec.d)
        self.layers = nn.ModuleList([BLOCKS[type(block)](block, spec) for block in spec.layers])
        self.norm = NORMS[type(spec.norm)](spec.norm, spec.d)
        self.head = TiedHead() if spec.tied else Head(spec)
        self.cap = Skip() if spec.cap is None else Cap(spec.cap)
        self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Fresh values: matrices std init_std, and less where they write into the residual stream.

        Biases are 0. (Norms begin at a scale of 1 by themselves.)
        """
        generator = torch.Generator().manual_seed(seed)
        residual = self.spec.init_std / (2 * len(self.spec.layers)) ** 0.5
        for name, param in self.named_parameters():
            if param.ndim == 2:
                writes_residual = name.endswith((".attn.o.weight", ".ffn.down.weight"))
                param.normal_(
                    0, residual if writes_residual else self.spec.init_std, generator=generator
                )
            elif name.endswith(".bias"):
                param.zero_()

    def forward(
        self,
        ids: Integer[Tensor, "b t"],
        *,
        positions: Int[Tensor, "b t"] | None = None,
        segments: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b t v"]:
        """Logits for every position.

        Positions count from 0 unless given. With `segments`, a token sees only its own segment:
        packed documents, or padding as a segment of its own. ValueError on a bad shape or dtype,
        a length of 0 or over max_len, an id outside the vocabulary, or a position that is negative
        or beyond a learned table.
        """
        return self.logits_and_aux(ids, positions=positions, segments=segments)[0]

    def logits_and_aux(
        self,
        ids: Integer[Tensor, "b t"],
        *,
        positions: Int[Tensor, "b t"] | None = None,
        segments: Int[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t v"], Aux]:
        """The same, with the auxiliary losses and statistics of the layers (aux.py)."""
        check_ids(ids, self.spec)
        b, t = ids.shape
        if positions is None:
            positions = torch.arange(t, device=ids.device).expand(b, t)
        else:
            check_beside("positions", positions, ids, (0, position_count(self.spec)))
        if segments is not None:
            check_beside("segments", segments, ids, (-(2**31), 2**31))
        mask = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril().expand(b, t, t)
        if segments is not None:
            mask = mask & (segments[:, :, None] == segments[:, None, :])
        x = self.embed_tokens(ids, positions)
        auxes = []
        for layer in self.layers:
            x, aux = layer(x, positions, mask)
            auxes.append(aux)
        return self.unembed(self.norm(x)), merged(auxes)

    def embed_tokens(
        self, ids: Integer[Tensor, "b t"], positions: Int[Tensor, "b t"]
    ) -> Float[Tensor, "b t d"]:
        """The first layer's input: embedding, scale, positions and norm, where there are such."""
        return self.embed_norm(self.position(self.scale(self.embed(ids)), positions))

    def unembed(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t v"]:
        """The logits of the last layer's normed output."""
        return self.cap(self.head(x, self.embed))


COLDEST = 1e-30  # colder is the same, and would overflow or divide by a float32 zero


def check_ids(ids: Tensor, spec: specs.Model) -> None:
    """A ValueError unless the ids are a (batch, time) of integers that fit the spec."""
    if ids.ndim != 2:
        raise ValueError(f"ids must be (batch, time), got shape {tuple(ids.shape)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be integers, got {ids.dtype}")
    if ids.shape[0] == 0:
        raise ValueError("ids must hold at least one row, got a batch of 0")
    if not 1 <= ids.shape[1] <= spec.max_len:
        raise ValueError(f"ids must be 1 to {spec.max_len} tokens long, got {ids.shape[1]}")
    values = ids.long()  # torch has no minimum of a uint16
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= spec.vocab:
        bad = low if low < 0 else high
        raise ValueError(f"ids must be in 0 ... {spec.vocab - 1}, got {bad}")


def position_count(spec: specs.Model) -> int:
    """How many positions there are: as many as a table has rows, or any 32-bit number."""
    return spec.max_len if isinstance(spec.position, Learned) else 2**31


def check_beside(name: str, values: Tensor, ids: Tensor, bounds: tuple[int, int]) -> None:
    """A ValueError unless positions or segments are one integer for each id, and in range."""
    if values.shape != ids.shape:
        raise ValueError(
            f"{name} must have the shape of ids {tuple(ids.shape)}, got {tuple(values.shape)}"
        )
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {values.dtype}")
    low, high = int(values.min()), int(values.max())
    if low < bounds[0] or high >= bounds[1]:
        bad = low if low < bounds[0] else high
        raise ValueError(f"{name} must be in {bounds[0]} ... {bounds[1] - 1}, got {bad}")


@torch.no_grad()
def generate(
    model: Decoder,
    ids: Integer[Tensor, "b t"],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    eos: int | Sequence[int] | None = None,
    seed: int = 0,
    vocab: int | None = None,
) -> Int[Tensor, "b s"]:
    """The prompt ids (b t) with up to `new_tokens` more, recomputed whole for every token.

    The rules are jaxmodel.generate's: a row is finished at the first eos it generates and is then
    filled with it; top_k keeps ties; temperature 0 is argmax. ValueError on arguments out of range.
    """
    check_ids(ids, model.spec)
    ids = ids.long()  # the prompt's own dtype may be too narrow for the ids to come
    if new_tokens < 0:
        raise ValueError(f"new_tokens must not be negative, got {new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if top_k is not None and not 1 <= top_k <= model.spec.vocab:
        raise ValueError(f"top_k must be in 1 ... {model.spec.vocab}, got {top_k}")
    absent = eos is None or eos == [] or eos == ()  # torch makes an empty list a list of floats
    end_ids = ids.new_zeros(0) if absent else torch.atleast_1d(torch.as_tensor(eos))
    integers = not (end_ids.is_floating_point() or end_ids.dtype == torch.bool)
    if not (integers and (end_ids >= 0).all() and (end_ids < model.spec.vocab).all()):
        raise ValueError(f"eos must be in 0 ... {model.spec.vocab - 1}, got {eos}")
    generator = torch.Generator().manual_seed(seed)
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(min(new_tokens, model.spec.max_len - ids.shape[1])):
        logits = model(ids)[:, -1, :vocab]
        if temperature == 0:
            new = logits.argmax(dim=-1)
        else:
            scores = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, COLDEST)
            if top_k is not None:
                kth = scores.topk(top_k, dim=-1).values[:, -1:]
                scores = scores.masked_fill(scores < kth, float("-inf"))
            new = torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)[:, 0]
        new = torch.where(done, ids[:, -1], new.to(ids.dtype))
        ids = torch.cat((ids, new[:, None]), dim=1)
        done |= torch.isin(new, end_ids)
        if done.all():
            break
    return ids
