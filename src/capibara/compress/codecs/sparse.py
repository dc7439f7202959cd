"""A tensor with zeros: a bitmap of the nonzero elements, and their values.

Without settings this is exact, for tensors that are already sparse. With a ``density`` or a ``pattern`` such as 2:4,
the least important elements are set to zero first. Without data those are the smallest. With the second moments S =
E[x xᵀ] of the layer's inputs (``hessian``), importance is |W| times the root of S's diagonal, compared within each
output (M. Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", 2023), and the error that
a zero causes in the output is compensated in the following elements, column by column, (E. Frantar and D. Alistarh,
"SparseGPT", 2023): the same recursion as GPTQ's, with the Cholesky factor of S⁻¹. The scores are then those of the
recursion, w² / U_jj², which also account for how well later inputs can replace each one.

The bitmap is encoded losslessly, at about the entropy of its density (for 2:4, log₂ 6 / 4 = 0.65 bits per element).
The values are stored by another codec: ``"lossless"``, or ``"uniform"`` with a ``step``. For file size alone,
``"uniform"`` is better at every size, since it hardly stores what it rounds to zero; sparse tensors serve hardware
and kernels that skip zeros, for which :meth:`Sparse.parts` returns bitmap and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.codecs.in_place import InPlace
from capibara.compress.codecs.matrices import BLOCK, InOrder, check_axes, get_axes, get_number, sides
from capibara.compress.codecs.nested import (
    Part,
    check_codec,
    check_size,
    join_into,
    may_hold,
    room_for_head,
    split,
)
from capibara.compress.codecs.pruning import choose, get_pattern, nonzero
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import NumberFormat, get_format

__all__ = ["SPARSE", "Sparse", "SparseParts", "candidates"]

_SETTINGS = (
    "density",
    "pattern",
    "step",
    "values",
    "value_settings",
    "hessian",
    "input_axes",
    "damping",
    "refit",
)


@dataclass(frozen=True)
class SparseParts:
    """The parts of a sparse tensor.

    Attributes:
      mask: bool [out, features], where a value is kept.
      values: the kept ones, as unsigned integers of the tensor's width [kept], in the order of the mask's rows.
      axes: the tensor's axes along which its features run.
    """

    mask: np.ndarray
    values: np.ndarray
    axes: tuple[int, ...]

    def compact(self) -> tuple[np.ndarray, np.ndarray]:
        """Values and their columns, both [out, kept per row], in the form that 2:4 kernels and gathers use.

        Raises:
          CompressError: rows keep different numbers of values.
        """
        counts = self.mask.sum(1)
        if len(counts) and (counts != counts[0]).any():
            raise CompressError(
                f"mask: rows keep {counts.min()} to {counts.max()} values, expected as many in each (a pattern)"
            )
        columns = np.nonzero(self.mask)[1]
        return self.values.reshape(len(counts), -1), columns.reshape(len(counts), -1)


class Sparse(InPlace):
    """The codec ``"sparse"``.

    Settings, all of them optional:
      density: the share of elements that are kept, in 0 … 1.
      pattern: ``"2:4"`` or another ``"n:m"``: of every m consecutive features, at most n are kept.
      values: the codec of the kept values; by default ``"uniform"`` with a step, otherwise ``"lossless"``.
      step: of ``"uniform"``.
      value_settings: of another codec.
      hessian: E[x xᵀ] ``[features, features]`` of the layer's inputs.
      refit: whether kept elements compensate for zeros, ``True`` by default; only with a hessian.
      damping: the share of the mean of the diagonal that is added to it; 0.01 by default.
      input_axes: the axes of the features; the last of a matrix, all but the first of other tensors by default.

    Attributes:
      calibrated: a hessian is used.
    """

    calibrated = True

    def encode_into(
        self,
        out: np.ndarray,
        bits: np.ndarray,
        form: NumberFormat,
        shape: tuple[int, ...],
        settings: Mapping[str, Any],
    ) -> int:
        """As :meth:`encode`, into a buffer of :meth:`size_bound` bytes; returns the number of bytes used.

        Raises:
          CompressError: unknown settings; integers, NaN or infinity, unless values are lossless.
        """
        for name in settings:
            if name not in _SETTINGS:
                raise CompressError(f"{name}: is not a setting of sparse, which has {', '.join(_SETTINGS)}")
        axes = get_axes(settings, shape)
        density, pattern = get_number(settings, "density", 0.0, 1.0), get_pattern(settings)
        if density is not None and pattern is not None:
            raise CompressError("density: got one and a pattern too, expected one of them")
        matrix = InOrder(bits, shape, axes)
        if density is None and pattern is None:
            for name in ("hessian", "refit", "damping"):
                if name in settings:
                    raise CompressError(
                        f"{name}: got one without a density or a pattern, which it would serve"
                    )
            choice = nonzero(matrix)
        else:
            choice = choose(bits, matrix, form, sides(shape, axes), density, pattern, settings)
        bitmap = np.empty(-(-matrix.size // 8), np.uint8)
        kept = np.empty(choice.kept, form.unsigned)
        at = end = 0
        for numbers, mask in choice.blocks:
            packed = np.packbits(mask, bitorder="little")
            bitmap[at : at + len(packed)] = packed
            at += len(packed)
            some = numbers[mask]
            kept[end : end + len(some)] = some
            end += len(some)
        codec, inner = _value_codec(settings)
        if each := _kept_of_each(bitmap, *sides(shape, axes), choice.kept):
            kept = kept.reshape(-1, each)  # the coder tells rows of different scale apart
        first = (bitmap, get_format("U8"), "lossless", {})
        size = join_into(out, {"axes": axes}, [first, (kept, form, codec, inner)])
        check_size(size, math.prod(shape), CompressError)
        return size

    def decode_into(
        self,
        out: np.ndarray,
        payload: memoryview,
        form: NumberFormat,
        shape: tuple[int, ...],
        settings: Mapping[str, Any],
    ) -> None:
        """As :meth:`decode`, into an existing array [count]."""
        bitmap, values, axes = _open(payload, form, shape)
        matrix, kept = InOrder(out, shape, axes), math.prod(values.shape)
        # Values lie where the numbers come to be, at the end: each is read before a number takes its place.
        numbers = out[out.size - kept :] if matrix.is_plain else np.empty(kept, form.unsigned)
        values.bits_into(numbers)
        at = 0
        for start, mask in _masks(bitmap, matrix.size):
            some = int(np.count_nonzero(mask))
            block = np.zeros(len(mask), form.unsigned)
            block[mask] = numbers[at : at + some]
            matrix.put(start, block)
            at += some

    def parts(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> SparseParts:
        """Bitmap and values, without filling in the zeros.

        Raises:
          DamagedError: the payload is not what :meth:`encode` writes for this type and shape.
        """
        bitmap, values, axes = _open(payload, form, shape)
        mask = np.unpackbits(bitmap, count=math.prod(shape), bitorder="little").view(bool)
        return SparseParts(mask.reshape(sides(shape, axes)), values.bits(), axes)

    def may_hold(self, size: int, form: NumberFormat, count: int) -> bool:
        """Whether ``size`` payload bytes can hold ``count`` elements; checked before decoding."""
        return may_hold(size, count)

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        from capibara.compress.codecs.protocol import get_codec

        codec, inner = _value_codec(settings)
        return get_codec(codec).size_bound(form, count, inner) + -(-count // 8) + 1 + room_for_head()

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        exact = all(settings.get(name) is None for name in ("density", "pattern"))
        return 0.0 if exact and _value_codec(settings)[0] == "lossless" else None


SPARSE = Sparse()


def _open(
    payload: memoryview, form: NumberFormat, shape: tuple[int, ...]
) -> tuple[np.ndarray, Part, tuple[int, ...]]:
    """The bitmap uint8 [ceil(count / 8)], the values, and the axes of the features."""
    count = math.prod(shape)
    check_size(len(payload), count)
    head, (first, values) = split(payload, 2, count + -(-count // 8))
    axes = check_axes(head.get("axes"), shape)
    if first.form.name != "U8" or first.shape != (-(-count // 8),) or values.form != form:
        raise DamagedError("a sparse tensor's bitmap does not fit its shape: the file is damaged")
    bitmap = first.bits()
    kept = sum(int(np.count_nonzero(mask)) for _, mask in _masks(bitmap, bitmap.size * 8))
    if (count % 8 and bitmap[-1] >> (count % 8)) or kept != math.prod(values.shape):
        raise DamagedError("a sparse tensor's bitmap does not fit its values: the file is damaged")
    return bitmap, values, axes


def _masks(bitmap: np.ndarray, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Where blocks of a bitmap begin, and their flags as bool."""
    for start in range(0, count, BLOCK):
        some = min(BLOCK, count - start)
        packed = bitmap[start // 8 : -(-(start + some) // 8)]
        yield start, np.unpackbits(packed, count=some, bitorder="little").view(bool)


def _kept_of_each(bitmap: np.ndarray, rows: int, features: int, kept: int) -> int:
    """How many values each row keeps, if all keep as many, and any; else 0."""
    each, odd = divmod(kept, max(rows, 1))
    if odd or not each:
        return 0
    before = 0
    for start, mask in _masks(bitmap, rows * features):
        ends = np.arange(
            features - start % features, len(mask) + 1, features
        )  # after rows that end in this block
        sums = np.cumsum(mask, dtype=np.int64)
        if (before + sums[ends - 1] != each * ((start + ends) // features)).any():
            return 0
        before += int(sums[-1])
    return each


def _value_codec(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    step, inner = settings.get("step"), settings.get("value_settings")
    codec = settings.get("values", "lossless" if step is None else "uniform")
    if (codec == "uniform") != (step is not None) or (codec == "uniform" and inner):
        raise CompressError(
            f"values: got {codec!r} with step={step!r} and value_settings={inner!r}: a step belongs to 'uniform', "
            "value_settings to the other codecs"
        )
    check_codec(codec)
    return codec, {"step": step} if codec == "uniform" else dict(inner or {})


def candidates(form: NumberFormat, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Useful settings, from large payloads to small ones; empty if the tensor is not a floating-point matrix."""
    if not form.is_float or len(shape) < 2 or math.prod(shape) < 256:
        return []
    out: list[dict[str, Any]] = [{"density": d} for d in (0.9, 0.75, 0.5, 0.35, 0.25)]
    if shape[-1] % 4 == 0 and len(shape) == 2:
        out.insert(2, {"pattern": "2:4"})
    return out
