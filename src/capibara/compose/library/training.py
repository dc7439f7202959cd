"""A model to train: another model with losses, regularisation and metrics added."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.logical.block import Block, Primitive
from capibara.compose.logical.connections import Connection
from capibara.compose.logical.model import Model, Placement, Port
from capibara.compose.logical.regions import Region
from capibara.compose.logical.wires import Wire
from capibara.compose.primitives.rules import scalar
from capibara.errors import did_you_mean

__all__ = ["TrainModel"]

Maker = Block | Callable[[], Block]
Sized = p.Mean | p.Max | p.Min


class TrainModel(Model):
    """A model with a training objective; the output ``final_cost`` is a scalar to minimise::

        train = TrainModel(model)
        train.add_loss(SquaredError(), input="output", target="target")
        train.add_regularization(L2(), 0.01, input=re.compile("weight"))
        train.add_metric(Accuracy(n_classes), pred="output", label="label", key_name="accuracy")

    Its inputs are the model's and those of the losses (``target``); its outputs the model's, those that were given a
    ``key_name``, ``loss`` (without the regularisation) and ``final_cost``. The model's parameters are under
    ``"model"``.

    Args:
        model: the model; it becomes part of this one.
        geometric_mean: divide each regularisation by the number of elements that its losses were averaged over
            (the geometric mean of those numbers, where a parameter serves several losses), so that a coefficient
            means the same for any batch size.
    """

    def __init__(self, model: Model, geometric_mean: bool = False, *, name: str | None = None) -> None:
        super().__init__(name=name)
        if not isinstance(model, Model):
            raise WiringError(f"model={model!r} must be a Model")
        if not isinstance(geometric_mean, bool):
            raise WiringError(f"geometric_mean={geometric_mean!r} must be True or False")
        model._finish()
        keys = [*model.input_keys, *model.output_keys]
        for key in ("loss", "final_cost"):
            if key in keys:
                raise WiringError(f"the model has a port {key!r}, which TrainModel needs: rename it")
        super()._add(model, {key: key for key in keys}, "model")
        self.model = model
        self.geometric_mean = geometric_mean
        self._results = list(model.output_keys)
        self._losses: list[tuple[Port, list[tuple[Port, Any]]]] = []
        self._penalties: list[tuple[Port, float, Wire]] = []
        self._combine: Block = p.Sum()
        self._done = False
        self.expose(*self._results)

    # ---- what a user adds ---------------------------------------------------------------------------------

    def add_loss(
        self,
        loss_model: Block,
        reduce_steps: Sequence[Maker] | None = None,
        key_name: str | None = None,
        coef: float | None = None,
        **connections: Any,
    ) -> None:
        """Add a loss: ``add_loss(SquaredError(), input="output", target="target")``.

        Args:
            loss_model: a block with one output.
            reduce_steps: blocks that reduce it to a scalar, one after the other; by default ``[Mean()]``.
            key_name: an output with the loss, after reduction and coefficient.
            coef: a factor.
            connections: for each input of the loss the name of an output of the model, or of a new input.

        Raises:
            WiringError: no connection leads to the model, or an input is missing.
        """
        self._open()
        scalar("coef", coef, optional=True)
        at = self._attached(loss_model, connections, "loss")
        sized: list[tuple[Port, Any]] = []
        for step in _made(reduce_steps, [p.Mean()]):
            if isinstance(step, Sized):
                sized.append((at, step.attributes["axis"]))
            at = self._chained(step, at)
        if coef is not None:
            factor = p.Multiply()
            super()._add(factor, {"left": at, "right": float(coef)}, None)
            at = Port(factor, "output")
        self._named(at, key_name)
        self._losses.append((at, sized))

    def add_regularization(
        self,
        model: Block,
        coef: float,
        key_name: str | None = None,
        **connections: Any,
    ) -> None:
        """Add ``coef`` times a penalty on parameters: ``add_regularization(L2(), 1e-3, input="layer_0.weight")``.

        Args:
            model: a block with a scalar output, such as ``L1()``.
            coef: the factor.
            key_name: an output with the penalty without the factor; for a pattern, their sum.
            connections: for each input a parameter by its path in the model, a port of one of its blocks, a name of
                this model, or, for a block with one input, a compiled regular expression: every parameter whose
                path it is found in gets a penalty of its own.

        Raises:
            WiringError: there is no such parameter, or it is inside a repeated or recomputed block.
        """
        self._open()
        scalar("coef", coef)
        params = dict(_parameters(self.model))
        repeated = list(_enclosed(self.model))
        for value in connections.values():
            if isinstance(value, re.Pattern):
                _reachable(f"the pattern {value.pattern!r}", filter(value.search, repeated))
            elif isinstance(value, str) and value not in self.wires and value not in params:
                _reachable(repr(value), [path for path in repeated if path == value])
        patterns = {k: v for k, v in connections.items() if isinstance(v, re.Pattern)}
        if not patterns:
            found = {k: self._parameter(v, params) for k, v in connections.items()}
            at = self._attached(model, found, "regularization")
            owner = next((v.wire for v in found.values() if isinstance(v, Port)), None)
            self._named(at, key_name)
            self._penalties.append((at, float(coef), at.wire if owner is None else owner))
            return
        if len(connections) > 1:
            raise WiringError("a pattern is for a regularisation with one input: name the parameters instead")
        ((key, pattern),) = patterns.items()
        matched = [port for path, port in params.items() if pattern.search(path)]
        if not matched:
            raise WiringError(
                f"no parameter matches {pattern.pattern!r}; the parameters are {', '.join(params)}"
            )
        parts = []
        for port, block in zip(matched, [model, *(_again(model) for _ in matched[1:])], strict=True):
            at = self._attached(block, {key: port}, "regularization")
            parts.append(at)
            self._penalties.append((at, float(coef), port.wire))
        if key_name is not None:
            self._named(self._total(parts), key_name)

    def add_metric(
        self,
        model: Block,
        reduce_steps: Sequence[Maker] | None = None,
        key_name: str | None = None,
        **connections: Any,
    ) -> None:
        """Add a metric: its output is an output of this model, and not part of the cost.

        Args:
            model: a block with one main output, such as ``Accuracy()``. reduce_steps: blocks after it.
            key_name: the name of the output; by default ``metric``, ``metric_1`` ….
            connections: as in :meth:`add_loss`.
        """
        self._open()
        at = self._attached(model, connections, "metric")
        for step in _made(reduce_steps, []):
            at = self._chained(step, at)
        number, name = 0, key_name or "metric"
        while key_name is None and name in self.wires:
            number += 1
            name = f"metric_{number}"
        self._named(at, name)

    def set_loss_combiner(self, loss_combiner: Block) -> None:
        """Set the block that combines several losses, stacked as ``[losses]``; by default ``Sum()``."""
        self._open()
        if not isinstance(loss_combiner, Block):
            raise WiringError(f"loss_combiner={loss_combiner!r} is not a block")
        self._combine = loss_combiner

    def finalize(self) -> None:
        """Combine losses and regularisation into ``final_cost``. ``compile`` calls it; then nothing can be added.

        Raises:
            WiringError: there is no loss.
        """
        if self._done:
            return
        if not self._losses:
            raise WiringError(
                "a TrainModel needs a loss: add_loss(SquaredError(), input='output', target='target')"
            )
        self._done = True
        losses = [at for at, _ in self._losses]
        at = losses[0]
        if len(losses) > 1:
            joined = p.Concat(len(losses), None)
            super()._add(joined, {f"input_{i}": port for i, port in enumerate(losses)}, None)
            at = self._chained(self._combine, Port(joined, "output"))
        at = self._chained(p.Item(), at)  # refuses a loss that is not a scalar
        self._named(at, "loss")
        parts = [at]
        for penalty, coef, wire in self._penalties:
            port = self._chained(p.Item(), penalty)
            if self.geometric_mean:
                port = self._per_element(port, wire)
            factor = p.Multiply()
            super()._add(factor, {"left": port, "right": coef}, None)
            parts.append(Port(factor, "output"))
        self._named(self._total(parts), "final_cost")

    # ---- how it is done -----------------------------------------------------------------------------------

    def __ior__(self, other: Placement | Connection | Block) -> Model:
        raise WiringError("a TrainModel is extended by add_loss, add_regularization and add_metric only")

    __iadd__ = __ior__

    def _check_port(self, key: str) -> None:
        Block._check_port(self, key)

    def _finish(self) -> None:
        self.finalize()

    def _open(self) -> None:
        if self._done:
            raise WiringError(
                "this TrainModel is finalized (compiled, or part of another model): make another one"
            )

    def _attached(self, block: Block, connections: dict[str, Any], what: str) -> Port:
        """Add a block and give its output back."""
        if not isinstance(block, Block):
            raise WiringError(f"the {what} {block!r} is not a block, such as SquaredError()")
        given = dict(connections)
        for key in given:
            block._check_port(key)
        missing = [k for k in block.input_keys if k not in given]
        if missing:
            raise WiringError(
                f"the {what} {type(block).__name__} has the inputs {block.input_keys}: connect {', '.join(missing)} too"
            )
        if what != "regularization":
            ours = [
                v for v in given.values() if isinstance(v, Port) or (isinstance(v, str) and v in self.wires)
            ]
            if not ours:
                raise WiringError(
                    f"nothing joins the {what} {type(block).__name__} to the model: its outputs are {self._results}."
                    f"{did_you_mean(str(next(iter(given.values()), '')), self._results)}"
                )
        output = block._main_output()
        if output is None or output in given:
            raise WiringError(
                f"the {what} {type(block).__name__} must have an output, and it is not to be connected"
            )
        super()._add(block, given, None)
        return Port(block, output)

    def _chained(self, block: Block, at: Port) -> Port:
        into, out = block._main_input(), block._main_output()
        if into is None or out is None:
            raise WiringError(f"{type(block).__name__} has no input or no output")
        super()._add(block, {into: at}, None)
        return Port(block, out)

    def _named(self, at: Port, key: str | None) -> None:
        if key is None:
            return
        if key in self.wires:
            raise WiringError(f"{self.label} already has a connection {key!r}: choose another key_name")
        copy = p.Buffer()
        super()._add(copy, {"input": at, "output": key}, None)
        self.expose(key)

    def _total(self, parts: list[Port]) -> Port:
        at = parts[0]
        for other in parts[1:]:
            both = p.Add()
            super()._add(both, {"left": at, "right": other}, None)
            at = Port(both, "output")
        return at

    def _parameter(self, value: Any, params: dict[str, Port]) -> Any:
        if not isinstance(value, str) or value in self.wires:
            return value
        if value not in params:
            raise WiringError(
                f"{value!r} is not a parameter of the model; the parameters are {', '.join(params)}."
                f"{did_you_mean(value, params)}"
            )
        return params[value]

    def _per_element(self, penalty: Port, wire: Wire) -> Port:
        """The penalty divided by the geometric mean of what the losses of its parameter were averaged over."""
        counts: list[Port] = []
        for at, sized in self._losses:
            if not sized or not _depends(at.wire, wire.find()):
                continue
            number: Port | None = None
            for port, axis in sized:
                size, real = p.Size(axis), p.Cast("accumulate")
                super()._add(size, {"input": port}, None)
                super()._add(real, {"input": Port(size, "output")}, None)
                number = self._times(number, Port(real, "output"))
            assert number is not None
            counts.append(number)
        if not counts:
            return penalty
        total: Port | None = None
        for count in counts:
            total = self._times(total, count)
        if len(counts) > 1:
            root = p.Power()
            super()._add(root, {"left": total, "right": 1 / len(counts)}, None)
            total = Port(root, "output")
        share = p.Divide()
        super()._add(share, {"left": penalty, "right": total}, None)
        return Port(share, "output")

    def _times(self, left: Port | None, right: Port) -> Port:
        if left is None:
            return right
        product = p.Multiply()
        super()._add(product, {"left": left, "right": right}, None)
        return Port(product, "output")


def _made(steps: Sequence[Maker] | None, default: list[Block]) -> list[Block]:
    if steps is None:
        return default
    if isinstance(steps, Block) or not isinstance(steps, Sequence):
        raise WiringError(f"reduce_steps={steps!r} must be a list of blocks, such as [Sum(1), Mean()]")
    made = [s if isinstance(s, Block) else s() if callable(s) else s for s in steps]
    for block in made:
        if not isinstance(block, Block):
            raise WiringError(f"reduce_steps: {block!r} is not a block, such as Mean()")
    return made


def _again(block: Block) -> Block:
    """Another block of the same kind, for the next parameter of a pattern."""
    try:
        return type(block)()
    except TypeError:
        raise WiringError(
            f"{type(block).__name__} cannot be made again without arguments: give each parameter its own "
            "add_regularization"
        ) from None


def _parameters(model: Model) -> Iterator[tuple[str, Port]]:
    """Paths and ports of the model's parameters, each once, as in the compiled parameters."""
    seen: set[int] = set()
    stack: list[tuple[Block, tuple[str, ...]]] = [(model, ())]
    while stack:
        block, path = stack.pop()
        if not isinstance(block, Model):
            continue  # inside a repeated block: its values do not exist outside of it
        for key, wire in block.wires.items():
            root = wire.find()
            if root.role == "param" and id(root) not in seen:
                seen.add(id(root))
                yield ".".join((*path, key)), Port(block, key)
        stack.extend((child.block, (*path, child.name)) for child in reversed(block.children))


def _enclosed(model: Model) -> Iterator[str]:
    """Paths of the parameters inside repeated and recomputed blocks, as in the compiled parameters."""
    seen: set[int] = set()
    stack: list[tuple[Block, tuple[str, ...], bool]] = [(model, (), False)]
    while stack:
        block, path, inside = stack.pop()
        if isinstance(block, Region):
            stack.append((block.body, path, True))
        elif isinstance(block, Model):
            for key, wire in block.wires.items():
                root = wire.find()
                if inside and root.role == "param" and id(root) not in seen:
                    seen.add(id(root))
                    yield ".".join((*path, key))
            stack.extend((child.block, (*path, child.name), inside) for child in reversed(block.children))


def _reachable(what: str, inside: Iterable[str]) -> None:
    names = list(inside)
    if names:
        raise WiringError(
            f"{what} is of parameters inside Repeat or Remat, whose values have no name outside of them: "
            f"{', '.join(names)}. Add their penalty to final_cost in the function that you differentiate, from "
            "params['model'], or leave it to the optimiser (weight decay); name the others one by one"
        )


def _depends(wire: Wire, on: Wire) -> bool:
    """Whether a value is computed from another."""
    seen: set[int] = set()
    stack = [wire.find()]
    while stack:
        at = stack.pop()
        if at is on:
            return True
        if id(at) in seen or at.producer is None:
            continue
        seen.add(id(at))
        block = at.producer[0]
        if isinstance(block, Block):
            keys = block.ports_in if isinstance(block, Primitive) else block.input_keys
            stack.extend(block.wires[k].find() for k in keys)
    return False
