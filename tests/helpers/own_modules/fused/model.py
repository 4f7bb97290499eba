"""Matrices as bare parameters, (in, out); Q, K and V fused group by group, gate and up in one."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, GROUPS, QUERIES, HEAD, HIDDEN, BASE = 32, 2, 2, 8, 40, 500_000.0


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) * 0.1)


def turned(x, base=BASE):
    half = x.shape[-1] // 2
    freqs = base ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[1])[:, None] * freqs
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    one, two = x[..., :half], x[..., half:]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale_1, self.scale_2 = parameter(WIDTH), parameter(WIDTH)
        self.qkv = parameter(WIDTH, GROUPS * (QUERIES + 2) * HEAD)
        self.mix = parameter(GROUPS * QUERIES * HEAD, WIDTH)
        self.gate_up = parameter(WIDTH, 2 * HIDDEN)
        self.down = parameter(HIDDEN, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        y = F.rms_norm(x, (WIDTH,), 1 + self.scale_1, eps=1e-6) @ self.qkv
        y = y.view(b, t, GROUPS, QUERIES + 2, HEAD)
        q, k, v = y[:, :, :, :QUERIES].flatten(2, 3), y[:, :, :, -2], y[:, :, :, -1]
        q, k = turned(q), turned(k)
        k, v = (z.repeat_interleave(QUERIES, dim=2) for z in (k, v))
        scores = torch.einsum("btnh,bsnh->bnts", q, k) * HEAD**-0.5
        future = torch.ones(t, t).triu(1).bool()
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + torch.einsum("bnts,bsnh->btnh", weights, v).flatten(2) @ self.mix
        gate, up = (F.rms_norm(x, (WIDTH,), 1 + self.scale_2, eps=1e-6) @ self.gate_up).chunk(2, -1)
        return x + (F.gelu(gate, approximate="tanh") * up) @ self.down


class Fused(nn.Module):
    def __init__(self, vocab=61, layers=3):
        super().__init__()
        self.table = parameter(vocab, WIDTH)
        self.stack = nn.ModuleList(Layer() for _ in range(layers))
        self.scale = parameter(WIDTH)
        self.unembed = parameter(WIDTH, vocab)

    def forward(self, ids):
        x = self.table[ids]
        for layer in self.stack:
            x = layer(x)
        return {"logits": F.rms_norm(x, (WIDTH,), 1 + self.scale, eps=1e-6) @ self.unembed}
