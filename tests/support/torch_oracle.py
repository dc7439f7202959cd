"""PyTorch as an oracle, and what stands in for it where its wheel cannot be installed.

Tables of references name functions of PyTorch when they are imported. Without PyTorch those names lead to a stand-in
that does nothing, and results are compared with what PyTorch gave, recorded in ``tests/compose/golden/references.npz``.
Where PyTorch is installed, a test compares the record with it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

__all__ = ["HAS_TORCH", "functional", "needs_torch", "torch"]

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed")


class _Absent:
    """Any attribute of it, and whatever a call or an operator gives, is itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __call__
    __getitem__ = __neg__ = __call__


if TYPE_CHECKING:
    import torch
    import torch.nn.functional as functional
elif HAS_TORCH:
    torch = importlib.import_module("torch")
    functional = importlib.import_module("torch.nn.functional")
    torch.set_num_threads(1)
else:
    torch = functional = _Absent()
