"""Which implementation runs, and why the others do not.

For an operation, or its public function, the answer comes from the call's problem alone. Any other function (one
built from operations, a method, your own model) is traced with the shapes of its arguments: nothing is computed, and
every operation in it is explained.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from capibara.errors import did_you_mean
from capibara.ops.errors import OpTypeError, OpValueError
from capibara.ops.registry import Op, get_op, list_ops, recording
from capibara.ops.tuning import lowering_platform

__all__ = ["Explanation", "explain"]

_PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")

_calls = itertools.count()


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`.

    Attributes:
      op: The operation or function that is explained.
      platform: Where it would run.
      chosen: The implementation that runs. For a function with several operations, their implementations, each once;
        ``"xla"`` for a function without operations, which is plain XLA on every platform.
      reasons: Why each of the others does not run.
      parameters: Parameters measured on this device and used instead of the heuristic (see ``capibara tune``).
      parts: The operations inside a function that is not an operation itself.
      remarks: Arguments that have no effect here, each with a remedy; a call warns about them.
    """

    op: str
    platform: str
    chosen: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, int | str] = field(default_factory=dict)
    parts: tuple[Explanation, ...] = ()
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.platform}: {self.chosen}"]
        if self.parameters:
            values = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
            lines.append(f"  measured on this device: {values}")
        lines += [f"  not {name}: {why}" for name, why in self.reasons.items()]
        lines += [f"  note: {text}" for text in self.remarks]
        for part in self.parts:
            lines += [f"  {line}" for line in str(part).splitlines()]
        return "\n".join(lines)


def explain(
    op: str | Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any
) -> Explanation:
    """Say which implementation of ``op`` runs for these arguments, and why the others do not.

    Args:
      op: An operation's name (``"flash_attention"``), its public function, or any function or method, which is traced
        (as by ``jax.eval_shape``) to explain each operation in it. A function that communicates over a mesh axis and
        is not called inside ``jax.shard_map`` is traced as on a mesh of one device.
      *args: The arguments the call would get; arrays may be ``jax.ShapeDtypeStruct``.
      platform: ``"cpu"``, ``"cuda"``, ``"rocm"``, ``"tpu"`` …; by default the platform JAX runs on here.
      **kwargs: The keyword arguments the call would get.

    Raises:
      OpValueError, OpTypeError: ``op`` is not an operation and contains none, or the call itself is invalid.
      NoImplementationError: the requested implementation does not support the problem.
    """
    if platform is not None and not isinstance(platform, str):
        raise OpTypeError(f"explain: platform must be a string or None, got {platform!r}")
    if platform is not None and platform not in _PLATFORMS:
        known, hint = ", ".join(_PLATFORMS), did_you_mean(platform, _PLATFORMS)
        raise OpValueError(f"explain: platform must be one of {known}, got {platform!r}.{hint}")
    where = lowering_platform() if platform is None else {"gpu": "cuda"}.get(platform, platform)
    name = op if isinstance(op, str) else getattr(op, "__capibara_op__", None)
    if name is not None:
        found = get_op(name)
        found.check_call(*args, **kwargs)
        return _answer(found, found.prepare(*args, **kwargs)[0], where)
    if not callable(op):
        raise OpTypeError(f"explain: op must be an operation's name or its public function, got {op!r}")
    met, remarks = _traced(op, args, kwargs)
    parts = tuple(dict.fromkeys(_Key(_answer(*each, where)) for each in met))
    return _whole(op, where, tuple(part.answer for part in parts), tuple(dict.fromkeys(remarks)))


@dataclass(frozen=True, eq=False)
class _Key:
    """An explanation that is equal to another one if it reads the same."""

    answer: Explanation

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and str(self.answer) == str(other.answer)

    def __hash__(self) -> int:
        return hash(str(self.answer))


def _answer(op: Op, problem: Any, platform: str) -> Explanation:
    choice = op.select(problem, platform)
    return Explanation(
        op.name,
        platform,
        choice.implementation.name,
        MappingProxyType(choice.reasons),
        MappingProxyType(choice.parameters),
        remarks=tuple(choice.implementation.remarks(problem)),
    )


def _whole(
    function: Callable[..., Any], platform: str, parts: tuple[Explanation, ...], remarks: tuple[str, ...]
) -> Explanation:
    inner = function.func if isinstance(function, functools.partial) else function
    name = getattr(inner, "__name__", type(inner).__name__)
    if not parts:
        if not str(getattr(inner, "__module__", "")).startswith("capibara."):
            raise OpTypeError(
                f"explain: {name} runs no operation of capibara.ops; op must be an operation's name, its public "
                f"function, or a function that runs some. Registered: {', '.join(sorted(list_ops()))}."
            )
        return Explanation(name, platform, "xla", remarks=remarks)
    chosen = ", ".join(dict.fromkeys(part.chosen for part in parts))
    return Explanation(name, platform, chosen, parts=parts, remarks=remarks)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _traced(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[tuple[Op, Any]], list[str]]:
    """Every operation and problem that ``function`` of these arguments meets, and the remarks of others."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def call(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        args, kwargs = jax.tree.unflatten(tree, filled)
        result = function(*args, **kwargs)
        return [x for x in jax.tree.leaves(result) if _is_array(x)]

    arrays = [leaves[i] for i in places]
    # A name of its own, bound around the trace: functions inside that are compiled with `jax.jit` and were traced
    # before are traced again, or the operations in them would not be met.
    fresh = f"capibara explain {next(_calls)}"
    met: list[tuple[Op, Any]] = []
    remarks: list[str] = []
    with recording(lambda op, problem: met.append((op, problem)), remarks):
        try:
            jax.make_jaxpr(call, axis_env=[(fresh, 1)])(*arrays)
        except (OpValueError, NameError):
            axes = _axes(function, args, kwargs, fresh)
            if axes is None or not jax.sharding.get_abstract_mesh().empty:
                raise
            met.clear()
            remarks.clear()
            mesh = jax.sharding.AbstractMesh((1,) * len(axes), axes)
            every = PartitionSpec()
            alone = jax.shard_map(call, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
            jax.make_jaxpr(alone)(*arrays)
    return met, remarks


def _axes(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], fresh: str
) -> tuple[str, ...] | None:
    """The mesh axes that the arguments name; None if the function takes no ``axis_name``."""
    try:
        found = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    if "axis_name" not in found.signature.parameters:
        return None
    given = found.arguments.get("axis_name")
    return (fresh,) if given is None else (given,) if isinstance(given, str) else tuple(given)
