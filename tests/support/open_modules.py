"""Ordinary modules of PyTorch whose sizes are left open in a trace, for tests of ``from_torch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.torch_modules import real

__all__ = ["OPEN"]


class TransposedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        return self.linear(x.transpose(1, 2))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 2, 2)
        self.token = nn.Parameter(real(1, 1, 8))
        self.places = nn.Parameter(real(1, 5, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.patch(x).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.token.expand(x.shape[0], -1, -1), hidden], 1) + self.places
        return self.head(self.encoder(hidden)[:, 0])


def repeat_kv(x, count: int):
    batch, heads, length, size = x.shape
    x = x[:, :, None].expand(batch, heads, count, length, size)
    return x.reshape(batch, heads * count, length, size)


class GroupedQueries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 4)
        self.value = nn.Linear(8, 4)

    def forward(self, x):
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, 4, 2).transpose(1, 2)
        key = repeat_kv(self.key(x).view(batch, length, 2, 2).transpose(1, 2), 2)
        value = repeat_kv(self.value(x).view(batch, length, 2, 2).transpose(1, 2), 2)
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).reshape(batch, length, 8)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        rows = self.linear(x.repeat_interleave(2, dim=1)).repeat_interleave(3, dim=0)
        return rows + torch.zeros(1, 3, dtype=x.dtype).repeat(x.shape[0] * 3, 1)[:, None]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x, mask):
        return self.layer(x, src_key_padding_mask=mask)


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        hidden = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.linear(hidden.view(x.size(0), -1))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.shared = nn.Linear(4, 4)

    def forward(self, x):
        logits = self.gate(x)
        weights, chosen = logits.topk(2, -1)
        gates = torch.zeros_like(logits).scatter(-1, chosen, weights.softmax(-1))
        results = torch.stack([expert(x) for expert in self.experts], 1)
        first = results.gather(1, chosen[:, :1, None].expand(-1, -1, 4))[:, 0]
        rows = torch.arange(x.shape[0]).repeat_interleave(2)
        share = self.shared(x).repeat_interleave(2, 0) * weights.reshape(-1, 1)
        return (results * gates[..., None]).sum(1).index_add(0, rows, share) + first


def _mask(batch: int, length: int) -> Any:
    return torch.arange(length)[None].repeat(batch, 1) >= torch.arange(2, 2 + batch)[:, None]


Make = Callable[[int, int], tuple[Any, ...]]
Case = tuple[Callable[[], Any], Make, tuple[dict[int, str], ...]]

OPEN: dict[str, Case] = {
    "transposed_linear": (TransposedLinear, lambda b, n: (real(b, 6, n),), ({0: "batch", 2: "length"},)),
    "class_token": (VisionTransformer, lambda b, n: (real(b, 1, 4, 4),), ({0: "batch"},)),
    "repeat_kv": (GroupedQueries, lambda b, n: (real(b, n, 8),), ({0: "batch", 1: "length"},)),
    "repeat_interleave": (Repeated, lambda b, n: (real(b, n, 4),), ({0: "batch", 1: "length"},)),
    "lstm": (Recurrent, lambda b, n: (real(b, 5, 4),), ({0: "batch"},)),
    "padding_mask": (
        Padded,
        lambda b, n: (real(b, n, 8), _mask(b, n)),
        ({0: "batch", 1: "length"}, {0: "batch", 1: "length"}),
    ),
    "flattened": (Flattened, lambda b, n: (real(b, 1, 6, 6),), ({0: "batch"},)),
    "experts": (Experts, lambda b, n: (real(b, 4),), ({0: "batch"},)),
}
"""By name: the module, inputs of a batch and a length, and the sizes that stay open, by the name of the dimension."""
