"""Blocks that run another block repeatedly (:class:`Repeat`) or again in the backward pass (:class:`Remat`). The
inner block is a separate function; its parameters stay under its path.
"""

from __future__ import annotations

from collections.abc import Iterable

from capibara.compose.errors import ShapeError, WiringError
from capibara.compose.logical.block import Port
from capibara.compose.logical.model import Block, Model, Primitive
from capibara.compose.logical.shapes import Dim, Shape, settle, unify
from capibara.compose.logical.trail import transaction
from capibara.compose.logical.wires import Declaration, Wire
from capibara.errors import did_you_mean

__all__ = ["REMAT", "Region", "Remat", "Repeat"]

REMAT = ("none", "dots", "full")


class Region(Block):
    """Base class: a body with its own ports that appears as one block."""

    def __init__(
        self, block: Block, remat: str, shared: Iterable[str] = (), *, name: str | None = None
    ) -> None:
        if not isinstance(block, Block):
            raise WiringError(f"block={block!r} is not a block: give a Model, such as Linear(64)")
        if isinstance(block, Primitive):
            body = Model()
            body.add(block, **{k: k for k in (*block.ports_in, *block.output_keys)})
            body.expose(*block.output_keys)
            block = body
        if not isinstance(block, Model):
            body = Model()
            body.add(block, **{k: k for k in (*block.input_keys, *block.output_keys)})
            block = body
        if block.parent is not None:
            raise WiringError(
                f"this {type(block).__name__} is already part of {block.parent.label}: make another one"
            )
        if remat not in REMAT:
            raise WiringError(f"remat={remat!r} must be one of {', '.join(map(repr, REMAT))}")
        self.shared = _shared(block, shared)
        super().__init__(name=name)
        block._finish()
        self._owned: list[tuple[Wire, Declaration | None]] = []
        for key in self.shared:
            wire = block.wires[key].find()
            self._owned.append((wire, wire.declaration))
            wire.role = wire.declaration = None
        inputs = [key for key in block.input_keys if key not in self.shared]
        block._frozen = ([*inputs, *self.shared], block.output_keys)
        self.body = block
        self.remat = remat
        block.parent, block.child_name = self, ""
        self._inputs = list(block.input_keys)
        self._outputs = list(block.output_keys)
        through = [key for key in self._inputs if key in self._outputs]
        if through:
            self._release()
            raise WiringError(
                f"{type(block).__name__} gives its inputs {through} out again under the same name: leave them out of "
                "its outputs, the block around it has them already"
            )
        for key in self._inputs:
            block.wires[key].find().consumed = True
            inner = block.wires[key].find()
            self.wires[key] = Wire(inner.shape, inner.kind)

    def _release(self) -> None:
        """Give the body back as it was: a refused region must not keep it."""
        self.body.parent = self.body.child_name = self.body._frozen = None
        for wire, declaration in self._owned:
            wire.role, wire.declaration = "param", declaration

    def _main_input(self) -> str | None:
        keys = [key for key in self._inputs if key not in self.shared]
        return "input" if "input" in keys else (keys[0] if keys else None)

    def _check_port(self, key: str) -> None:
        wire = self.body.wires.get(key)
        role = wire.find().role if wire is not None else None
        if key in self.wires or role not in ("param", "state"):
            super()._check_port(key)
            return
        raise WiringError(self._owns(key, "parameter" if role == "param" else "state"))

    def __getattr__(self, key: str) -> Port:
        body = self.__dict__.get("body")
        if body is not None and key not in self.wires and key in body.wires and not key.startswith("_"):
            role = body.wires[key].find().role
            if role in ("param", "state"):
                raise AttributeError(self._owns(key, "parameter" if role == "param" else "state"))
        return super().__getattr__(key)

    def _owns(self, key: str, what: str) -> str:
        return f"{key!r} is a {what} inside of {self.label} ({type(self).__name__}), and no port of it."

    @property
    def input_keys(self) -> list[str]:
        return self._inputs

    @property
    def output_keys(self) -> list[str]:
        return self._outputs

    def _add_output(self, key: str, shape: Shape) -> None:
        wire = Wire(shape, self.body.wires[key].find().kind)
        wire.producer = (self, key)
        self.wires[key] = wire


class Remat(Region):
    """A block whose intermediate values are recomputed in the backward pass instead of stored.

    Args:
        block: any block.
        policy: ``"full"`` stores only the inputs; ``"dots"`` stores the results of matrix products without a batch
            dimension. Equivalent JAX: ``jax.checkpoint(block, policy=…)``.
        shared: names of the block's parameters that become inputs, to be tied to others, as in ``Remat(Linear(8),
            shared=["weight"])(weight=first.weight)``.
    """

    def __init__(
        self, block: Block, policy: str = "full", *, shared: Iterable[str] = (), name: str | None = None
    ) -> None:
        super().__init__(block, policy, shared, name=name)
        for key in self._outputs:
            self._add_output(key, self.body.wires[key].find().shape)

    def _owns(self, key: str, what: str) -> str:
        if what == "state":
            return super()._owns(key, what)
        return f"{super()._owns(key, what)} To tie it to one outside, say so: Remat(…, shared=[{key!r}])(…, {key}=…)"


class Repeat(Region):
    """A block repeated ``count`` times in sequence, each with its own parameters, compiled as one block.

    The block's main output feeds its main input. Its other inputs are the same for every repetition; its other
    outputs are stacked along a new leading dimension, as are its parameters and states. Equivalent JAX:
    ``jax.lax.scan`` over the stacked parameters.

    Args:
        block: a block whose main input and main output have the same shape.
        count: number of repetitions, at least 1.
        mode: ``"scan"`` compiles one copy of the block (compile time does not grow with ``count``); ``"unroll"``
            compiles ``count`` copies; ``"auto"`` decides by platform and depth when the model is compiled.
        remat: recompute in the backward pass: ``"none"``, ``"dots"``, ``"full"`` (see :class:`Remat`).
        shared: names of the block's parameters that all repetitions share. They become inputs, to be tied to others:
            ``Repeat(Linear(8), 3, shared=["weight"])(weight=first.weight)``.
    """

    def __init__(
        self,
        block: Block,
        count: int,
        *,
        mode: str = "auto",
        remat: str = "none",
        shared: Iterable[str] = (),
        name: str | None = None,
    ) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise WiringError(f"count={count!r} must be an integer of at least 1")
        if mode not in ("auto", "scan", "unroll"):
            raise WiringError(f"mode={mode!r} must be 'auto', 'scan' or 'unroll'")
        super().__init__(block, remat, shared, name=name)
        self.count = count
        self.mode = mode
        carry_in, carry_out = self._main_input(), self.body._main_output()
        if carry_in is None or carry_out is None:
            self._release()
            raise WiringError(
                f"{type(block).__name__} has no input or no output: nothing can go through it repeatedly"
            )
        self.carry_in, self.carry_out = carry_in, carry_out
        into, out = (self.body.wires[k].find() for k in (carry_in, carry_out))
        before = (repr(out.shape), repr(into.shape))

        def explain(error: ShapeError) -> ShapeError:
            return ShapeError(
                f"{type(block).__name__} cannot be repeated: its {carry_out!r} {before[0]} does not fit its "
                f"{carry_in!r} {before[1]}: {error}"
            )

        with transaction():
            try:
                unify(out.shape, into.shape, explain)
                settle()
            except ShapeError as error:
                self._release()
                raise explain(error) from None
        for key in self._outputs:
            inner = self.body.wires[key].find().shape
            shape = inner if key == carry_out else Shape([Dim(count, axis="layers"), *inner.items])
            self._add_output(key, shape)

    def _owns(self, key: str, what: str) -> str:
        text = f"{super()._owns(key, what)} Each of the {self.count} repetitions has one of its own"
        if what == "state":
            return f"{text}."
        return (
            f"{text}; for one that comes from outside and is the same for all of them, say so: "
            f"Repeat(…, {self.count}, shared=[{key!r}])(…, {key}=…)"
        )


def _shared(block: Model, keys: Iterable[str]) -> list[str]:
    if isinstance(keys, str):
        raise WiringError(f"shared={keys!r} must be a list of names, as shared=[{keys!r}]")
    names = list(dict.fromkeys(keys))
    params = [key for key, wire in block.wires.items() if wire.find().role == "param"]
    for key in names:
        if key not in params:
            raise WiringError(
                f"shared names {key!r}, which is not a parameter of {type(block).__name__} itself; those are "
                f"{params}.{did_you_mean(str(key), params)} One further inside has to be given a name in it first, "
                'as in model |= Linear(8)(weight="weight")'
            )
    return names
