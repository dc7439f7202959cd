"""A tensor with zeros: a bitmap of what is not zero, and those values.

With no settings this is exact, for tensors that are sparse already. With a ``density`` or a ``pattern`` such as 2:4
the least important numbers are made zero first. Without data those are the smallest. With the second moments S = E[x
xᵀ] of the layer's inputs (``hessian``), importance is |W| times the root of S's diagonal, compared within each output
(M. Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", 2023), and what a zero adds to
the output's error is put right in the numbers after it, column by column, as far as they can (E. Frantar and D.
Alistarh, "SparseGPT", 2023): the same recursion as GPTQ's, by the Cholesky factor of S⁻¹. Scores are then those of
that recursion, w² / U_jj², which weigh also how well the later inputs stand in for each.

The bitmap is coded losslessly, at about the entropy of its density (of 2:4, log₂ 6 / 4 = 0.65 bits a number). The
values go through another codec: ``"lossless"``, or ``"uniform"`` with a ``step``. For files alone, rounding by
``"uniform"`` is better at every size, since what it rounds to zero it hardly stores; zeros at given places serve
hardware and kernels that skip them, for which :meth:`Sparse.parts` hands out bitmap and values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.calibration.activations import as_matrix, from_matrix
from capibara.compress.codecs.matrices import (
    check_axes,
    finite_matrix,
    get_axes,
    get_hessian,
    get_number,
    sides,
)
from capibara.compress.codecs.nested import check_size, join, part_of, split
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import NumberFormat, from_float, get_format

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
_BLOCK = 128  # columns whose zeros are chosen together where inputs are known


@dataclass(frozen=True)
class SparseParts:
    """What a sparse tensor is made of.

    Attributes:
      mask: bool [out, features], where a value is kept.
      values: the kept ones, as unsigned integers of the tensor's width [kept], in the order of the mask's rows.
      axes: of the tensor, those along which its features run.
    """

    mask: np.ndarray
    values: np.ndarray
    axes: tuple[int, ...]

    def compact(self) -> tuple[np.ndarray, np.ndarray]:
        """Values and their columns, both [out, kept in each row], as 2:4 kernels and gathers take them.

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


class Sparse:
    """The codec ``"sparse"``.

    Settings, all of them optional:
      density: the share of numbers that are kept, in 0 … 1.
      pattern: ``"2:4"`` or another ``"n:m"``: of each m features that follow one another at most n are kept.
      values: the codec of the kept values; ``"uniform"`` with a step, else ``"lossless"`` by default.
      step: of ``"uniform"``.
      value_settings: of another codec.
      hessian: E[x xᵀ] ``[features, features]`` of the layer's inputs.
      refit: whether kept numbers make up for zeros, ``True`` by default; only with a hessian.
      damping: is added to its diagonal, as a share of the mean of that; 0.01 by default.
      input_axes: the axes of the features; the last of a matrix, all but the first of other tensors by default.
    """

    def encode(
        self, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> bytes:
        """The payload.

        Raises:
          CompressError: settings that are none; for any but lossless values, integers and numbers that are not finite.
        """
        for name in settings:
            if name not in _SETTINGS:
                raise CompressError(f"{name}: is no setting of sparse, which has {', '.join(_SETTINGS)}")
        axes = get_axes(settings, shape)
        density, pattern = get_number(settings, "density", 0.0, 1.0), _pattern(settings)
        if density is not None and pattern is not None:
            raise CompressError("density: got one and a pattern too, expected one of them")
        matrix = np.ascontiguousarray(as_matrix(bits.reshape(shape), axes))
        if density is None and pattern is None:
            for name in ("hessian", "refit", "damping"):
                if name in settings:
                    raise CompressError(
                        f"{name}: got one without a density or a pattern, which it would serve"
                    )
            mask = matrix != 0
        else:
            numbers, mask = _prune(finite_matrix(bits, form, shape, axes), density, pattern, settings)
            if settings.get("hessian") is not None:
                matrix = from_float(numbers if form.bits == 64 else numbers.astype(np.float32), form)
        bitmap = np.packbits(mask.reshape(-1), bitorder="little")
        first = part_of(bitmap, get_format("U8"), "lossless", {}, bits=True)
        codec, inner = _value_codec(settings)
        kept = matrix[mask]
        counts = mask.sum(1)
        if len(counts) and counts[0] and (counts == counts[0]).all():
            kept = kept.reshape(len(counts), -1)  # the coder tells rows of different scale apart
        payload = join({"axes": axes}, [first, part_of(kept, form, codec, inner, bits=True)])
        check_size(len(payload), math.prod(shape), CompressError)
        return payload

    def decode(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> np.ndarray:
        found = self.parts(payload, form, shape, settings)
        matrix = np.zeros(found.mask.shape, form.unsigned)
        matrix[found.mask] = found.values
        return np.ascontiguousarray(from_matrix(matrix, shape, found.axes)).reshape(-1)

    def parts(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> SparseParts:
        """Bitmap and values, without filling in the zeros.

        Raises:
          DamagedError: the payload is not what :meth:`encode` writes for this type and shape.
        """
        count = math.prod(shape)
        check_size(len(payload), count)
        head, (bitmap, values) = split(payload, 2, count + -(-count // 8))
        axes = check_axes(head.get("axes"), shape)
        if bitmap.form.name != "U8" or bitmap.shape != (-(-count // 8),) or values.form != form:
            raise DamagedError("a sparse tensor's bitmap does not fit its shape: the file is damaged")
        flags = np.unpackbits(bitmap.bits(), bitorder="little")
        if flags[count:].any() or int(flags.sum()) != math.prod(values.shape):
            raise DamagedError("a sparse tensor's bitmap does not fit its values: the file is damaged")
        return SparseParts(flags[:count].astype(bool).reshape(sides(shape, axes)), values.bits(), axes)

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        from capibara.compress.codecs.protocol import get_codec

        codec, inner = _value_codec(settings)
        return get_codec(codec).size_bound(form, count, inner) + -(-count // 8) + 1 + (1 << 16)

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        exact = all(settings.get(name) is None for name in ("density", "pattern"))
        return 0.0 if exact and _value_codec(settings)[0] == "lossless" else None


SPARSE = Sparse()


def _pattern(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    given = settings.get("pattern")
    if given is None:
        return None
    kept, _, of = given.partition(":") if isinstance(given, str) else ("", "", "")
    if not (kept.isdecimal() and of.isdecimal() and 0 < int(kept) < int(of) <= 64):
        raise CompressError(f"pattern: got {given!r}, expected how many are kept of how many, such as '2:4'")
    return int(kept), int(of)


def _value_codec(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    step, inner = settings.get("step"), settings.get("value_settings")
    codec = settings.get("values", "lossless" if step is None else "uniform")
    if (codec == "uniform") != (step is not None) or (codec == "uniform" and inner):
        raise CompressError(
            f"values: got {codec!r} with step={step!r} and value_settings={inner!r}: a step belongs to 'uniform', "
            "value_settings to the other codecs"
        )
    return codec, {"step": step} if codec == "uniform" else dict(inner or {})


def _prune(
    matrix: np.ndarray, density: float | None, pattern: tuple[int, int] | None, settings: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The matrix with other numbers where they make up for zeros, and where it is kept."""
    if pattern is not None and matrix.shape[1] % pattern[1]:
        raise CompressError(
            f"pattern: got {settings['pattern']!r} for {matrix.shape[1]} features, expected a multiple of {pattern[1]}"
        )
    hessian, refit = get_hessian(settings, matrix.shape[1]), settings.get("refit")
    if refit is not None and (hessian is None or not isinstance(refit, bool)):
        raise CompressError(f"refit: got {refit!r}, expected True or False beside a hessian")
    if hessian is None:
        scores = np.abs(matrix)
        if pattern is None:
            return matrix, _largest(scores.reshape(1, -1), density or 0.0).reshape(matrix.shape)
        return matrix, _of_groups(scores, *pattern)
    if refit is False:
        scores = np.abs(matrix) * np.sqrt(hessian.diagonal())
        return matrix, _largest(scores, density or 0.0) if pattern is None else _of_groups(scores, *pattern)
    return _prune_and_refit(matrix.copy(), hessian, density or 0.0, pattern)


def _largest(scores: np.ndarray, density: float) -> np.ndarray:
    """The mask of each row's largest scores; of equal ones the first."""
    keep = round(density * scores.shape[1])
    mask = np.zeros(scores.shape, bool)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :keep]
    np.put_along_axis(mask, order, True, axis=1)
    return mask


def _of_groups(scores: np.ndarray, kept: int, of: int) -> np.ndarray:
    groups = scores.reshape(-1, of)
    return _largest(groups, kept / of).reshape(scores.shape)


def _prune_and_refit(
    matrix: np.ndarray, hessian: np.ndarray, density: float, pattern: tuple[int, int] | None
) -> tuple[np.ndarray, np.ndarray]:
    """SparseGPT's sweep, with as many numbers kept in each row."""
    features = matrix.shape[1]
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T  # inverse = upperᵀ · upper
    diagonal = upper.diagonal()
    mask = np.ones(matrix.shape, bool)
    width = _BLOCK if pattern is None else pattern[1] * max(_BLOCK // pattern[1], 1)
    for start in range(0, features, width):
        stop = min(start + width, features)
        if pattern is None:
            scores = (matrix[:, start:stop] / diagonal[start:stop]) ** 2
            # Whole numbers that add up: each row keeps round(density · features) in the end.
            keep = round(density * stop) - round(density * start)
            mask[:, start:stop] = _largest(scores, keep / (stop - start))
        errors = np.zeros((len(matrix), stop - start))
        for j in range(start, stop):
            if pattern is not None and (j - start) % pattern[1] == 0:
                some = slice(j, j + pattern[1])
                mask[:, some] = _of_groups((matrix[:, some] / diagonal[some]) ** 2, *pattern)
            lost = np.where(mask[:, j], 0.0, matrix[:, j]) / diagonal[j]
            matrix[:, j:stop] -= lost[:, None] * upper[j, j:stop]
            errors[:, j - start] = lost
        matrix[:, stop:] -= errors @ upper[start:stop, stop:]
    return matrix, mask


def candidates(form: NumberFormat, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Settings worth trying, from large payloads to small ones; none for what is no matrix of floats."""
    if not form.is_float or len(shape) < 2 or math.prod(shape) < 256:
        return []
    out: list[dict[str, Any]] = [{"density": d} for d in (0.9, 0.75, 0.5, 0.35, 0.25)]
    if shape[-1] % 4 == 0 and len(shape) == 2:
        out.insert(2, {"pattern": "2:4"})
    return out
