"""Search for the nearest code: in blocks for CPUs, in blocks for other platforms, and all at once.

``|x - e|² = |x|² - 2 x·e + |e|²``, and ``|x|²`` is the same for every code; so the nearest code is the argmin of the
*score* ``|e|² / 2 - x·e``: one matrix product. For the angle it is ``-x·e/|e|``. The score matrix has tokens × codes
entries; blocks never hold more than ``BLOCK_SCORES`` of them.

Far from the origin, ``|e|²`` is large compared with the differences between distances. So both sides are first
shifted by the same vector, a point among the codes. It is on a grid as coarse as the spread of the codes: near the
origin it is 0, elsewhere the codes lose no digits by it, and equal distances stay equal.

NaN and infinity would make products NaN: codes with an infinity get a score of infinity, the first code with NaN wins
every search, and a vector that is not finite is equally far from every code, so the first is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.one_device import on_one_device
from capibara.ops.vq.problem import NearestProblem

__all__ = ["cpu", "reference", "unit", "xla"]

# Scores alive at a time: 1 MiB in float32 on CPUs, which stays near the cores, and 4 MiB elsewhere. Compilers for TPUs
# keep them on the chip; larger blocks only took them longer to compile.
CPU_BLOCK_SCORES = 1 << 18
BLOCK_SCORES = 1 << 20
# A product needs some rows to be fast: with more codes than this they are searched piece by piece.
BLOCK_CODES = 4096

# (problem, half [codes], codebook [codes, dim], vectors [rows, dim]) → lowest score and its lowest index, [rows]
_Best = Callable[[NearestProblem, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def unit(vectors: jax.Array) -> jax.Array:
    """Normalise vectors to length 1; zeros are unchanged, with a gradient of 0."""
    # Scaled first, so that no square over- or underflows. The scale cancels, and so has no gradient.
    most = lax.stop_gradient(jnp.max(jnp.abs(vectors), -1, initial=0, keepdims=True))
    scaled = vectors / jnp.where(most == 0, 1, most)
    square = jnp.sum(scaled * scaled, -1, keepdims=True)
    return scaled / jnp.sqrt(jnp.where(square == 0, 1, square))


def _amid(codes: jax.Array, good: jax.Array) -> jax.Array:
    """A point ``[dim]`` amid the codes that are finite, on a grid as coarse as they are spread; the origin near it."""
    low = jnp.min(jnp.where(good[:, None], codes, jnp.inf), 0)
    high = jnp.max(jnp.where(good[:, None], codes, -jnp.inf), 0)
    _, exponent = jnp.frexp(high - low)
    middle = 0.5 * low + 0.5 * high
    step = jnp.ldexp(jnp.ones_like(middle), exponent)
    shift = jnp.where(high > low, jnp.round(middle / step) * step, middle)
    return jnp.where(jnp.isfinite(shift), shift, 0)


def _codes(problem: NearestProblem, codebook: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Half the squares of the codes (0 for angles), the codes, the first with NaN (or -1), what they were moved by."""
    wide = codebook.astype(problem.wide)
    nan = jnp.any(jnp.isnan(wide), 1)
    first = jnp.where(jnp.any(nan), jnp.argmax(nan).astype(jnp.int32), -1)
    good = jnp.all(jnp.isfinite(wide), 1)
    wide = jnp.where(good[:, None], wide, 0)
    if problem.metric == "cosine":
        return (
            jnp.where(good, 0, jnp.inf).astype(wide.dtype),
            unit(wide),
            first,
            jnp.zeros(problem.dim, wide.dtype),
        )
    shift = _amid(wide, good)
    wide = jnp.where(good[:, None], wide - shift, 0)
    return jnp.where(good, 0.5 * jnp.sum(wide * wide, 1), jnp.inf), wide, first, shift


def _settled(
    problem: NearestProblem, vectors: jax.Array, index: jax.Array, first_nan: jax.Array
) -> jax.Array:
    """The index, with what holds for vectors and codes that are not finite."""
    wide = vectors.astype(problem.wide)
    total = jnp.sum(jnp.abs(wide) if problem.metric == "cosine" else wide * wide, 1)
    index = jnp.where(jnp.isfinite(total), index, 0)
    return jnp.where((first_nan >= 0) & ~jnp.isnan(total), first_nan, index).astype(jnp.int32)


def _dot(problem: NearestProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ bᵀ`` with sums in the wide dtype."""
    return lax.dot_general(
        a,
        b,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=problem.wide,
    )


def _best_row(problem: NearestProblem, half: Any, codebook: Any, vectors: Any) -> Any:
    scores = half - _dot(problem, vectors.astype(problem.wide), codebook)
    index = jnp.argmin(scores, 1).astype(jnp.int32)
    return jnp.min(scores, 1), index


def _best_column(problem: NearestProblem, half: Any, codebook: Any, vectors: Any) -> Any:
    # XLA's CPU compiler makes vector code of a minimum down the columns, and not of an argmin.
    scores = half[:, None] - _dot(problem, codebook, vectors.astype(problem.wide))
    best = jnp.min(scores, 0)
    at = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    return best, jnp.min(jnp.where(scores == best, at, codebook.shape[0] - 1), 0)


def _over_codes(problem: NearestProblem, best: _Best, half: Any, codebook: Any, vectors: Any) -> jax.Array:
    pieces = -(-problem.codes // BLOCK_CODES)
    if pieces == 1:
        return best(problem, half, codebook, vectors)[1]
    size = -(-problem.codes // pieces)
    lacks = pieces * size - problem.codes
    half = jnp.pad(half, (0, lacks), constant_values=jnp.inf).reshape(pieces, size)
    codebook = jnp.pad(codebook, ((0, lacks), (0, 0))).reshape(pieces, size, -1)

    def step(carry: Any, piece: Any) -> tuple[Any, None]:
        low, index = carry
        number, piece_half, piece_codes = piece
        score, at = best(problem, piece_half, piece_codes, vectors)
        better = score < low
        return (jnp.where(better, score, low), jnp.where(better, at + number * size, index)), None

    start = best(problem, half[0], codebook[0], vectors)
    rest = (jnp.arange(1, pieces, dtype=jnp.int32), half[1:], codebook[1:])
    return lax.scan(step, start, rest)[0][1]


def _count(tokens: int, rows: int) -> int:
    """How many blocks: one that divides the tokens if there is one close by, so that nothing is padded."""
    least = -(-tokens // rows)
    return next((n for n in range(least, min(2 * least, tokens) + 1) if tokens % n == 0), least)


def _blocked(
    best: _Best, limit: int, contiguous: bool, problem: NearestProblem, x: jax.Array, codebook: jax.Array
) -> jax.Array:
    x = x.reshape(problem.tokens, problem.dim)
    half, codes, first_nan, shift = _codes(problem, codebook)

    def search(vectors: jax.Array) -> jax.Array:
        index = _over_codes(problem, best, half, codes, vectors.astype(problem.wide) - shift)
        return _settled(problem, vectors, index, first_nan)

    heuristic = max(1, limit // min(problem.codes, BLOCK_CODES))
    blocks = _count(problem.tokens, problem.block_tokens or heuristic)
    if blocks == 1:
        return search(x)
    rows = -(-problem.tokens // blocks)
    x = jnp.pad(x, ((0, blocks * rows - problem.tokens), (0, 0)))
    if contiguous:
        indices = lax.map(search, x.reshape(blocks, rows, -1)).reshape(-1)
    else:
        # Sharded tokens stay where they are: each block takes some of every device's. On one device that is a third
        # of the time on TPUs, where each strided token fills a tile of its own.
        def pick(i: jax.Array) -> jax.Array:
            return search(lax.dynamic_index_in_dim(strided, i, 1, keepdims=False))

        strided = x.reshape(rows, blocks, -1)
        indices = lax.map(pick, jnp.arange(blocks)).T.reshape(-1)
    return indices[: problem.tokens]


cpu = partial(_blocked, _best_column, CPU_BLOCK_SCORES, True)


def xla(problem: NearestProblem, x: jax.Array, codebook: jax.Array) -> jax.Array:
    one, several = (partial(_blocked, _best_row, BLOCK_SCORES, whole, problem) for whole in (True, False))
    return on_one_device(one, several, x, codebook)


def reference(problem: NearestProblem, x: jax.Array, codebook: jax.Array) -> jax.Array:
    """The whole score matrix at once."""
    x = x.reshape(problem.tokens, problem.dim)
    half, codes, first_nan, shift = _codes(problem, codebook)
    moved = x.astype(problem.wide) - shift
    return _settled(problem, x, _best_row(problem, half, codes, moved)[1], first_nan)
