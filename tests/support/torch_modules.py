"""Modules of PyTorch that call a function, and arrays to give them, for tests of ``from_torch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Calls", "arrays", "real", "tree", "whole"]


class Calls(nn.Module):
    """A function as a module, which has the modules that it calls."""

    def __init__(self, function: Callable[..., Any], **modules: Any) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x, y=None, z=None):
        given = [a for a in (x, y, z) if a is not None]
        return self.function(*[m for n, m in self.named_children()], *given)


def real(*shape: int, seed: int = 3) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(high: int, *shape: int, seed: int = 3) -> Any:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def arrays(result: Any) -> list[Any]:
    if isinstance(result, tuple | list):
        return [a for part in result for a in arrays(part)]
    return [] if result is None else [result]


def tree(backend: Any, params: Any) -> Any:
    return {k: tree(backend, v) if isinstance(v, dict) else backend.array(v) for k, v in params.items()}
