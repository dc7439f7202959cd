"""The demo's decoder in plain PyTorch: the peer of the training benchmark.

The same sizes, the same arithmetic (RMSNorm, rotary positions, causal attention, SwiGLU, tied head, AdamW) and
the same batch; written the way a PyTorch user would, with ``scaled_dot_product_attention``.
"""

from __future__ import annotations

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

from capibara.config.sections import ModelSection

__all__ = ["TorchDecoder"]


class Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.scale, self.epsilon)


class Block(nn.Module):
    def __init__(self, m: ModelSection) -> None:
        super().__init__()
        d, self.heads, self.kv, self.size = m.embed_dim, m.num_heads, m.num_kv_heads, m.resolved_head_dim
        self.norm1, self.norm2 = Norm(d, m.norm_epsilon), Norm(d, m.norm_epsilon)
        self.query = nn.Linear(d, self.heads * self.size, bias=False)
        self.key = nn.Linear(d, self.kv * self.size, bias=False)
        self.value = nn.Linear(d, self.kv * self.size, bias=False)
        self.out = nn.Linear(self.heads * self.size, d, bias=False)
        self.gate = nn.Linear(d, m.resolved_mlp_dim, bias=False)
        self.up = nn.Linear(d, m.resolved_mlp_dim, bias=False)
        self.down = nn.Linear(m.resolved_mlp_dim, d, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        h = self.norm1(x)
        q = self.query(h).view(b, t, self.heads, self.size).transpose(1, 2)
        k = self.key(h).view(b, t, self.kv, self.size).transpose(1, 2)
        v = self.value(h).view(b, t, self.kv, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv != self.heads)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class TorchDecoder(nn.Module):
    """Logits ``[batch, sequence, vocab]`` from tokens ``[batch, sequence]``."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, m: ModelSection) -> None:
        super().__init__()
        self.embedding = nn.Embedding(m.vocab_size, m.embed_dim)
        nn.init.normal_(self.embedding.weight, std=m.embed_dim**-0.5)
        self.blocks = nn.ModuleList(Block(m) for _ in range(m.num_layers))
        self.norm = Norm(m.embed_dim, m.norm_epsilon)
        half = torch.arange(0, m.resolved_head_dim, 2) / m.resolved_head_dim
        angle = torch.outer(torch.arange(m.max_sequence_length), m.rope_theta**-half)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        t = tokens.shape[1]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:t], self.sin[:t])
        return self.norm(x) @ self.embedding.weight.T
