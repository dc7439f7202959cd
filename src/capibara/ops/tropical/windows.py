"""Tropical convolution (grey-scale morphology) and pooling.

A convolution is a tropical matrix product of the kernel with the windows of the input, which are materialised: an
array as many times as large as the input as the kernel has taps. The faster product makes up for the memory.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.explicit import Dims, over_explicit_axes
from capibara.ops.tropical.matmul import OP, matmul
from capibara.ops.tropical.problem import check_array, check_semiring

__all__ = ["conv1d", "conv2d", "pool"]


def _sizes(op: str, name: str, value: Any, count: int) -> tuple[int, ...]:
    row = (value,) * count if isinstance(value, numbers.Integral) else value
    if isinstance(value, bool) or not isinstance(row, Sequence) or isinstance(row, str):
        raise OpTypeError(f"{op}: {name} must be an int or {count} of them, got {value!r}")
    if len(row) != count or not all(isinstance(n, numbers.Integral) and int(n) >= 1 for n in row):
        raise OpValueError(f"{op}: {name} must be {count} ints of at least 1, got {value!r}")
    return tuple(int(n) for n in row)


def _padding(
    op: str, padding: Any, sizes: Sequence[int], taps: Sequence[int], strides: Sequence[int]
) -> list[Any]:
    if isinstance(padding, str) and padding == "VALID":
        return [(0, 0)] * len(sizes)
    if not isinstance(padding, str) or padding != "SAME":
        raise OpValueError(f"{op}: padding must be 'SAME' or 'VALID', got {padding!r}")
    lacks = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(sizes, taps, strides, strict=True)]
    return [(lack // 2, lack - lack // 2) for lack in lacks]


def _conv(
    op: str, x: Any, kernel: Any, strides: Any, padding: Any, semiring: str, implementation: str, n: int
) -> Any:
    OP.check_name(implementation)
    check_array(op, "x", x, 2 + n)
    check_array(op, "kernel", kernel, 2 + n)
    check_semiring(op, semiring)
    if len(x.shape) != 2 + n or len(kernel.shape) != 2 + n or x.shape[1] != kernel.shape[1]:
        raise OpShapeError(
            f"{op}: x must be [batch, in_channels, …{n} sizes] and kernel [out_channels, in_channels, …{n} taps], got "
            f"{tuple(x.shape)} and {tuple(kernel.shape)}"
        )
    taps, steps = tuple(kernel.shape[2:]), _sizes(op, "strides", strides, n)
    if 0 in taps:
        raise OpShapeError(f"{op}: kernel has no taps, its shape is {tuple(kernel.shape)}")
    zero = -jnp.inf if semiring == "max_plus" else jnp.inf
    pads = _padding(op, padding, x.shape[2:], taps, steps)
    padded = jnp.pad(jnp.asarray(x), [(0, 0), (0, 0), *pads], constant_values=zero)
    out = tuple(max((m - k) // s + 1, 0) for m, k, s in zip(padded.shape[2:], taps, steps, strict=True))
    batch, channels = x.shape[:2]
    if 0 in out:
        return jnp.zeros((batch, kernel.shape[0], *out), jnp.promote_types(padded.dtype, kernel.dtype))
    cuts = []
    for at in itertools.product(*map(range, taps)):
        ends = [p + (m - 1) * s + 1 for p, m, s in zip(at, out, steps, strict=True)]
        cuts.append(lax.slice(padded, (0, 0, *at), (batch, channels, *ends), (1, 1, *steps)))
    windows = jnp.stack(cuts, 2).reshape(batch, channels * len(cuts), math.prod(out))
    flat = jnp.asarray(kernel).reshape(kernel.shape[0], channels * len(cuts))
    y = matmul(flat, windows, semiring=semiring, implementation=implementation)
    return y.reshape(batch, kernel.shape[0], *out)


def _laid(x: Dims, kernel: Dims) -> Dims:
    return (*x[:1], *kernel[:1])


@over_explicit_axes("x", "kernel", out=_laid)
def conv1d(
    x: jax.Array,
    kernel: jax.Array,
    *,
    strides: int | Sequence[int] = 1,
    padding: str = "VALID",
    semiring: str = "max_plus",
    implementation: str = "auto",
) -> jax.Array:
    """``out[b, o, t] = max over c, u of x[b, c, t * stride + u] + kernel[o, c, u]``.

    As in neural networks the kernel is not flipped: in ``max_plus`` this is the dilation by the mirrored kernel, and
    in ``min_plus`` with a negated kernel the erosion. Padding is the semiring's zero, which never wins. Infinities,
    NaN, ties and gradients are as in :func:`matmul`; the output of a window that contains NaN is NaN.

    Args:
      x: ``[batch, in_channels, length]``, floating point.
      kernel: ``[out_channels, in_channels, taps]``.
      strides: steps between windows.
      padding: ``"VALID"`` or ``"SAME"`` (as ``lax.conv`` pads).

    Returns:
      ``[batch, out_channels, output length]`` in the common dtype.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    return _conv("tropical.conv1d", x, kernel, strides, padding, semiring, implementation, 1)


@over_explicit_axes("x", "kernel", out=_laid)
def conv2d(
    x: jax.Array,
    kernel: jax.Array,
    *,
    strides: int | Sequence[int] = 1,
    padding: str = "VALID",
    semiring: str = "max_plus",
    implementation: str = "auto",
) -> jax.Array:
    """:func:`conv1d` over two axes: x ``[batch, in_channels, height, width]``, kernel ``[out, in, rows, columns]``."""
    return _conv("tropical.conv2d", x, kernel, strides, padding, semiring, implementation, 2)


# The gradient of a maximum over windows that are sharded themselves is wrong in XLA.
@over_explicit_axes("x", out=lambda x: x[:2], kept={"x": (0, 1)})
def pool(
    x: jax.Array,
    window: int | Sequence[int],
    *,
    strides: int | Sequence[int] | None = None,
    padding: str = "VALID",
    semiring: str = "max_plus",
) -> jax.Array:
    """The maximum (``min_plus``: minimum) of each window over the axes after the first two.

    Equivalent JAX: ``lax.reduce_window(x, -inf, lax.max, (1, 1, *window), (1, 1, *strides), padding)``, whose
    gradient goes to one element per window.

    Args:
      x: ``[batch, channels, *sizes]``, floating point.
      window: one size for all axes, or one each.
      strides: the same; by default the window.
      padding: ``"VALID"`` or ``"SAME"``.

    Raises:
      OpTypeError, OpValueError, OpShapeError: an argument is invalid; the message names it.
    """
    op = "tropical.pool"
    check_array(op, "x", x, 3)
    check_semiring(op, semiring)
    n = len(x.shape) - 2
    sizes = _sizes(op, "window", window, n)
    steps = sizes if strides is None else _sizes(op, "strides", strides, n)
    pads = _padding(op, padding, x.shape[2:], sizes, steps)
    signed = jnp.asarray(x) if semiring == "max_plus" else -jnp.asarray(x)
    out: Any = lax.reduce_window(
        signed, -jnp.inf, lax.max, (1, 1, *sizes), (1, 1, *steps), [(0, 0), (0, 0), *pads]
    )
    return out if semiring == "max_plus" else -out
