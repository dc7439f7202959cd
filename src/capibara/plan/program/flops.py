"""Floating-point operations of matrix products and convolutions, from shapes alone.

One multiply-add counts two, one of complex numbers eight. The TPU's compiler turns every matrix product into a
convolution whose windows, dilations and paddings arrange batches and heads as spatial dimensions, so most (window,
output) pairs of such a convolution fall on padding or between the elements of a dilated input and cost nothing. Only
pairs that meet a real element are counted: per spatial dimension, the outputs ``o`` and taps ``k`` for which
``o·stride + k·dilation − padding`` is an element of the input.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

import numpy as np

from capibara.plan.errors import PlanError
from capibara.plan.program.shapes import ArrayShape
from capibara.plan.program.text import Computation, Instruction

__all__ = ["convolution_flops", "instruction_flops", "operand_shape", "real_taps", "tiled_flops"]

_MOST_TAPS = 20_000_000
# A TPU's matrix unit holds 128 × 128 weights, through which rows go in eights.
_TILE, _ROWS = 128, 8


@lru_cache(maxsize=50_000)
def real_taps(size: int, out: int, window: int, stride: int, low: int, base: int, dilation: int) -> int:
    """Pairs (output, tap) of one spatial dimension that meet an element of the input.

    Args:
      size: input elements; ``base`` apart from one another (base dilation), from position 0 on.
      out: outputs, ``stride`` apart.
      window: taps, ``dilation`` apart.
      low: padding before the input (negative: cut off).

    Raises:
      PlanError: a window beyond reason.
    """
    if min(size, out, window) <= 0:
        return 0
    if window > _MOST_TAPS:
        raise PlanError(
            f"the program has a convolution with a window of {window:,} elements; at most {_MOST_TAPS:,}"
        )
    taps = np.arange(window, dtype=np.int64) * dilation - low
    # Outputs o with 0 ≤ o·stride + tap ≤ (size − 1)·base
    first = np.maximum(0, -(taps // stride))
    last = np.minimum(out - 1, ((size - 1) * base - taps) // stride)
    if base == 1:
        return int(np.maximum(0, last - first + 1).sum())
    # … and o·stride + tap a multiple of base.
    common = math.gcd(stride, base)
    step = base // common
    inverse = pow(stride // common, -1, step) if step > 1 else 0
    wanted = (-taps // common % step) * inverse % step if step > 1 else np.zeros_like(taps)
    start = first + (wanted - first) % step
    counts = np.where(last >= start, (last - start) // step + 1, 0)
    return int(counts[taps % common == 0].sum())


_WINDOW = re.compile(r"(\w+)=([-\dx_]+)")


def instruction_flops(instruction: Instruction, computation: Computation) -> int:
    """Floating-point operations of a ``dot`` or ``convolution``, 0 for anything else.

    XLA multiplies and sums where a vector's product with a matrix is too small for the units that multiply matrices:
    such a ``reduce`` counts as the ``dot`` that it was.
    """
    if instruction.opcode not in ("dot", "convolution") and not _was_dot(instruction, computation):
        return 0
    count = {"dot": _dot, "convolution": _convolution}.get(instruction.opcode, _sum_of_products)
    # A multiply-add of complex numbers is four of real ones.
    times = 4 if any(shape.dtype in ("c64", "c128") for shape in instruction.shapes) else 1
    return times * count(instruction, computation)


def tiled_flops(instruction: Instruction, computation: Computation) -> int:
    """Floating-point operations of a ``dot`` or ``convolution`` were its sides multiples of a TPU's tiles.

    The matrix unit multiplies rows by tiles of 128 × 128 (``_TILE``); what is missing to a whole tile is padding, which
    takes as long as data. Of the two sides that may be rows, the one that wastes less is taken for them.
    """
    flops = instruction_flops(instruction, computation)
    if not flops or instruction.opcode == "reduce":  # not the matrix unit's
        return flops
    rows, columns, depth = (_dot_sides if instruction.opcode == "dot" else _convolution_sides)(
        instruction, computation
    )
    if min(rows, columns, depth) <= 0:
        return flops

    def waste(rows: int, columns: int) -> float:
        return _up(rows, _ROWS) / rows * _up(columns, _TILE) / columns

    return round(flops * min(waste(rows, columns), waste(columns, rows)) * _up(depth, _TILE) / depth)


def _up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _dot_sides(instruction: Instruction, computation: Computation) -> tuple[int, int, int]:
    left = operand_shape(instruction, computation, 0)
    right = operand_shape(instruction, computation, 1)
    parts = [
        _indices(instruction.attribute(f"{side}_{kind}_dims"))
        for kind in ("batch", "contracting")
        for side in ("lhs", "rhs")
    ]
    batch, right_batch, contracted, right_contracted = parts
    return (
        math.prod(size for i, size in enumerate(left.dims) if i not in batch + contracted),
        math.prod(size for i, size in enumerate(right.dims) if i not in right_batch + right_contracted),
        math.prod(size for i, size in enumerate(left.dims) if i in contracted),
    )


def _convolution_sides(instruction: Instruction, computation: Computation) -> tuple[int, int, int]:
    _, kernel_labels, labels = re.split("_|->", instruction.attribute("dim_labels"))
    kernel = dict(zip(kernel_labels, operand_shape(instruction, computation, 1).dims, strict=True))
    result = dict(zip(labels, instruction.shapes[0].dims, strict=True))
    spatial = math.prod(size for label, size in result.items() if label.isdigit())
    return result["b"] * spatial, result["f"], kernel["i"]


def operand_shape(instruction: Instruction, computation: Computation, number: int) -> ArrayShape:
    """The shape of an operand that is one array."""
    names = instruction.operands
    source = computation.by_name.get(names[number]) if number < len(names) else None
    shapes = source.shapes if source is not None else ()
    if len(shapes) != 1:
        raise PlanError(
            f"operand {number} of {instruction.name!r} ({instruction.opcode}) is not an array of the program"
        )
    return shapes[0]


def _indices(text: str) -> list[int]:
    return [int(part) for part in text.strip("{}").split(",") if part.strip().isdigit()]


def _dot(instruction: Instruction, computation: Computation) -> int:
    left = operand_shape(instruction, computation, 0)
    contracted = _indices(instruction.attribute("lhs_contracting_dims"))
    if any(index >= len(left.dims) for index in contracted):
        raise PlanError(
            f"{instruction.name!r}: lhs_contracting_dims={contracted} of an array with {left.dims}"
        )
    return (
        2 * sum(shape.elements for shape in instruction.shapes) * math.prod(left.dims[i] for i in contracted)
    )


def _was_dot(instruction: Instruction, computation: Computation) -> bool:
    if instruction.opcode != "reduce" or not instruction.op_name.endswith("dot_general"):
        return False
    source = computation.by_name.get(instruction.operands[0]) if instruction.operands else None
    while source is not None and source.opcode in ("bitcast", "convert", "copy", "transpose", "reshape"):
        source = computation.by_name.get(source.operands[0]) if source.operands else None
    return source is not None and source.opcode == "multiply"


def _sum_of_products(instruction: Instruction, computation: Computation) -> int:
    return 2 * operand_shape(instruction, computation, 0).elements


def _convolution(instruction: Instruction, computation: Computation) -> int:
    left = operand_shape(instruction, computation, 0)
    right = operand_shape(instruction, computation, 1)
    return convolution_flops(instruction, left, right, instruction.shapes[0])


def convolution_flops(
    instruction: Instruction, left: ArrayShape, right: ArrayShape, result: ArrayShape
) -> int:
    """Floating-point operations of the convolution that an instruction's ``dim_labels`` and ``window`` say.

    Raises:
      PlanError: they do not fit the shapes.
    """
    labels = re.fullmatch(r"([0-9a-z?]+)_([0-9a-z?]+)->([0-9a-z?]+)", instruction.attribute("dim_labels"))
    if (
        not labels
        or [len(labels[i]) for i in (1, 2, 3)] != [len(s.dims) for s in (left, right, result)]
        or any(c not in labels[i] for i, needed in ((1, "bf"), (2, "io"), (3, "bf")) for c in needed)
    ):
        raise PlanError(f"{instruction.name!r} is a convolution whose dim_labels do not fit its operands")
    sizes = [dict(zip(labels[i], s.dims, strict=True)) for i, s in ((1, left), (2, right), (3, result))]
    spatial = sorted(c for c in labels[2] if c.isdigit())
    window = dict(_WINDOW.findall(instruction.attribute("window")))

    def listed(key: str, default: str) -> list[str]:
        values = window[key].split("x") if key in window else [default] * len(spatial)
        if len(values) != len(spatial):
            raise PlanError(f"{instruction.name!r}: window={window} for {len(spatial)} spatial dimensions")
        return values

    listed("size", "1")
    strides, pads = listed("stride", "1"), listed("pad", "0_0")
    bases, dilations = listed("lhs_dilate", "1"), listed("rhs_dilate", "1")
    taps = 1
    for label, stride, pad, base, dilation in zip(spatial, strides, pads, bases, dilations, strict=True):
        if not all(label in size for size in sizes):
            raise PlanError(f"{instruction.name!r}: the spatial dimension {label} is not in all its operands")
        try:
            taps *= real_taps(
                sizes[0][label],
                sizes[2][label],
                sizes[1][label],
                max(1, int(stride)),
                int(pad.split("_")[0]),
                max(1, int(base)),
                max(1, int(dilation)),
            )
        except (ValueError, OverflowError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"{instruction.name!r}: window={instruction.attribute('window')[:120]} is not a valid convolution "
                "window"
            ) from None
    groups = re.search(r"batch_group_count=(\d{1,12})", instruction.head)
    # The kernel's input features are those of one feature group already.
    batch = sizes[0]["b"] // max(1, int(groups[1]) if groups else 1)
    return 2 * batch * sizes[1]["i"] * sizes[2]["f"] * taps
