"""The validated, frozen description of a cross-entropy loss."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import did_you_mean
from capibara.ops.checks import check_softcap
from capibara.ops.collective.placement import bound_axis, check_axis_name
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError

__all__ = ["LAYOUTS", "REDUCTIONS", "LossProblem", "prepare"]

OP = "cross_entropy"
LAYOUTS = ("fv", "vf")
REDUCTIONS = ("mean", "sum", "none")
_FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class LossProblem:
    """``hidden [*batch, features]`` scored against ``vocab`` columns or rows of a head.

    ``dtype`` is that of the products' operands. ``vocab`` is the number on this device, if the vocabulary is sharded
    over the mesh axes ``axes``, which have ``shards`` devices.
    """

    batch: tuple[int, ...]
    features: int
    vocab: int
    dtype: str
    layout: str
    reduction: str
    softcap: float | None
    label_smoothing: float
    z_loss: float
    ignore_index: int
    axes: tuple[str, ...]
    shards: int
    chunk_size: int | None
    implementation: str

    @property
    def tokens(self) -> int:
        return math.prod(self.batch)

    @property
    def wide(self) -> str:
        """The dtype of logits and sums."""
        return str(jnp.promote_types(self.dtype, "float32"))


def _array(name: str, array: Any, rank: int, form: str) -> tuple[int, ...]:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise OpTypeError(f"{OP}: {name} must be an array, got {type(array).__name__}")
    shape = tuple(array.shape)
    if len(shape) < rank:
        raise OpShapeError(f"{OP}: {name} must be {form}, got shape {shape}")
    return shape


def _float(name: str, array: Any) -> None:
    if str(array.dtype) not in _FLOATS:
        raise OpTypeError(
            f"{OP}: {name} must be {', '.join(_FLOATS[:-1])} or {_FLOATS[-1]}, got {array.dtype}. "
            f"Remedy: {name}.astype('float32')."
        )


def _fraction(name: str, value: Any, high: float, says: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise OpTypeError(f"{OP}: {name} must be a Python number, got {value!r}")
    number = float(value)
    if not 0 <= number < high:
        raise OpValueError(f"{OP}: {name} must be {says}, got {value!r}")
    return number


def _word(name: str, value: Any, options: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in options:
        error = OpValueError if isinstance(value, str) else OpTypeError
        raise error(
            f"{OP}: {name} must be {', '.join(map(repr, options))}; got {value!r}.{did_you_mean(str(value), options)}"
        )
    return value


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise OpTypeError(f"{OP}: {name} must be an int, got {value!r} of type {type(value).__name__}")
    return int(value)


def prepare(
    hidden: Any,
    head: Any,
    labels: Any,
    *,
    weights: Any = None,
    layout: str = "fv",
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    axis_name: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
    implementation: str = "auto",
) -> tuple[LossProblem, tuple[Any, ...]]:
    """Check a call of ``cross_entropy``; return its problem and its arrays."""
    shape = _array("hidden", hidden, 1, "[..., features]")
    _float("hidden", hidden)
    _word("layout", layout, LAYOUTS)
    form = "[features, vocab]" if layout == "fv" else "[vocab, features]"
    scored = _array("head", head, 2, form)
    _float("head", head)
    if len(scored) != 2:
        raise OpShapeError(f"{OP}: head must be {form}, got shape {scored}")
    features, vocab = scored if layout == "fv" else scored[::-1]
    if features != shape[-1]:
        other = LAYOUTS[layout == "fv"]
        hint = f" Remedy: layout={other!r}." if vocab == shape[-1] else ""
        raise OpShapeError(
            f"{OP}: head must be {form} with the features of hidden {shape}, {shape[-1]}; got shape {scored} with "
            f"layout={layout!r}.{hint}"
        )
    if vocab == 0:
        raise OpShapeError(f"{OP}: head {scored} has no vocabulary to score")
    _array("labels", labels, 0, "[...]")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise OpTypeError(
            f"{OP}: labels must be integers, got {labels.dtype}. Remedy: labels.astype('int32')."
        )
    if tuple(labels.shape) != shape[:-1]:
        raise OpShapeError(
            f"{OP}: labels must be {shape[:-1]} for hidden {shape}, got shape {tuple(labels.shape)}"
        )
    if weights is not None:
        _array("weights", weights, 0, "[...]")
        _float("weights", weights)
        if tuple(weights.shape) != shape[:-1]:
            raise OpShapeError(
                f"{OP}: weights must be {shape[:-1]} for hidden {shape}, got shape {tuple(weights.shape)}"
            )
    ignored = _integer("ignore_index", ignore_index)
    if not np.iinfo(np.int32).min <= ignored <= np.iinfo(np.int32).max:
        raise OpValueError(f"{OP}: ignore_index must be an integer of 32 bits, got {ignored}")
    if chunk_size is not None and _integer("chunk_size", chunk_size) < 1:
        raise OpValueError(f"{OP}: chunk_size must be at least 1 token, got {chunk_size}")
    axes = check_axis_name(OP, axis_name, "a vocabulary that is not sharded")
    shards = 1
    if axes is not None:
        bound_axis(OP, axes, needed=True)
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        shards = math.prod(jax.lax.axis_size(axis) for axis in axes)
    problem = LossProblem(
        batch=shape[:-1],
        features=int(features),
        vocab=int(vocab),
        dtype=str(jax.dtypes.canonicalize_dtype(jnp.promote_types(hidden.dtype, head.dtype))),
        layout=layout,
        reduction=_word("reduction", reduction, REDUCTIONS),
        softcap=check_softcap(OP, softcap),
        label_smoothing=_fraction("label_smoothing", label_smoothing, 1.0, "at least 0 and below 1"),
        z_loss=_fraction("z_loss", z_loss, math.inf, "finite and at least 0"),
        ignore_index=ignored,
        axes=axes or (),
        shards=shards,
        chunk_size=None if chunk_size is None else int(chunk_size),
        implementation=implementation,
    )
    return problem, (hidden, head, labels, weights)
