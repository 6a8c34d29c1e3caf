# SPDX-License-Identifier: Apache-2.0
"""The GPT that the benchmarks of PyTorch train."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Shape(NamedTuple):
    """A GPT and its batch."""

    layers: int
    width: int
    heads: int
    rows: int
    tokens: int
    vocabulary: int = 50304
    """GPT-2's 50,257 and some more, as in nanoGPT: to a multiple of 64. With 50,257 the
    matrix products of the head take slow kernels."""


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # noqa: D102
        rows, tokens, width = x.shape
        parts = self.mix(self.norm1(x)).view(rows, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        hidden = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(hidden)


class GPT(nn.Module):
    """A GPT-2, whose head is its embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.tokens, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        blocks = [Block(shape.width, shape.heads) for _ in range(shape.layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):  # noqa: D102
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))
