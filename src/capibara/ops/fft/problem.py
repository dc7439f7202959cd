"""The validated, frozen description of a Fourier transform."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from capibara.errors import did_you_mean
from capibara.ops.collective import placement
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.tuning import Tuned

__all__ = ["FFTProblem", "alike_in_speed", "check_flag", "is_pair", "prepare"]

NAME = "radix_optimized_fft"
PRECISIONS = ("bfloat16", "float32", "float64")
NORMS = ("backward", "ortho", "forward")


@dataclass(frozen=True)
class FFTProblem:
    """Transforms of ``lengths`` over ``axes`` of arrays of ``shape``, which are cropped or padded to ``lengths``.

    Attributes:
      shape: Of the array that is given.
      axes: The dimensions to transform; of a real transform the last one is the one whose spectrum is halved.
      lengths: Of the signal (not of its half spectrum), one for each of ``axes``.
      form: ``"real"`` or ``"complex"`` array, or ``"pair"``: real and imaginary part in arrays of their own.
      dtype: The real dtype of the input's parts.
      precision: What the factors of products are rounded to.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    lengths: tuple[int, ...]
    form: str
    dtype: str
    inverse: bool
    real: bool
    norm: str
    radix_factors: tuple[int, ...] | None
    precision: str
    implementation: str
    most_radix: int | None = None
    """The largest radix that is chosen where none are given."""
    asked: tuple[str, ...] = ()
    """Of the arguments: ``"precision"`` that the signal has not, ``"use_parallel"`` where nothing is split."""
    tuned: Tuned | None = None

    @property
    def wide(self) -> str:
        """The dtype of sums."""
        return "float64" if self.precision == "float64" else "float32"

    @property
    def out_dtype(self) -> str:
        """The real dtype of the result's parts: arrays of complex numbers are of float32 or float64."""
        if self.form == "pair":
            return self.dtype
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def sizes(self) -> tuple[int, ...]:
        """What ``axes`` are cropped or padded to."""
        if self.real and self.inverse:
            return (*self.lengths[:-1], self.lengths[-1] // 2 + 1)
        return self.lengths

    @property
    def out_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        for axis, n in zip(self.axes, self.lengths, strict=True):
            shape[axis] = n
        if self.real and not self.inverse:
            shape[self.axes[-1]] = self.lengths[-1] // 2 + 1
        return tuple(shape)

    @property
    def scale(self) -> float:
        """What the sums are multiplied with."""
        total = 1
        for n in self.lengths:
            total *= n
        if self.norm == "ortho":
            return total**-0.5
        return 1 / total if (self.norm == "backward") == self.inverse else 1.0


def alike_in_speed(problem: FFTProblem) -> dict[str, int | str] | None:
    """What determines which radices are fast; None if the caller specified them, or there is nothing to transform.

    A length counts as it is, since neighbours have different divisors; pairs and complex numbers count as one.
    """
    if problem.radix_factors is not None or 0 in problem.shape:
        return None
    rows = math.prod(n for axis, n in enumerate(problem.shape) if axis not in problem.axes)
    return {
        "rows": rows,
        "lengths": "x".join(map(str, problem.lengths)),
        "last": str(len(problem.shape) - 1 in problem.axes),
        "kind": ("real" if problem.real else "complex") + ("_inverse" if problem.inverse else ""),
        "precision": problem.precision,
    }


def is_pair(signal: Any) -> bool:
    return isinstance(signal, tuple | list)


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OpTypeError(f"{NAME}: {name} must be True or False, got {value!r}")
    return value


def _check_arrays(signal: Any, wants_real: bool) -> tuple[tuple[Any, ...], str, str]:
    """The arrays, their form and the real dtype of their parts."""
    parts = tuple(signal) if is_pair(signal) else (signal,)
    if is_pair(signal) and len(parts) != 2:
        raise OpTypeError(
            f"{NAME}: signal must be an array or a pair (real part, imaginary part), got {len(parts)} parts"
        )
    for part in parts:
        if not hasattr(part, "shape") or not hasattr(part, "dtype"):
            raise OpTypeError(
                f"{NAME}: signal must be an array or a pair (real part, imaginary part) of arrays, got "
                f"{type(part).__name__}"
            )
        if not (jnp.issubdtype(part.dtype, jnp.number) or part.dtype == bool):
            raise OpTypeError(f"{NAME}: signal must hold numbers, got {part.dtype}")
    dtypes = [jax.dtypes.canonicalize_dtype(part.dtype) for part in parts]
    if len(parts) == 2:
        if any(not jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes) or dtypes[0] != dtypes[1]:
            raise OpTypeError(
                f"{NAME}: the parts of signal must have one floating-point dtype, got {dtypes[0]} and {dtypes[1]}"
            )
        if tuple(parts[0].shape) != tuple(parts[1].shape):
            raise OpShapeError(
                f"{NAME}: the parts of signal must have one shape, got {tuple(parts[0].shape)} and "
                f"{tuple(parts[1].shape)}"
            )
        form = "pair"
    else:
        form = "complex" if jnp.issubdtype(dtypes[0], jnp.complexfloating) else "real"
    if wants_real and form != "real":
        raise OpTypeError(
            f"{NAME}: real=True needs a signal of real numbers, got {'a pair' if form == 'pair' else dtypes[0]}. "
            f"Remedy: its real part, or real=False."
        )
    dtype = dtypes[0]
    if form == "complex":
        dtype = jnp.finfo(dtype).dtype
    elif not jnp.issubdtype(dtype, jnp.floating):
        dtype = jax.dtypes.canonicalize_dtype(jnp.promote_types(dtype, jnp.float32))
    return parts, form, str(dtype)


def whole(name: str, value: Any) -> tuple[int, ...]:
    """One integer or several, as a tuple."""
    if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, Tracer):
        value = np.asarray(value).tolist()
    row = (value,) if isinstance(value, numbers.Integral) else value
    good = isinstance(row, Sequence) and not isinstance(row, str) and not isinstance(value, bool)
    if not good or any(isinstance(n, bool) or not isinstance(n, numbers.Integral) for n in row):
        raise OpTypeError(f"{NAME}: {name} must be an integer or several of them, got {value!r}")
    return tuple(int(n) for n in row)


def _check_axes(axis: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    axes = whole("axis", axis)
    if not axes:
        raise OpValueError(f"{NAME}: axis needs at least one dimension of signal, got {axis!r}")
    for each in axes:
        if not -len(shape) <= each < len(shape):
            raise OpShapeError(f"{NAME}: axis must be of the dimensions of signal {shape}, got {each}")
    axes = tuple(each % len(shape) for each in axes)
    if len(set(axes)) < len(axes):
        raise OpValueError(f"{NAME}: axis must name each dimension once, got {axis!r}")
    return axes


def _check_lengths(length: Any, axes: tuple[int, ...], shape: tuple[int, ...], half: bool) -> tuple[int, ...]:
    if length is None:
        lengths = [shape[axis] for axis in axes]
        if half:
            lengths[-1] = 2 * (lengths[-1] - 1)
    else:
        lengths = whole("length", length)
        if len(lengths) != len(axes):
            raise OpValueError(
                f"{NAME}: length must have a number for each of the {len(axes)} axes, got {length!r}"
            )
    if min(lengths) < 1:
        raise OpShapeError(
            f"{NAME}: a transform needs at least one number, got lengths {tuple(lengths)} for axes {axes} of "
            f"signal {shape}{' (2 · (size - 1): say length=1 for one number)' if half and not length else ''}"
        )
    return tuple(lengths)


def _check_factors(factors: Any) -> tuple[int, ...] | None:
    if factors is None:
        return None
    row = whole("radix_factors", factors)
    if not row or min(row) < 2:
        raise OpValueError(f"{NAME}: radix_factors must be integers of at least 2, got {factors!r}")
    if max(row) > 1024:
        raise OpValueError(
            f"{NAME}: radix_factors must be at most 1024 (each is a matrix of its square), got {factors!r}"
        )
    return row


def _check_precision(precision: Any, dtype: str) -> str:
    if precision is None:
        return "float32" if dtype == "float16" else dtype
    name = precision
    if not isinstance(precision, str):
        try:
            name = str(jnp.dtype(precision))
        except TypeError:
            raise OpTypeError(
                f"{NAME}: precision must be one of {', '.join(PRECISIONS)} or None, got {precision!r}"
            ) from None
    if name not in PRECISIONS:
        raise OpValueError(
            f"{NAME}: precision must be one of {', '.join(PRECISIONS)} or None, got {precision!r}."
            f"{did_you_mean(name, PRECISIONS)}"
        )
    if name == "float64" and dtype != "float64":
        raise OpValueError(
            f"{NAME}: precision='float64' needs a signal of 64 bits, got {dtype} parts (JAX makes them so where "
            f"jax_enable_x64 is off)"
        )
    return name


def _asked(precision: Any, dtype: str, use_parallel: bool, axis_name: Any, signal: Any) -> tuple[str, ...]:
    asked = ["precision"] if precision is not None and _check_precision(precision, dtype) != dtype else []
    if use_parallel:
        names = placement.check_axis_name(NAME, axis_name)
        bound = placement.bound_axis(NAME, names, needed=False)
        if bound is not None:
            alone = lax.axis_size(bound) == 1
        elif isinstance(signal, Tracer):
            alone = False  # where it lies is for XLA to say
        else:
            alone = names is None and not isinstance(getattr(signal, "sharding", None), NamedSharding)
        asked += ["use_parallel"] if alone else []
    return tuple(asked)


def prepare(
    signal: Any,
    radix_factors: Any = None,
    use_parallel: Any = False,
    precision: Any = None,
    *,
    axis: Any = -1,
    length: Any = None,
    inverse: Any = False,
    real: Any = False,
    norm: Any = "backward",
    axis_name: Any = None,
    split_axis: Any = None,
    implementation: str = "auto",
) -> tuple[FFTProblem, tuple[Any, ...]]:
    """Validate a call; return its problem for a signal on one device, and its arrays."""
    del split_axis  # of the distribution, which leads to problems of its own
    check_flag("use_parallel", use_parallel)
    inverse, real = check_flag("inverse", inverse), check_flag("real", real)
    arrays, form, dtype = _check_arrays(signal, real and not inverse)
    shape = tuple(arrays[0].shape)
    if not shape:
        raise OpShapeError(f"{NAME}: signal must have at least one dimension, got a single number")
    if not isinstance(norm, str) or norm not in NORMS:
        raise OpValueError(
            f"{NAME}: norm must be one of {', '.join(NORMS)}, got {norm!r}.{did_you_mean(str(norm), NORMS)}"
        )
    axes = _check_axes(axis, shape)
    problem = FFTProblem(
        shape=shape,
        axes=axes,
        lengths=_check_lengths(length, axes, shape, real and inverse),
        form=form,
        dtype=dtype,
        inverse=inverse,
        real=real,
        norm=norm,
        radix_factors=_check_factors(radix_factors),
        precision=_check_precision(precision, dtype),
        implementation=implementation,
        asked=_asked(precision, dtype, use_parallel, axis_name, arrays[0]),
    )
    return problem, arrays
