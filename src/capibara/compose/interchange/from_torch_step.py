"""One operation of a trace of PyTorch, as the functions see it that put primitives in its place.

For :mod:`.from_torch`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.compose.errors import ComposeError
from capibara.compose.interchange.from_torch_sizes import OpenSizes, is_open
from capibara.compose.logical.connections import Port
from capibara.compose.logical.model import Model

__all__ = ["Step", "UnsupportedTorchError", "kind_of", "size_of"]


class UnsupportedTorchError(ComposeError, NotImplementedError):
    """A torch module does something that has no counterpart in compose; the message lists all of it."""


def size_of(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def kind_of(tensor: Any) -> str:
    """The kind of a traced tensor."""
    import torch

    if tensor.dtype == torch.bool:
        return "bool"
    if tensor.is_complex():
        raise UnsupportedTorchError("from_torch: complex numbers have no counterpart in compose")
    return "float" if tensor.is_floating_point() else "int"


class Step:
    """One operation of the trace, as the functions of the table see it."""

    def __init__(self, model: Model, node: Any, sizes: OpenSizes) -> None:
        self.model = model
        self.node = node
        self.sizes = sizes

    def put(self, block: Any, **ports: Any) -> Port:
        """Add a block; its (first) output."""
        self.model.add(block, **ports)
        return Port(block, block.output_keys[0])

    def all(self, block: Any, **ports: Any) -> tuple[Port, ...]:
        """Add a block; all of its outputs."""
        self.model.add(block, **ports)
        return tuple(Port(block, key) for key in block.output_keys)

    def size(self, size: Any) -> Any:
        """A size: the number, or the connection that it is where it is left open."""
        return size if isinstance(size, int) else self.sizes.port(size)

    def broadcast(self, value: Any, shape: Any) -> Any:
        """A value repeated up to a shape with sizes that may be open."""
        from capibara.compose import primitives as p

        row, ports = self.row(shape)
        return self.put(p.BroadcastTo(row), input=value, **ports)

    def row(self, shape: Any) -> tuple[tuple[int | None, ...], dict[str, Any]]:
        """A shape as blocks take it: None for open sizes, and the ports that give them."""
        ports = {f"size_{i}": self.sizes.port(n) for i, n in enumerate(shape) if not isinstance(n, int)}
        closed = {key: n for key, n in ports.items() if isinstance(n, int)}
        row = tuple(closed.get(f"size_{i}", size_of(n)) for i, n in enumerate(shape))
        return row, {key: n for key, n in ports.items() if key not in closed}

    @property
    def result(self) -> Any:
        """The traced result: its shape and dtype (of several: the first)."""
        value = self.node.meta["val"]
        return value[0] if isinstance(value, tuple | list) else value

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Of the result; None where a size is left open."""
        return tuple(size_of(n) for n in self.result.shape)

    @property
    def kind(self) -> str:
        return kind_of(self.result)

    def given(self, i: int = 0) -> Any:
        """The traced argument ``i``: a tensor without values, or what was written."""
        arg = self.node.args[i]
        return arg.meta["val"] if hasattr(arg, "meta") else arg

    def cast(self, i: int, value: Any, kind: str | None = None) -> Any:
        """Argument ``i`` in the kind of the result (or ``kind``), as torch promotes it."""
        return self.turned(value, self.kind_at(i), kind or self.kind)

    def kind_at(self, i: int) -> str | None:
        """The kind of argument ``i``."""
        given = self.given(i)
        return kind_of(given) if hasattr(given, "dtype") else self.kind_of(given)

    @staticmethod
    def kind_of(number: Any) -> str:
        """The kind of a number."""
        if isinstance(number, bool):
            return "bool"
        return "float" if isinstance(number, float) or type(number).__name__ == "SymFloat" else "int"

    def turned(self, value: Any, have: str | None, want: str) -> Any:
        from capibara.compose import primitives as p

        if is_open(value):
            value = self.sizes.port(value)
        if have == want or not isinstance(value, Port):
            return _number(value, want)
        if want == "float":  # in the compute dtype, whatever that will be
            if have == "bool":
                return self.put(p.Where(), cond=value, input1=1.0, input2=0.0)
            return self.put(p.Divide(), left=value, right=1)
        return self.put(p.Cast("int32" if want == "int" else "bool"), input=value)


def _number(value: Any, want: str) -> Any:
    make = {"float": float, "int": int, "bool": bool}[want]
    if isinstance(value, np.ndarray):
        return value.astype({"float": "float64", "int": "int64", "bool": "bool"}[want])
    return make(value) if isinstance(value, bool | int | float) else value
