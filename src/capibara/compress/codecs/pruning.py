"""Choose the elements of a matrix to set to zero, block by block.

Without data, the ``density`` applies to the whole tensor, so that the elements above a threshold are kept. The
threshold is found by counting: the bits of floats without their signs are ordered by magnitude, so histograms of
sixteen bits at a time locate it. The tensor is neither copied nor sorted. Patterns only involve a few neighbours, and
with the second moments of a layer's inputs each row of the matrix is independent: these are processed in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.codecs.matrices import BLOCK, InOrder, check_finite, get_hessian
from capibara.compress.errors import CompressError
from capibara.compress.formats import NumberFormat, from_float, to_float

__all__ = ["Choice", "choose", "get_pattern", "nonzero"]

_ROWS = 1 << 19  # numbers of the rows that are done together where inputs are known
_TOGETHER = 128  # columns whose zeros are chosen together there
_DIGIT = 16  # bits that are counted at a time


@dataclass(frozen=True)
class Choice:
    """The elements of a matrix to keep.

    Attributes:
      kept: their number.
      blocks: the matrix's elements, in its order, as pairs: bits [count], possibly modified, and bool [count], which
        to keep. The size of all blocks but the last is a multiple of eight.
    """

    kept: int
    blocks: Iterator[tuple[np.ndarray, np.ndarray]]


def nonzero(matrix: InOrder) -> Choice:
    """Keep all nonzero elements."""
    kept = sum(int(np.count_nonzero(block)) for block in matrix.blocks())
    return Choice(kept, ((block, block != 0) for block in matrix.blocks()))


def get_pattern(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """``pattern``: the number to keep, and out of how many."""
    given = settings.get("pattern")
    if given is None:
        return None
    kept, _, of = given.partition(":") if isinstance(given, str) else ("", "", "")
    if not (kept.isdecimal() and of.isdecimal() and 0 < int(kept) < int(of) <= 64):
        raise CompressError(f"pattern: got {given!r}, expected how many are kept of how many, such as '2:4'")
    return int(kept), int(of)


def choose(
    bits: np.ndarray,
    matrix: InOrder,
    form: NumberFormat,
    sides: tuple[int, int],
    density: float | None,
    pattern: tuple[int, int] | None,
    settings: Mapping[str, Any],
) -> Choice:
    """Choose the elements of a floating-point tensor to keep.

    Args:
      bits: the tensor's elements in any order.
      matrix: the same in the order of the matrix.
      form: of them.
      sides: outputs and features of the matrix.
      density: the share to keep; or
      pattern: the number to keep out of how many neighbours.
      settings: ``hessian``, ``damping`` and ``refit``.

    Raises:
      CompressError: integers, NaN or infinity, or invalid settings.
    """
    check_finite(bits, form)
    rows, features = sides
    if pattern is not None and features % pattern[1]:
        raise CompressError(
            f"pattern: got {settings['pattern']!r} for {features} features, expected a multiple of {pattern[1]}"
        )
    hessian, refit = get_hessian(settings, features), settings.get("refit")
    if refit is not None and (hessian is None or not isinstance(refit, bool)):
        raise CompressError(f"refit: got {refit!r}, expected True or False beside a hessian")
    share = density or 0.0
    if hessian is None and pattern is None:
        kept = round(share * matrix.size)
        return Choice(kept, _above(matrix, form, kept))
    kept = rows * (round(share * features) if pattern is None else features // pattern[1] * pattern[0])
    if hessian is None:
        assert pattern is not None
        return Choice(kept, _patterned(matrix, form, *pattern))
    if refit is False:
        weights = np.sqrt(hessian.diagonal())

        def prune(numbers: np.ndarray) -> tuple[None, np.ndarray]:
            scores = np.abs(numbers) * weights
            return None, _largest(scores, share) if pattern is None else _of_groups(scores, *pattern)

        return Choice(kept, _by_rows(matrix, form, sides, prune))
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T  # inverse = upperᵀ · upper
    return Choice(
        kept, _by_rows(matrix, form, sides, lambda numbers: _prune_and_refit(numbers, upper, share, pattern))
    )


def _magnitudes(block: np.ndarray) -> np.ndarray:
    """Floats without their signs, whose bits are in the order of their sizes."""
    return block & block.dtype.type((1 << (block.itemsize * 8 - 1)) - 1)


def _find_smallest(matrix: InOrder, form: NumberFormat, kept: int) -> tuple[int, int]:
    """The magnitude of the smallest of the ``kept`` largest, at least one, and how many of that size are among them."""
    prefix, left, width = 0, kept, min(_DIGIT, form.bits)
    for shift in range(form.bits - width, -1, -width):
        counts = np.zeros(1 << width, np.int64)
        for block in matrix.blocks():
            sizes = _magnitudes(block)
            kind = sizes.dtype.type
            if shift + width < form.bits:
                sizes = sizes[(sizes >> kind(shift + width)) == kind(prefix)]
            digits = (sizes >> kind(shift)) & kind((1 << width) - 1)
            counts += np.bincount(digits.astype(np.int64), minlength=1 << width)
        at_least = counts[::-1].cumsum()
        place = int(np.searchsorted(at_least, left))
        digit = (1 << width) - 1 - place
        left -= int(at_least[place] - counts[digit])
        prefix = prefix << width | digit
    return prefix, left


def _above(matrix: InOrder, form: NumberFormat, kept: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of all numbers the ``kept`` largest stay; of equal ones the first."""
    smallest, left = _find_smallest(matrix, form, kept) if kept else (0, 0)
    for block in matrix.blocks():
        if not kept:
            yield block, np.zeros(block.shape, bool)
            continue
        sizes = _magnitudes(block)
        mask = sizes > sizes.dtype.type(smallest)
        if left:
            equal = np.flatnonzero(sizes == sizes.dtype.type(smallest))[:left]
            mask[equal] = True
            left -= len(equal)
        yield block, mask


def _patterned(
    matrix: InOrder, form: NumberFormat, kept: int, of: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for block in matrix.blocks(max(BLOCK // (8 * of), 1) * 8 * of):
        yield block, _of_groups(np.abs(to_float(block, form)), kept, of)


def _by_rows(
    matrix: InOrder,
    form: NumberFormat,
    sides: tuple[int, int],
    prune: Callable[[np.ndarray], tuple[np.ndarray | None, np.ndarray]],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """``prune`` of float64 [some, features] gives the numbers, if they are other ones now, and the mask."""
    features = max(sides[1], 1)
    for block in matrix.blocks(max(_ROWS // (8 * features), 1) * 8 * features):
        values = to_float(block, form).astype(np.float64).reshape(-1, features)
        changed, mask = prune(values)
        if changed is not None:
            block = from_float(changed if form.bits == 64 else changed.astype(np.float32), form).reshape(-1)
        yield block, mask.reshape(-1)


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
    matrix: np.ndarray, upper: np.ndarray, density: float, pattern: tuple[int, int] | None
) -> tuple[np.ndarray, np.ndarray]:
    """SparseGPT's sweep, with as many numbers kept in each row; ``matrix`` [out, features] is changed."""
    features = matrix.shape[1]
    diagonal = upper.diagonal()
    mask = np.ones(matrix.shape, bool)
    width = _TOGETHER if pattern is None else pattern[1] * max(_TOGETHER // pattern[1], 1)
    for start in range(0, features, width):
        stop = min(start + width, features)
        if pattern is None:
            scores = (matrix[:, start:stop] / diagonal[start:stop]) ** 2
            # Integers that add up: each row keeps round(density · features) in the end.
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
