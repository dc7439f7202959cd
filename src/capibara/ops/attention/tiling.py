"""Split a long attention problem into pieces that fit a cache.

There are two levels. The *group*: the number of (batch element, key/value head) pairs that are computed together. The
*tile*: a run of query rows with only the keys that they can see, so that a causal or windowed mask skips work instead
of discarding it. Up to ``MAX_TILES`` tiles are unrolled with exact key ranges; a longer sequence gets tiles that loop
over blocks of rows with the range of the whole tile, so that the size of the program does not grow with the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from capibara.ops.attention.problem import AttentionProblem

__all__ = ["MAX_TILES", "Group", "Tile", "cut_group", "cut_tiles"]

MAX_TILES = 8


@dataclass(frozen=True)
class Tile:
    """``blocks`` blocks of ``rows`` query rows from ``start``, all seeing keys ``[key_start, key_stop)``."""

    start: int
    rows: int
    blocks: int
    key_start: int
    key_stop: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.blocks

    @property
    def keys(self) -> int:
        return self.key_stop - self.key_start


@dataclass(frozen=True)
class Group:
    """``batch`` batch elements times ``kv_heads`` key/value heads at a time, over a grid of such groups."""

    batch: int
    kv_heads: int
    grid_batch: int
    grid_heads: int

    @property
    def count(self) -> int:
        return self.grid_batch * self.grid_heads


def _tile(problem: AttentionProblem, start: int, rows: int, blocks: int) -> Tile:
    first = 0 if problem.left is None else start - problem.left
    stop = problem.kv_len if problem.right is None else start + rows * blocks + problem.right
    # At least one key, so that no product is empty; the mask hides it where the rows see none.
    first = min(max(first, 0), problem.kv_len - 1)
    stop = max(min(stop, problem.kv_len), first + 1)
    return Tile(start, rows, blocks, first, stop)


def cut_tiles(problem: AttentionProblem, rows: int) -> tuple[Tile, ...]:
    """Split the query rows into tiles of blocks of ``rows`` rows."""
    rows = min(rows, problem.q_len)
    whole = problem.q_len // rows
    per_tile = -(-whole // MAX_TILES)
    tiles = []
    start = 0
    while start < whole * rows:
        blocks = min(per_tile, whole - start // rows)
        tiles.append(_tile(problem, start, rows, blocks))
        start = tiles[-1].stop
    if start < problem.q_len:
        tiles.append(_tile(problem, start, problem.q_len - start, 1))
    return tuple(tiles)


def _divisor(n: int, limit: int) -> int:
    """The largest divisor of ``n`` that is at most ``limit`` (and at least 1)."""
    return next(d for d in range(max(1, min(n, limit)), 0, -1) if n % d == 0)


def cut_group(problem: AttentionProblem, tiles: tuple[Tile, ...], score_bytes: int) -> Group:
    """The largest group whose biggest block of float32 scores stays within ``score_bytes``."""
    each = 4 * problem.group * max(tile.rows * tile.keys for tile in tiles)
    pairs = max(1, score_bytes // each)
    if pairs >= problem.kv_heads:
        batch, kv_heads = _divisor(problem.batch, pairs // problem.kv_heads), problem.kv_heads
    else:
        batch, kv_heads = 1, _divisor(problem.kv_heads, pairs)
    return Group(batch, kv_heads, problem.batch // batch, problem.kv_heads // kv_heads)
