"""In the manner of llama2.c: tables of cos and sin as buffers, norms in float32, adjacent pairs."""

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.type_as(x) * self.weight


def tables(width, length, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, width, 2)[: width // 2].float() / width))
    angles = torch.outer(torch.arange(length, dtype=torch.float32), freqs).float()
    return torch.cos(angles), torch.sin(angles)


def rotate(x, cos, sin):
    real, imaginary = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
    return turned.flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv):
        super().__init__()
        self.heads, self.kv, self.width = heads, kv, dim // heads
        self.wq = nn.Linear(dim, heads * self.width, bias=False)
        self.wk = nn.Linear(dim, kv * self.width, bias=False)
        self.wv = nn.Linear(dim, kv * self.width, bias=False)
        self.wo = nn.Linear(heads * self.width, dim, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = rotate(self.wq(x).view(b, t, self.heads, self.width), cos, sin)
        k = rotate(self.wk(x).view(b, t, self.kv, self.width), cos, sin)
        v = self.wv(x).view(b, t, self.kv, self.width)
        k, v = (y.repeat_interleave(self.heads // self.kv, dim=2) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim, heads, kv, hidden, eps):
        super().__init__()
        self.attention = Attention(dim, heads, kv)
        self.feed_forward = FeedForward(dim, hidden)
        self.attention_norm, self.ffn_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, vocab=61, dim=32, layers=3, heads=4, kv=2, hidden=48, length=64, eps=1e-5):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, kv, hidden, eps) for _ in range(layers))
        self.norm = RMSNorm(dim, eps)
        self.output = nn.Linear(dim, vocab, bias=False)
        self.tok_embeddings.weight = self.output.weight
        cos, sin = tables(dim // heads, length)
        self.register_buffer("freqs_cos", cos, persistent=False)
        self.register_buffer("freqs_sin", sin, persistent=False)

    def forward(self, tokens, targets=None):
        h = self.tok_embeddings(tokens)
        t = tokens.shape[1]
        for layer in self.layers:
            h = layer(h, self.freqs_cos[:t], self.freqs_sin[:t])
        h = self.norm(h)
        return self.output(h) if targets is not None else self.output(h[:, [-1], :])
