"""``block.connect(port, port=…)``: the ports of a block joined by place or by name, values given when it is made.

Mithril gives every argument of an operation a port, so that ``Mean(axis=1)`` and ``Mean().connect(axis=1)`` are one.
Here the arguments that are no arrays are settings: they are set when their value is known, and a block whose settings
are still open (``Reshape()``) waits for :meth:`Connectable.connect`.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, ClassVar

from capibara.compose import TBD
from capibara.compose.errors import WiringError
from capibara.compose.logical.block import Block
from capibara.compose.logical.connections import IOKey, Placement
from capibara.compose.logical.operators import Operators

__all__ = ["Connectable", "as_identifier", "given"]

WORDS = ("average", "dtype", "input_type", "padding", "weights")
"""Settings that are words; for any other a string is the name of a connection."""


def given(value: Any) -> bool:
    """Whether there is a value (``TBD``, ``None`` for a port and the empty string say that there is none)."""
    return value is not TBD and not (isinstance(value, str) and value == "")


class Connectable(Block):
    """A block of :mod:`capibara.compose` under the arguments that Mithril's has.

    Attributes:
        places: the ports in the order of :meth:`connect`'s arguments; by default the inputs, then the outputs.
        signature: the arguments of the class in Mithril's order, ``"axis=None keepdim=False input"``; what the block
            of compose takes by another name stands behind a slash: ``"start_dim/start=0"``.
    """

    places: ClassVar[str] = ""
    signature: ClassVar[str] = ""
    sized: ClassVar[tuple[str, ...]] = ()
    """Settings that are sizes, and may be connections that follow from shapes."""

    def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
        if len(args) > len(self._options()):
            raise WiringError(f"{type(self).__name__}: got {len(args)} arguments, expected {self.signature}")
        options |= dict(zip(self._options(), args, strict=False))
        self.__dict__["title"], name = name, as_identifier(name)
        self.__dict__["_wanted"] = {}
        self.__dict__["_values"] = {}
        self._make(options, name)

    @classmethod
    def _options(cls) -> dict[str, tuple[str, Any]]:
        """By Mithril's name: the name in compose, and the default."""
        found: dict[str, tuple[str, Any]] = {}
        for word in cls.signature.split():
            both, _, default = word.partition("=")
            key, _, other = both.partition("/")
            found[key] = (other or key, _literal(default) if default else TBD)
        return found

    @classmethod
    def _base(cls) -> type[Block]:
        return next(c for c in cls.__mro__ if not issubclass(c, Connectable))

    def _make(self, options: dict[str, Any], name: str | None) -> None:
        known = self._options()
        takes = inspect.signature(self._base().__init__).parameters
        settings: dict[str, Any] = {}
        open_ones = []
        for key, (other, default) in known.items():
            own = key in options
            value = options.pop(key, default)
            if other not in takes:
                if own and given(value):
                    self._values[key] = value
            elif given(value):
                self._wanted[key] = value
                if key in self.sized and _holds_connection(value):
                    settings[other], ports = _sizes(key, value)
                    self._values.update(ports)
                else:
                    settings[other] = self._setting(key, value)
            elif takes[other].default is inspect.Parameter.empty:
                open_ones.append(key)
        for key, value in options.items():
            if key in takes:
                settings[key] = value
            elif given(value):
                self._values[key] = value
        self.__dict__["_open"] = open_ones
        if open_ones:
            Block.__init__(self, name=name)
        else:
            self._base().__init__(self, **settings, name=name)

    def _setting(self, key: str, value: Any) -> Any:
        if _holds_connection(value) or (isinstance(value, str) and key not in WORDS):
            raise WiringError(
                f"{type(self).__name__}: {key} is {value!r}, expected a value that is known when the model is "
                f"written. Give the number itself; arrays are connected, settings such as {key} are not"
            )
        return value

    def connect(self, *places: Any, **ports: Any) -> Placement:
        """Say what the ports are joined to, by place or by name, for ``model |= …`` and ``model += …``.

        Args:
            places: in the order of Mithril's ``connect``. ports: by name. Each is a name, a connection, a value or an
                :class:`IOKey`; TBD leaves it open.

        Raises:
            WiringError: there is no such port, or a setting is given a connection.
        """
        order = self.places.split() or [*self.input_keys, *self.output_keys]
        return Placement(self, self._joined(self._placed(order, places, ports)))

    def _placed(self, order: list[str], places: tuple[Any, ...], ports: dict[str, Any]) -> dict[str, Any]:
        """Ports by name, those that were given by place among them."""
        if len(places) > len(order):
            raise WiringError(
                f"{self.label}: got {len(places)} connections, expected at most {', '.join(order)}"
            )
        for key, value in zip(order, places, strict=False):
            if key in ports:
                raise WiringError(f"{self.label} was given its port {key!r} twice, by place and by name")
            ports[key] = value
        return ports

    def _joined(self, ports: dict[str, Any]) -> dict[str, Any]:
        """What is left to join once settings are set; the values that the block was made with among it."""
        ports = {k: v for k, v in ports.items() if v is not None and given(v)} | {
            k: None for k, v in ports.items() if v is None and k in self.__dict__.get("_wanted", {})
        }
        arguments = self._options()
        takes = inspect.signature(self._base().__init__).parameters
        settings = {k: ports.pop(k) for k in list(ports) if k in arguments and arguments[k][0] in takes}
        settings = {k: v for k, v in settings.items() if v is not None or self._wanted.get(k) is not None}
        if settings:
            values = self._values
            self._make({**self._wanted, **values, **settings}, self.name)
        if self.__dict__.get("_open"):
            raise WiringError(
                f"{type(self).__name__}: {', '.join(self._open)} is open. Give it when the block is made or connected"
            )
        joined = {k: v for k, v in {**self._values, **ports}.items() if v is not None}
        for key in joined:
            self._check_port(key)
        return joined

    def __call__(self, *inputs: Any, **connections: Any) -> Any:
        """The block's result, or what ``connect`` gives where names or outputs are among the connections.

        Returns:
            A connection, one for each output where there are several; with a name or an output given, a placement
            for ``model |= …``.
        """
        order = [k for k in self.places.split() if k != "output"] or self.input_keys
        joined = self._joined(self._placed(order, inputs, connections))
        outputs = set(self.output_keys)
        if any(isinstance(v, str) for v in joined.values()) or outputs & set(joined):
            return Placement(self, joined)
        keys = self.input_keys
        if not joined:
            return Placement(self, joined)
        first = next((k for k in keys if k in joined), None)
        if first is None:
            first = next(iter(joined))
            return Placement(self, joined)
        rest = {k: v for k, v in joined.items() if k != first}
        before = keys[: keys.index(first)]
        return super().__call__(*(rest.pop(k, None) for k in before), joined[first], **rest)


def as_identifier(name: Any) -> Any:
    """A name that compose takes: Mithril takes any, such as ``"0"``, which :attr:`Connectable.title` keeps."""
    if name is None or re.fullmatch(r"[A-Za-z]\w*", name):
        return name
    return "n" + re.sub(r"\W", "_", name)


def _sizes(key: str, value: Any) -> tuple[Any, dict[str, Any]]:
    """Sizes with None for each that is a connection, and the connections by port."""
    if not isinstance(value, list | tuple):
        return None, {key: value}
    row = tuple(None if isinstance(size, Operators) else size for size in value)
    return row, {f"size_{i}": size for i, size in enumerate(value) if isinstance(size, Operators)}


def _literal(text: str) -> Any:
    import ast

    return ast.literal_eval(text)


def _holds_connection(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_connection(v) for v in value)
    return isinstance(value, Operators | IOKey)
