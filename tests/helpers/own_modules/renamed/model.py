"""A Llama whose names tell nothing; its rotary table is a complex buffer."""

import torch
from torch import nn


class Part(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.m = nn.Linear(a, b, bias=False)

    def forward(self, x):
        return self.m(x)


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.g * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Unit(nn.Module):
    def __init__(self, width=32, heads=4, hidden=32):
        super().__init__()
        self.heads = heads
        self.s0, self.s1 = Scale(width), Scale(width)
        self.p0, self.p1, self.p2, self.p3 = (Part(width, width) for _ in range(4))
        self.p4, self.p5, self.p6 = Part(width, hidden), Part(hidden, width), Part(width, hidden)

    def forward(self, x, turn):
        b, t, d = x.shape
        y = self.s0(x)
        split = (b, t, self.heads, d // self.heads)
        v, q, k = (part(y).view(split) for part in (self.p0, self.p1, self.p2))
        q, k = (torch.view_as_complex(z.reshape(*split[:3], -1, 2)) * turn for z in (q, k))
        q, k = (torch.view_as_real(z).flatten(3) for z in (q, k))
        scores = torch.einsum("btnh,bsnh->bnts", q, k) / (d // self.heads) ** 0.5
        scores = scores + torch.full((t, t), float("-inf")).triu(1)
        x = x + self.p3(torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), v).flatten(2))
        y = self.s1(x)
        return x + self.p5(nn.functional.silu(self.p6(y)) * self.p4(y))


class Net(nn.Module):
    def __init__(self, vocab=61, width=32, units=3, heads=4, length=64):
        super().__init__()
        self.e = nn.Embedding(vocab, width)
        self.u = nn.ModuleList(Unit(width, heads) for _ in range(units))
        self.s = Scale(width)
        self.o = nn.Linear(width, vocab, bias=False)
        h = width // heads
        freqs = 1e4 ** (-torch.arange(0, h, 2) / h)
        angles = torch.outer(torch.arange(length).float(), freqs)
        turn = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("turn", turn)

    def forward(self, ids):
        x = self.e(ids)
        for unit in self.u:
            x = unit(x, self.turn[: ids.shape[1], None])
        return self.o(self.s(x))
