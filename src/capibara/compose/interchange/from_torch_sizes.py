"""Sizes that a trace of PyTorch leaves open, as connections of the model that is made of it.

The trace knows an open size as an expression of symbols (``4*s0``, ``s0*s1``), and each symbol is a size of an input.
Here the expression becomes what the model computes from that input's shape. For :mod:`.from_torch`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from capibara.compose import primitives as p
from capibara.compose.logical.connections import Port
from capibara.compose.logical.model import Model
from capibara.compose.logical.shapes import Dim

__all__ = ["OpenSizes", "Refused", "is_open", "same_size"]


class Refused(Exception):
    """An operation is known, but not with these arguments; the text says which."""


def is_open(number: Any) -> bool:
    """Whether a number is an open size, or follows from some."""
    return type(number).__name__ in ("SymInt", "SymFloat", "SymBool")


def same_size(a: Any, b: Any) -> bool:
    """Whether two traced sizes are known to be equal; nothing is assumed of open ones by asking."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(a.node.expr == b.node.expr)


def _expression(size: Any) -> Any:
    return size.node.expr


class OpenSizes:
    """The open sizes of one model: where each symbol stands in an input, and what was made of them so far."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._dims: dict[str, Dim] = {}
        self._inputs: list[tuple[Any, Port, int]] = []
        self._made: dict[Any, Port] = {}
        self._env: Any = None

    def dims(self, shape: Any) -> tuple[Any, ...]:
        """An input's shape as the model declares it: equal expressions are one dimension."""
        return tuple(n if isinstance(n, int) else self._dim(_expression(n)) for n in shape)

    def _dim(self, expression: Any) -> Any:
        # The trace may have settled on the example's size, where it was asked to find out what can be left open.
        if expression.is_Integer:
            return int(expression)
        return self._dims.setdefault(str(expression), Dim())

    def learn(self, port: Port, shape: Any) -> None:
        """An input, whose open sizes the symbols are read from."""
        for axis, size in enumerate(shape):
            if not isinstance(size, int) and not _expression(size).is_Integer:
                self._env = size.node.shape_env
                self._inputs.append((_expression(size), port, axis))

    @contextlib.contextmanager
    def nothing_assumed(self) -> Iterator[None]:
        """Refuse what asks for the value of an open size: the answer would be that of the example.

        Raises:
            Refused: it was asked for.
        """
        env = self._env
        if env is None:
            yield
            return
        frozen, before = env.frozen, len(env.guards)
        env.frozen = False  # what is assumed is noted then
        try:
            yield
        finally:
            env.frozen = frozen
        if len(env.guards) > before:
            raise Refused(f"{env.guards[before].expr} would be assumed of a size that is left open")

    def port(self, size: Any) -> Any:
        """An open size, or a float that follows from some, as a connection; a number where it is one.

        Raises:
            Refused: it does not follow from the sizes of the inputs.
        """
        return self._of(_expression(size))

    def _put(self, block: Any, **ports: Any) -> Port:
        self.model.add(block, **ports)
        return Port(block, block.output_keys[0])

    def _of(self, expression: Any) -> Any:
        if expression.is_Number:
            return int(expression) if expression.is_Integer else float(expression)
        if expression not in self._made:
            self._made[expression] = self._computed(expression)
        return self._made[expression]

    def _computed(self, expression: Any) -> Any:
        for found, port, axis in self._inputs:
            if found == expression:
                return self._put(p.Size(axis), input=port)
        name = type(expression).__name__
        if expression.is_Symbol:
            return self._solved(expression)
        if expression.is_Pow and expression.exp.is_Integer and 0 < int(expression.exp) <= 8:
            return self._folded(p.Multiply, [expression.base] * int(expression.exp))
        if expression.is_Add or expression.is_Mul:
            return self._folded(p.Add if expression.is_Add else p.Multiply, expression.args)
        if name == "ToFloat":
            return self._put(p.Divide(), left=self._of(expression.args[0]), right=1)
        if name == "OpaqueUnaryFn_sqrt":
            return self._put(p.Sqrt(), input=self._of(expression.args[0]))
        two = {
            "FloatPow": p.Power,
            "FloatTrueDiv": p.Divide,
            "IntTrueDiv": p.Divide,
            "FloorDiv": p.FloorDivide,
            "CleanDiv": p.FloorDivide,
            "Mod": p.Modulo,
            "PythonMod": p.Modulo,
            "Max": p.Maximum,
            "Min": p.Minimum,
        }.get(name)
        if two is None:
            raise Refused(
                f"the open size {expression}, which does not follow from the inputs' sizes by arithmetic"
            )
        return self._folded(two, expression.args)

    def _folded(self, make: Any, parts: Any) -> Any:
        values = [self._of(part) for part in parts]
        numbers = [v for v in values if isinstance(v, int)]
        if make is p.Multiply and numbers and len(numbers) < len(values):
            factor = math.prod(numbers)
            values = [v for v in values if not isinstance(v, int)] + ([factor] if factor != 1 else [])
        out = values[0]
        for value in values[1:]:
            out = self._put(make(), left=out, right=value)
        return out

    def _solved(self, symbol: Any) -> Any:
        """A symbol that no input has as it is, from one that has ``a·symbol + b``."""
        for found, port, axis in self._inputs:
            if found.free_symbols != {symbol}:
                continue
            slope = found.diff(symbol)
            shift = found.subs(symbol, 0)
            if slope.is_Integer and shift.is_Integer:
                size = self._put(p.Size(axis), input=port)
                if int(shift):
                    size = self._put(p.Subtract(), left=size, right=int(shift))
                return size if int(slope) == 1 else self._put(p.FloorDivide(), left=size, right=int(slope))
        raise Refused(f"the open size {symbol}, which no input has")
