"""Convolutions in one, two and three dimensions, and their transposes, by XLA.

Channels come last, which suits TPUs: inputs ``[batch, *sizes, channels]``, filters ``[*taps, channels / groups,
out_channels]``. A transposed convolution is the gradient of a convolution with respect to its inputs: it spaces its
inputs ``strides`` apart, with zeros between them, and convolves the result.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.conv.problem import Pads, check_array, check_precision, explicit_padding, whole_numbers
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.explicit import Dims, over_explicit_axes

__all__ = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]

_AXES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}
_LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def _check(op: str, inputs: Any, filters: Any, groups: Any, n: int) -> None:
    axes = ", ".join(_AXES[n])
    check_array(op, "inputs", inputs, n + 2, f"[batch, {axes}, channels]")
    check_array(op, "filters", filters, n + 2, f"[{n} × taps, channels / groups, out_channels]")
    if isinstance(groups, bool) or not isinstance(groups, numbers.Integral):
        raise OpTypeError(f"{op}: groups must be an integer, got {groups!r}")
    channels, outer = inputs.shape[-1], filters.shape[-1]
    if groups < 1 or channels % groups or outer % groups:
        raise OpValueError(
            f"{op}: groups must divide the {channels} channels of inputs and the {outer} of the output, got {groups}"
        )
    if filters.shape[-2] * groups != channels:
        raise OpShapeError(
            f"{op}: inputs {tuple(inputs.shape)} have {channels} channels, so with groups={groups} filters must have "
            f"{channels // groups} in their last axis but one, got {tuple(filters.shape)}"
        )
    if 0 in filters.shape[:n]:
        raise OpShapeError(f"{op}: filters have no taps, their shape is {tuple(filters.shape)}")


def _is_pair(padding: Any) -> bool:
    return (
        isinstance(padding, Sequence)
        and not isinstance(padding, str)
        and all(isinstance(x, numbers.Integral) for x in padding)
    )


def _transposed(
    pads: Pads, sizes: Sequence[int], taps: Sequence[int], strides: Sequence[int], out: Any
) -> Pads:
    """Zeros around the spread inputs, such that a convolution with ``pads`` leads from the outputs to the inputs."""
    rows = []
    for n, k, s, m, (low, _) in zip(sizes, taps, strides, out, pads, strict=True):
        before = k - 1 - low
        rows.append((before, m + k - 2 - (n - 1) * s - before))
    return tuple(rows)


def _laid_out(inputs: Dims, filters: Dims) -> Dims:
    return (inputs[0], *(None for _ in inputs[1:-1]), filters[-1])


def _convolve(
    op: str,
    n: int,
    transpose: bool,
    inputs: Any,
    filters: Any,
    strides: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    precision: Any,
) -> jax.Array:
    _check(op, inputs, filters, groups, n)
    sizes = tuple(inputs.shape[1:-1])
    steps = whole_numbers(op, "strides", strides, n)
    apart = whole_numbers(op, "dilation", dilation, n)
    taps = tuple((k - 1) * d + 1 for k, d in zip(filters.shape[:n], apart, strict=True))
    if n == 1 and _is_pair(padding):
        padding = (padding,)
    spread = (1,) * n
    if transpose:
        spread = steps
        if padding == "SAME":
            out = tuple(m * s for m, s in zip(sizes, steps, strict=True))
        else:
            out = tuple((m - 1) * s + max(k, s) for m, k, s in zip(sizes, taps, steps, strict=True))
        pads = explicit_padding(op, padding, out, taps, steps)
        if not isinstance(padding, str):
            out = tuple(
                (m - 1) * s + k - low - high
                for m, k, s, (low, high) in zip(sizes, taps, steps, pads, strict=True)
            )
            if min(out) < 0:
                raise OpValueError(
                    f"{op}: padding {padding!r} takes away more than the {sizes} × {steps} outputs"
                )
        pads, steps = _transposed(pads, sizes, taps, steps, out), (1,) * n
    else:
        pads = explicit_padding(op, padding, sizes, taps, steps)
    dtype = jax.dtypes.canonicalize_dtype(jnp.promote_types(inputs.dtype, filters.dtype))
    return lax.conv_general_dilated(
        jnp.asarray(inputs).astype(dtype),
        jnp.asarray(filters).astype(dtype),
        steps,
        pads,
        lhs_dilation=spread,
        rhs_dilation=apart,
        dimension_numbers=_LAYOUTS[n],
        feature_group_count=int(groups),
        precision=check_precision(op, precision),
    )


# XLA's gradients of filters are wrong where windows are sharded, and its values where channels are, too; JAX refuses
# most other layouts.
_by_batch = over_explicit_axes("inputs", "filters", out=_laid_out, kept={"inputs": (0,), "filters": (-1,)})(
    _convolve
)
# Of several groups they are wrong where the batch is sharded: each device computes everything.
_everywhere = over_explicit_axes("inputs", "filters", out=lambda *_: (), kept={"inputs": (), "filters": ()})(
    _convolve
)


@over_explicit_axes("inputs", "filters", "out", out=lambda inputs, filters, _: _laid_out(inputs, filters))
def _as_laid_out(inputs: Any, filters: Any, out: jax.Array) -> jax.Array:
    del inputs, filters
    return out


def _conv(op: str, n: int, transpose: bool, inputs: Any, filters: Any, *options: Any) -> jax.Array:
    """:func:`_convolve`, of arrays of explicit meshes in the form that XLA splits without error."""
    groups = options[3]
    if isinstance(groups, numbers.Integral) and int(groups) > 1:
        out = _everywhere(op, n, transpose, inputs, filters, *options)
        return _as_laid_out(inputs, filters, out)
    return _by_batch(op, n, transpose, inputs, filters, *options)


def conv1d(
    inputs: jax.Array,
    filters: jax.Array,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[int | Sequence[int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """:func:`conv2d` over one axis:
    inputs ``[batch, length, channels]``, filters ``[taps, channels / groups, out_channels]``, padding also one pair.
    """
    return _conv("conv1d", 1, False, inputs, filters, strides, padding, dilation, groups, precision)


def conv2d(
    inputs: jax.Array,
    filters: jax.Array,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[Sequence[int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """Convolve images, by XLA, with strides, dilation and groups.

    Equivalent JAX: ``lax.conv_general_dilated(inputs, filters, strides, padding, rhs_dilation=dilation,
    dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups)``. As in neural networks the filter is not
    flipped. :func:`winograd_conv2d` may be faster where it applies.

    Args:
      inputs: ``[batch, height, width, channels]``, floating point.
      filters: ``[rows, columns, channels / groups, out_channels]``, floating point.
      strides: steps between windows, one for all axes or one each.
      padding: ``"SAME"``, ``"VALID"``, or a pair of integers for each axis: the zeros before and after it.
      dilation: the distance between taps, one for all axes or one each.
      groups: the number of channel groups that are convolved separately; as many groups as channels is a depthwise
        convolution. Arrays of a mesh with explicit axes are then gathered, and each device computes everything: XLA's
        gradient of such filters is wrong where the batch is sharded over some axes of the mesh and not all.
      precision: ``None``, ``"default"``, ``"high"``, ``"highest"`` or a ``jax.lax.Precision``.

    Returns:
      ``[batch, out_height, out_width, out_channels]`` in the operands' common dtype.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    return _conv("conv2d", 2, False, inputs, filters, strides, padding, dilation, groups, precision)


def conv3d(
    inputs: jax.Array,
    filters: jax.Array,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[Sequence[int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """:func:`conv2d` over three axes:
    inputs ``[batch, depth, height, width, channels]``,
    filters ``[planes, rows, columns, channels / groups, out_channels]``.
    """
    return _conv("conv3d", 3, False, inputs, filters, strides, padding, dilation, groups, precision)


def conv_transpose1d(
    inputs: jax.Array,
    filters: jax.Array,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[int | Sequence[int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """:func:`conv_transpose2d` over one axis:
    inputs ``[batch, length, channels]``, filters ``[taps, channels / groups, out_channels]``, padding also one pair.
    """
    return _conv("conv_transpose1d", 1, True, inputs, filters, strides, padding, dilation, groups, precision)


def conv_transpose2d(
    inputs: jax.Array,
    filters: jax.Array,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[Sequence[int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """The transposed convolution of images: inputs spaced ``strides`` apart, then convolved.

    Equivalent JAX: ``lax.conv_transpose(inputs, filters, strides, padding, rhs_dilation=dilation)``, for ``groups=1``
    and padding by name. The filters are not flipped and their channels are not swapped: with flipped and swapped
    filters, it is the gradient of the convolution with these strides and this padding.

    Args:
      inputs: ``[batch, height, width, channels]``, floating point.
      filters: ``[rows, columns, channels / groups, out_channels]``, floating point.
      strides: outputs for one input, one for all axes or one each.
      padding: ``"SAME"``: ``strides`` times as many outputs as inputs; ``"VALID"``: every output that a tap reaches;
        or a pair of integers for each axis, the number of outputs cropped before and after it.
      dilation, groups, precision: as in :func:`conv2d`.

    Returns:
      ``[batch, out_height, out_width, out_channels]`` in the operands' common dtype.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    return _conv("conv_transpose2d", 2, True, inputs, filters, strides, padding, dilation, groups, precision)


def conv_transpose3d(
    inputs: jax.Array,
    filters: jax.Array,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[Sequence[int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array:
    """:func:`conv_transpose2d` over three axes:
    inputs ``[batch, depth, height, width, channels]``,
    filters ``[planes, rows, columns, channels / groups, out_channels]``.
    """
    return _conv("conv_transpose3d", 3, True, inputs, filters, strides, padding, dilation, groups, precision)
