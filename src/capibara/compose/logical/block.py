"""Blocks and their ports, before they are connected in models.

A :class:`Block` has ports, each a wire. A :class:`Primitive` is one operation of the backend. Calling a block with
names declares its connections; :class:`~capibara.compose.logical.model.Model` makes the connections. Calling it with
positional arguments returns its result as a connection, for functional style.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from capibara.compose.errors import PicklingError, ShapeError, Site, WiringError
from capibara.compose.logical.arguments import identifier
from capibara.compose.logical.connections import Call, Connection, IOKey, Placement, Port
from capibara.compose.logical.shapes import Constraint, Dim, Rest, Shape, as_shape, settle
from capibara.compose.logical.wires import Kind, Wire
from capibara.errors import did_you_mean

__all__ = ["Block", "Child", "IOKey", "Placement", "Port", "Primitive", "SizeFrom", "site_of"]


class SizeFrom(NamedTuple):
    """In an attribute of an operation: the size that the port of this name is connected to."""

    port: str


class Child(NamedTuple):
    """A block inside a model."""

    name: str
    block: Block
    site: Site | None


class Block:
    """Anything with ports. Use a subclass: :class:`Model`, :class:`Primitive`, :class:`~.repeat.Repeat`."""

    # Said by primitives where it is otherwise. Here, so that asking does not go through __getattr__.
    takes_dtype: bool | str = False
    """The operation takes ``dtype=``, the compute dtype; ``"int"``: only when it makes floats of integers."""
    registered: bool = False
    """The operation is one that the user registered on the backend."""
    sizes: tuple[str, ...] = ()
    """Inputs that are sizes, which the operation gets in its attributes."""
    pure: bool = True
    """Equal arguments give equal results, and nothing else happens."""
    decodes: bool = False
    """The operation goes on from where its last call ended, in states that it reads and gives anew."""
    in_place: Mapping[str, str] = MappingProxyType({})
    """States of which the operation writes only a few rows: by input, the output that it then is."""

    made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep what the block is made with, so that it can be written down (:mod:`.interchange`)."""
        block = super().__new__(cls)
        block.__dict__["made_with"] = (args, kwargs)
        return block

    def __init__(self, *, name: str | None = None) -> None:
        if name is not None:
            identifier(name, f"name={name!r} is not an identifier")
        self.name = name
        self.wires: dict[str, Wire] = {}
        self.symbols: dict[str, Dim | Rest] = {}
        self.parent: Block | None = None
        self.child_name: str | None = None
        self.placed_by: Placement | Call | None = None

    @property
    def input_keys(self) -> list[str]:
        """Data inputs: those that must be passed in (without parameters, states and constants)."""
        raise NotImplementedError

    @property
    def output_keys(self) -> list[str]:
        raise NotImplementedError

    @property
    def label(self) -> str:
        """The block's place in the nested model: ``decoder.attention.query``."""
        names: list[str] = []
        block: Block | None = self
        while block is not None and block.child_name is not None:
            names.append(block.child_name)
            block = block.parent
        return ".".join(n for n in reversed(names) if n) or self.name or type(self).__name__

    def __call__(self, *inputs: Any, **connections: Any) -> Any:
        """Say what the block's ports are to be connected to.

        Args:
            inputs: for the block's inputs in their order (``input_keys``); None leaves one open.
            connections: by port: a name, a port, an :class:`IOKey`, an expression, a number, an array or a list.

        Returns:
            With names alone, or with an output among them, a :class:`Placement`, to be added to a model. Else the
            result as a :class:`Connection`, or a tuple of them where the block has several outputs.

        Raises:
            WiringError: there is no such port, or there are too many ``inputs``.
        """
        for key in connections:
            self._check_port(key)
        if not inputs:
            return Placement(self, connections)
        keys = self.input_keys
        if len(inputs) > len(keys):
            raise WiringError(
                f"{self.label} ({type(self).__name__}) has {len(keys)} inputs ({', '.join(keys) or 'none'}), and was "
                f"given {len(inputs)}"
            )
        given = dict(zip(keys, inputs, strict=False))
        for key in connections:
            if key in given:
                raise WiringError(f"{self.label} was given its input {key!r} twice, by place and by name")
        self._finish()
        outputs = self.output_keys
        if any(key in outputs for key in connections):
            return Placement(self, {**given, **connections})
        if not outputs:
            raise WiringError(f"{self.label} ({type(self).__name__}) has no output that could be used")
        call = Call(None, self, {**given, **connections}, None)
        results = tuple(Connection(call, key) for key in outputs)
        return results[0] if len(results) == 1 else results

    def summary(
        self, *, shapes: bool = True, types: bool = False, depth: int | None = 0, verbose: bool = True
    ) -> str:
        """Print a table of the blocks, their connections and their numbers of parameters.

        Args:
            shapes, types: add columns with the shapes and kinds known so far.
            depth: number of levels of nested blocks to show below the first; None: all.
            verbose: print the table (it is returned in any case).

        Returns:
            The table as text.
        """
        from capibara.compose.logical.summary import summary

        return summary(self, shapes=shapes, types=types, depth=depth, verbose=verbose)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __copy__(self) -> Self:
        """As deep as :func:`copy.deepcopy`: two blocks cannot hold the same ones."""
        return copy.deepcopy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PicklingError(
            f"{self.label} ({type(self).__name__}) cannot be pickled: write it as text with to_json(model) and read "
            "that with from_json, or make it again where it is needed"
        )

    def port(self, key: str) -> Port:
        """A port by name, even if an attribute has the same name (``block.port("name")``)."""
        self._check_port(key)
        return Port(self, key)

    def _check_port(self, key: str) -> None:
        if key not in self.wires:
            ports = [*self.input_keys, *(k for k in self.wires if k not in self.input_keys)]
            raise WiringError(
                f"{self.label} ({type(self).__name__}) has no port {key!r}; its ports are "
                f"{', '.join(ports) or 'none yet'}.{did_you_mean(key, ports)}"
            )

    def __getattr__(self, key: str) -> Port:
        wires = self.__dict__.get("wires")
        if wires is not None and key in wires:
            return Port(self, key)
        if key.startswith("_") or wires is None:
            raise AttributeError(key)
        raise AttributeError(
            f"{self.label} ({type(self).__name__}) has no port or attribute {key!r}.{did_you_mean(key, wires)}"
        )

    def shape_of(self, key: str) -> Shape:
        """The known shape of one port."""
        self._check_port(key)
        return self.wires[key].find().shape

    def _main_input(self) -> str | None:
        keys = self.input_keys
        return "input" if "input" in keys else (keys[0] if keys else None)

    def _main_output(self) -> str | None:
        keys = self.output_keys
        return "output" if "output" in keys else (keys[-1] if keys else None)

    def _chosen_input(self, given: Mapping[str, Any]) -> str | None:
        """The input that ``+=`` joins to the result before, of those that are not ``given``."""
        return self._main_input()

    def _finish(self) -> None:
        """Settle what the outputs are, before the block is connected to others."""

    def _shape(self, spec: Any, axes: Iterable[str | None] = ()) -> Shape:
        return as_shape(spec, self.symbols, tuple(axes))


class Primitive(Block):
    """One operation of the backend.

    Args:
        op: the operation's name in the backend (``ops.<op>``).
        inputs: port name → ``(shape, kind)``; a kind is "float", "int", "bool" or a capital letter, and ports with
            the same letter have the same kind; with "N" that is not "bool".
        outputs: the same for the results, in the order in which the operation returns them.
        attributes: keyword arguments of the operation, plain values known during composition.
        constraints: ``(rule, (port, …))``, in addition to equal names in the shapes.
        uses_key: the operation takes ``key=`` (randomness). uses_train: it takes ``train=``.
        accumulates: the operation takes ``accumulate=``, the dtype of its sums.
        sizes: inputs whose values are sizes (integers of at least 0), known when the operation is traced or run:
            the last of ``inputs``. The operation does not receive them as arrays; a :class:`SizeFrom` in an attribute
            refers to one. In ``constraints``, ``"#port"`` is the list of dimensions whose sizes a port holds.
        cost: a note for humans of what the operation does (shown by ``summary``).
    """

    def __init__(
        self,
        op: str,
        inputs: Mapping[str, tuple[Any, str | None]],
        outputs: Mapping[str, tuple[Any, str | None]],
        attributes: Mapping[str, Any] | None = None,
        constraints: Iterable[tuple[Callable[..., bool], tuple[str, ...]]] = (),
        *,
        uses_key: bool = False,
        uses_train: bool = False,
        accumulates: bool = False,
        constrain_output: bool = False,
        sizes: tuple[str, ...] = (),
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.op = op
        self.sizes = sizes
        self.attributes = dict(attributes or {})
        self.uses_key = uses_key
        self.uses_train = uses_train
        self.accumulates = accumulates
        self.constrain_output = constrain_output
        self._inputs = list(inputs)
        self._outputs = list(outputs)
        kinds: dict[str, Kind] = {}
        for key, (shape, kind) in {**inputs, **outputs}.items():
            letter = kind is not None and len(kind) == 1
            cell = kinds.setdefault(kind, Kind(numeric=kind == "N")) if letter else Kind(kind)  # type: ignore[arg-type]
            self.wires[key] = Wire(self._shape(shape), cell)
        for key in self._outputs:
            self.wires[key].producer = (self, key)
        for key in sizes:
            self.wires[key].value = Shape([Rest()] if self.wires[key].shape.items else [Dim()])
        for rule, keys in constraints:
            shapes = [self._sizes_in(k[1:]) if k[0] == "#" else self.wires[k].shape for k in keys]
            Constraint(rule, shapes, self._explain(keys)).post()
        settle()

    def _sizes_in(self, key: str) -> Shape:
        wire = self.wires[key]
        if wire.value is None:
            wire.value = Shape([Rest()])
        return wire.value

    def _explain(self, keys: tuple[str, ...]) -> Callable[[ShapeError], ShapeError]:
        def explain(error: ShapeError) -> ShapeError:
            ports = dict.fromkeys(k.removeprefix("#") for k in keys)
            shapes = ", ".join(f"{self.label}.{k} {self.wires[k].find().shape}" for k in ports)
            site = site_of(self)
            joined = f"\n  added at {site}" if site else ""
            return ShapeError(
                f"the shapes of {self.label} ({self.op}) do not fit: {error}\n  {shapes}{joined}"
            )

        return explain

    @property
    def input_keys(self) -> list[str]:
        return [k for k in self._inputs if self.wires[k].find().role is None]

    @property
    def ports_in(self) -> list[str]:
        """Every argument of the operation, in order, including parameters and states."""
        return self._inputs

    @property
    def output_keys(self) -> list[str]:
        return self._outputs


def site_of(block: Block) -> Site | None:
    parent = block.parent
    while parent is not None:
        for child in getattr(parent, "children", ()):
            if child.block is block:
                if child.site is not None:
                    return child.site
                break
        block, parent = parent, parent.parent
    return None
