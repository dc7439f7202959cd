"""The exact arguments of a training step on one device, without a device and without tracing.

The mesh axis of each dimension follows from :class:`~capibara.config.axes.AxisRules` with the rules of a
:class:`~capibara.plan.layout.Layout`, as in the trainer's own step; the arrays are those of the composed model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from capibara.config import ModularModelConfig
from capibara.config.axes import AxisRules
from capibara.plan.errors import PlanError
from capibara.plan.layout import Layout
from capibara.plan.memory.tiles import padded_bytes
from capibara.plan.validation import MeshSizes

__all__ = ["Block", "item_size", "part_of", "step_arguments"]

_ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int8": 1, "bool": 1}
# Moments that an optimizer keeps of every parameter, in its dtype, and scalars of its own (steps).
_MOMENTS = {"adamw": (("mu", "nu"), 2), "lion": (("mu",), 2)}


@dataclass(frozen=True)
class Block:
    """One array of the step.

    Attributes:
      kind: ``parameters``, ``optimizer``, ``inputs`` or ``model state``.
      path: its name, ``("blocks", "mlp", "up", "weight")``.
      shape: of one device's part.
      item_size: bytes per element.
      count: number of such arrays.
      on_host: whether it is in the host's memory.
    """

    kind: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    item_size: int
    count: int = 1
    on_host: bool = False

    @property
    def bytes(self) -> int:
        """Without padding."""
        return self.count * math.prod(self.shape) * self.item_size

    @property
    def padded(self) -> int:
        """Including padding."""
        return self.count * padded_bytes(self.shape, self.item_size)


def item_size(dtype: str) -> int:
    """Bytes per element.

    Raises:
      PlanError: a dtype that configurations do not support.
    """
    if dtype not in _ITEM_SIZES:
        raise PlanError(f"dtype={dtype!r} must be one of {', '.join(_ITEM_SIZES)}")
    return _ITEM_SIZES[dtype]


def part_of(
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    sizes: tuple[tuple[str, int], ...],
    rules: AxisRules,
    kind: Any = "parameters",
) -> tuple[int, ...]:
    """The shape of one device's part of an array whose dimensions have these logical names."""
    spec = rules.spec(names, MeshSizes(sizes), shape, kind)  # type: ignore[arg-type]
    lengths = dict(sizes)
    part = []
    for size, entry in zip(shape, [*spec, *(None,) * len(shape)], strict=False):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        part.append(size // math.prod(lengths[axis] for axis in axes))
    return tuple(part)


def step_arguments(config: ModularModelConfig, layout: Layout) -> tuple[Block, ...]:
    """All arguments of the training step: parameters, moments, tokens, model state, and the scalars.

    Raises:
      PlanError: an unknown optimizer.
    """
    return tuple(_arguments(config, layout))


def _arguments(config: ModularModelConfig, layout: Layout) -> Iterator[Block]:
    section: Any = config.model
    parameters, states = _specs(section)
    size = item_size(config.precision.param_dtype)
    if config.optimizer.name not in _MOMENTS:
        raise PlanError(f"optimizer.name={config.optimizer.name!r} must be one of {', '.join(_MOMENTS)}")
    moments, scalars = _MOMENTS[config.optimizer.name]
    on_host = layout.offload == "optimizer"
    for path, shape, names in parameters:
        yield Block("parameters", path, part_of(shape, names, layout.mesh, layout.rules), size)
        part = part_of(shape, names, layout.mesh, layout.optimizer_rules)
        yield Block("optimizer", path, part, size, len(moments), on_host)
    yield Block("optimizer", ("count",), (), 4, scalars)
    for path, shape, names in states:
        yield Block("model state", path, part_of(shape, names, layout.mesh, layout.rules), 4)
    rows = config.train.batch_size // layout.microbatches
    tokens = (layout.microbatches, rows, config.train.sequence_length + 1)
    yield Block(
        "inputs",
        ("tokens",),
        part_of(tokens, (None, "batch", None), layout.mesh, layout.rules, "activations"),
        4,
    )
    yield Block("inputs", ("step",), (), 4)
    yield Block("inputs", ("key",), (2,), 4)


_Specs = tuple[tuple[tuple[str, ...], tuple[int, ...], tuple[str | None, ...]], ...]


@lru_cache(maxsize=64)
def _specs(model: Any) -> tuple[_Specs, _Specs]:
    """Path, shape and logical axes of the parameters and states of a ``[model]`` section, from the backend that needs
    no device."""
    from capibara.compose import NumpyBackend, compile
    from capibara.core.decoder import build_decoder

    compiled = compile(build_decoder(model), NumpyBackend())

    def listed(specs: Any) -> _Specs:
        return tuple(
            (tuple(path), tuple(spec.shape), tuple(spec.axes or (None,) * len(spec.shape)))
            for path, spec in specs.items()
        )

    return listed(compiled.params), listed(compiled.states)
