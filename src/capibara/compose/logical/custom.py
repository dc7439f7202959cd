"""Blocks for user-defined operations, registered on a backend by name.

The function is looked up when a model is compiled, so that one model can be compiled for several backends, each of
which has the operation registered in its own terms.
"""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from capibara.compose.errors import WiringError
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.broadcasting import broadcast_rule
from capibara.compose.logical.shapes import Rest, Shape, unify
from capibara.compose.logical.wires import KINDS
from capibara.errors import did_you_mean

__all__ = ["Operation", "Wrapped", "op", "ports"]

_PLAIN = (bool, int, float, str, type(None))


class Operation(Primitive):
    """A block that runs a function registered with ``backend.register_op(name)``; see :func:`op`."""

    registered = True
    pure = False  # nothing is known of the function: it is neither run at compile time nor shared

    def __init__(
        self,
        op: str,
        inputs: Iterable[str] | None,
        outputs: Iterable[str],
        shapes: Mapping[str, Any],
        kinds: Mapping[str, str],
        attributes: Mapping[str, Any],
        *,
        name: str | None = None,
    ) -> None:
        if not isinstance(op, str) or not op.isidentifier() or keyword.iskeyword(op):
            raise WiringError(f"op: name={op!r} must be an identifier, such as 'gelu'")
        self._open = inputs is None
        self._given = (shapes, kinds, attributes, name)
        self._build(op, ["input"] if inputs is None else ports("inputs", inputs), ports("outputs", outputs))

    def _build(self, op: str, inputs: list[str], outputs: list[str]) -> None:
        shapes, kinds, attributes, name = self._given
        if not outputs or set(inputs) & set(outputs):
            raise WiringError(f"op({op!r}): outputs={outputs} must be at least one, none of them an input")
        named = [*inputs, *outputs]
        for what, table in (("shapes", shapes), ("kinds", kinds)):
            for key in table:
                if key not in named and not self._open:
                    raise WiringError(
                        f"op({op!r}): {what} names {key!r}; its ports are {', '.join(named)}.{did_you_mean(key, named)}"
                    )
        for key, kind in kinds.items():
            if not isinstance(kind, str) or (kind not in KINDS and not re.fullmatch("[A-Za-z]", kind)):
                raise WiringError(
                    f"op({op!r}): kinds[{key!r}]={kind!r:.80} must be 'float', 'int', 'bool' or a letter"
                )
        for key, value in attributes.items():
            # They stand in the source that is generated.
            if not isinstance(key, str) or not key.isidentifier() or keyword.iskeyword(key):
                raise WiringError(f"op({op!r}): {key!r:.80} is not a name for an argument")
            if not _plain(value):
                raise WiringError(
                    f"op({op!r}): {key}={value!r} must be a number, a string, None, or a tuple of such: what a model "
                    "computes with is connected to inputs"
                )
        constraints = []
        for key in outputs:
            if key in shapes:
                continue
            if inputs:
                constraints.append((_broadcast(), (*inputs, key)))
            else:
                raise WiringError(f"op({op!r}) has no inputs: say what it gives with shapes={{{key!r}: …}}")
        super().__init__(
            op,
            {k: (shapes.get(k, (Rest(k),)), kinds.get(k)) for k in inputs},
            {k: (shapes.get(k, (Rest(k),)), kinds.get(k, "float")) for k in outputs},
            attributes,
            constraints,
            name=name,
        )

    def __call__(self, *inputs: Any, **connections: Any) -> Any:
        if self._open and self.parent is None:
            given = [key for key in connections if key not in self._outputs]
            row = ["input"] if len(inputs) == 1 else [f"input_{i}" for i in range(len(inputs))]
            names = [*row, *given] or ["input"]
            if names != self._inputs and len(set(names)) == len(names):
                self.wires.clear()
                self.symbols.clear()
                self._build(self.op, ports("inputs", names), self._outputs)
        return super().__call__(*inputs, **connections)


def op(
    name: str,
    *,
    inputs: Iterable[str] | None = None,
    outputs: Iterable[str] = ("output",),
    shapes: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
    **attributes: Any,
) -> Operation:
    """A block for an operation that was registered on the backend with ``backend.register_op(name)``::

        @backend.register_op("gelu")
        def gelu(x):
            return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))

        model |= Linear(64)(input="input", output="hidden")
        model += op("gelu")(input="hidden", output="hidden_act")

    (Some guides write the last line as ``model += "gelu"(input=…)``, which is not valid Python: a string cannot be
    called.) Equivalent JAX: ``hidden_act = gelu(hidden, **attributes)``.

    Args:
        name: the operation's name.
        inputs: names of its ports, in the order of the function's arguments. By default the names that the block is
            called with, in that order, or ``input``.
        outputs: names of the function's results (for several, it returns a tuple).
        shapes: shapes of ports by name, as in :func:`capibara.compose.logical.shapes.as_shape`; equal names are equal
            sizes: ``{"input": "*b n", "output": "*b"}``. An output without a shape here has the shape that its inputs
            broadcast to; if all sizes are known and the backend is JAX, this is checked by ``compile``.
        kinds: "float", "int" or "bool" by port, or a letter for ports of the same kind; by default inputs are of any
            kind, and outputs floats.
        attributes: keyword arguments for the function: numbers, strings, None, or tuples of these.

    Raises:
        WiringError: the name or an attribute cannot be written in source, or a port is unknown. ``compile`` raises
        :class:`CompileError` if the backend has no such operation.
    """
    return Operation(name, inputs, outputs, dict(shapes or {}), dict(kinds or {}), attributes)


def ports(what: str, names: Iterable[str]) -> list[str]:
    """Names of ports as a list.

    Raises:
        WiringError: the names are invalid, or one occurs twice.
    """
    if isinstance(names, str):
        raise WiringError(f"{what}={names!r} must be a list of names, as {what}=[{names!r}]")
    row = list(names)
    for key in row:
        if not isinstance(key, str) or not key.isidentifier() or key.startswith("_"):
            raise WiringError(f"{what}={row!r}: {key!r} is not a name for a port")
    if len(set(row)) != len(row):
        raise WiringError(f"{what}={row!r} names a port twice")
    return row


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_plain(v) for v in value)
    return type(value) in _PLAIN and value == value and value not in (float("inf"), float("-inf"))


def _broadcast() -> Any:
    """(inputs …, output): the output has the shape that the inputs broadcast to."""
    between: list[Shape] = []

    def rule(*shapes: Shape) -> bool:
        *given, output = shapes
        if len(given) == 1:
            unify(given[0], output)
            return True
        while len(between) < len(given) - 2:
            between.append(Shape([Rest()]))
        steps = [given[0], *between, output]
        done = True
        for left, right, out in zip(steps, given[1:], steps[1:], strict=False):
            done = broadcast_rule(left, right, out) and done
        return done

    return rule


class Wrapped(Operation):
    """A block with its own function, created by :func:`capibara.compose.from_jax`.

    Args:
        function: called with the values of ``inputs``; returns one value, or a tuple in the order of ``outputs``.
        rule: given the shapes of inputs and outputs in turn, as :class:`~.shapes.Constraint` calls it.
        library: what the function is written in, for messages. uses_key: it takes ``key=``, a random key.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        rule: Callable[..., bool],
        inputs: Iterable[str],
        outputs: Iterable[str],
        kinds: Mapping[str, str],
        library: str,
        *,
        uses_key: bool = False,
        name: str | None = None,
    ) -> None:
        self.function = function
        self.library = library
        row, made = ports("inputs", inputs), ports("outputs", outputs)
        if not made or set(row) & set(made):
            raise WiringError(f"outputs={made} must be at least one, none of them an input {row}")
        self._open = False
        own = getattr(function, "__name__", "function")
        op = f"{own if own.isidentifier() and not keyword.iskeyword(own) else 'function'}_{next(_count)}"
        Primitive.__init__(
            self,
            op,
            {k: ((Rest(k),), kinds.get(k)) for k in row},
            {k: ((Rest(k),), kinds.get(k, "float")) for k in made},
            {},
            [(rule, (*row, *made))],
            uses_key=uses_key,
            name=name,
        )


_count = itertools.count()
