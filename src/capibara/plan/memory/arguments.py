"""The exact arguments of a training step on one device, without a device and without tracing.

The mesh axis of each dimension follows from :class:`~capibara.config.axes.AxisRules` with the rules of a
:class:`~capibara.sharding.Layout`, as in the trainer's own step; the arrays are those of the composed model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from capibara.config import ModularModelConfig
from capibara.config.axes import AxisRules
from capibara.config.sections import OptimizerSection
from capibara.data.packed import PACKED, is_packed
from capibara.plan.errors import PlanError
from capibara.plan.memory.tiles import padded_bytes
from capibara.plan.validation import MeshSizes
from capibara.sharding import Layout

__all__ = ["Block", "is_base", "item_size", "part_of", "step_arguments", "step_gradients"]

_ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int8": 1, "bool": 1}
# Of what weights beside adapters are stored as.
_BASE_SIZES = {"weight_codes": 1, "weight_scales": 4}
# Bytes of what an optimizer keeps besides moments, replicated: steps; Muon's coefficients.
_OWN_BYTES = {"adamw": 8, "lion": 8, "adafactor": 8, "muon": 24, "sgd": 4}
# Adafactor keeps the second moment of a matrix whose second-largest side is at least this as two sums.
_FACTORED = 128


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


def is_base(path: tuple[str, ...]) -> bool:
    """Whether a parameter's path is that of a weight's codes or their scales."""
    return path[-1] in _BASE_SIZES


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

    The moving average of the parameters counts as the optimizer's. With adapters only these have moments; weights
    beside them may be codes of eight or four bits. Packed rows have segments, positions and weights.

    Raises:
      PlanError: an unknown optimizer.
    """
    return tuple(_arguments(config, layout))


@lru_cache(maxsize=256)
def _gradients(model: Any, finetune: Any, size: int, layout: Layout, factors: bool) -> tuple[Block, ...]:
    from capibara.core.adapters import is_adapter

    return tuple(
        Block(
            "gradients",
            path,
            part_of(
                shape,
                names,
                layout.mesh,
                layout.rules if factors and _is_factored(shape) else layout.optimizer_rules,
            ),
            size,
        )
        for path, shape, names in _specs(model, finetune)[0]
        if finetune.method == "full" or is_adapter(path)
    )


def step_gradients(config: ModularModelConfig, layout: Layout) -> tuple[Block, ...]:
    """The gradients of the parameters that are trained: sharded as the moments that they go into.

    The sums that Adafactor keeps of matrices are replicated, so their gradients are sharded as the parameters.
    """
    model: Any = config.model
    finetune: Any = config.finetune
    factors = config.optimizer.name == "adafactor"
    return _gradients(model, finetune, item_size(config.precision.param_dtype), layout, factors)


def _arguments(config: ModularModelConfig, layout: Layout) -> Iterator[Block]:
    from capibara.core.adapters import is_adapter  # imports JAX, as the specifications do

    model: Any = config.model
    finetune: Any = config.finetune
    parameters, states = _specs(model, finetune)
    size = item_size(config.precision.param_dtype)
    on_host = layout.offload == "optimizer"
    for path, shape, names in parameters:
        width = _BASE_SIZES.get(path[-1], size)
        yield Block("parameters", path, part_of(shape, names, layout.mesh, layout.rules), width)
        if config.finetune.method != "full" and not is_adapter(path):
            continue
        if config.train.ema:
            part = part_of(shape, names, layout.mesh, layout.optimizer_rules)
            yield Block("optimizer", path, part, max(size, 4))
        for kept, count in _moments(config.optimizer, path, shape, names):
            whole = kept != shape  # a sum: replicated
            part = kept if whole else part_of(shape, names, layout.mesh, layout.optimizer_rules)
            yield Block("optimizer", path, part, size, count, on_host)
    yield Block("optimizer", ("count",), (), _OWN_BYTES[config.optimizer.name])
    for path, shape, names in states:
        yield Block("model state", path, part_of(shape, names, layout.mesh, layout.rules), 4)
    rows = config.train.batch_size // layout.microbatches
    tokens = (layout.microbatches, rows, config.train.sequence_length + 1)
    part = part_of(tokens, (None, "batch", None), layout.mesh, layout.rules, "activations")
    for name in PACKED if is_packed(config.data) else ("tokens",):
        yield Block("inputs", (name,), part, 4)
    yield Block("inputs", ("step",), (), 4)
    yield Block("inputs", ("key",), (2,), 4)


def _moments(
    settings: OptimizerSection, path: tuple[str, ...], shape: tuple[int, ...], names: tuple[str | None, ...]
) -> list[tuple[tuple[int, ...], int]]:
    """Shapes of the arrays that an optimizer keeps of a parameter, in its dtype, and how many of each."""
    from capibara.train.optimizer import is_orthogonal

    if settings.name == "adafactor":
        if not _is_factored(shape):
            return [((1,), 2), (shape, 1)]
        order = sorted(range(len(shape)), key=lambda n: shape[n])
        sums = [tuple(size for n, size in enumerate(shape) if n != gone) for gone in order[-2:]]
        return [((1,), 1), *((one, 1) for one in sums)]
    count = {"adamw": 2, "lion": 1, "sgd": 1 if settings.beta1 else 0, "muon": 2}[settings.name]
    if settings.name == "muon" and is_orthogonal(path, names):
        count = 1
    return [(shape, count)] if count else []


def _is_factored(shape: tuple[int, ...]) -> bool:
    """Whether Adafactor keeps two sums in place of the second moment."""
    return len(shape) > 1 and sorted(shape)[-2] >= _FACTORED


_Specs = tuple[tuple[tuple[str, ...], tuple[int, ...], tuple[str | None, ...]], ...]


@lru_cache(maxsize=64)
def _specs(model: Any, finetune: Any) -> tuple[_Specs, _Specs]:
    """Path, shape and logical axes of the parameters and states of a model, from the backend that needs no device."""
    from capibara.compose import NumpyBackend, compile
    from capibara.core.decoder import build_decoder

    compiled = compile(build_decoder(model, finetune=finetune), NumpyBackend())

    def listed(specs: Any) -> _Specs:
        return tuple(
            (tuple(path), tuple(spec.shape), tuple(spec.axes or (None,) * len(spec.shape)))
            for path, spec in specs.items()
        )

    return listed(compiled.params), listed(compiled.states)
