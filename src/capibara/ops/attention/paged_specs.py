"""Problems of attention over pages that tuning measures, and which of them are equally fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from capibara.ops.attention.paged import PagedProblem

__all__ = ["SPECS", "PagedSpec", "alike_in_speed", "arguments"]


@dataclass(frozen=True)
class PagedSpec:
    """Sizes of one ``paged_attention`` call; ``tags`` among ``small``, ``large``.

    ``length``: positions of the longest sequence, half of those that there is room for. ``new``: of them queries.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    page_size: int = 16
    new: int = 1
    tags: tuple[str, ...] = ("small",)


SPECS: tuple[PagedSpec, ...] = (
    PagedSpec("grouped", 3, 4, 2, 20, 16, 4),
    PagedSpec("several positions", 2, 4, 4, 9, 16, 2, 3),
    PagedSpec("one text", 1, 32, 8, 1024, 128, tags=("large",)),
    PagedSpec("eight texts", 8, 32, 8, 1024, 128, tags=("large",)),
    PagedSpec("many texts", 32, 32, 8, 1024, 128, tags=("large",)),
    PagedSpec("pieces of prompts", 4, 32, 8, 1024, 128, new=32, tags=("large",)),
)


def arguments(spec: PagedSpec, random: np.random.Generator) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """The arguments of a call: sequences between half of the length and all of it, in shuffled pages."""
    table = -(-2 * spec.length // spec.page_size)
    pool = spec.batch * table, spec.page_size, spec.kv_heads, spec.dim
    lengths = random.integers(-(-spec.length // 2), spec.length + 1, spec.batch)
    lengths[0] = spec.length
    return (
        random.standard_normal((spec.batch, spec.new, spec.heads, spec.dim), np.float32),
        random.standard_normal(pool, np.float32),  # of hundreds of megabytes
        random.standard_normal(pool, np.float32),
        random.permutation(pool[0]).reshape(spec.batch, table).astype(np.int32),
        lengths.astype(np.int32),
    ), {}


def alike_in_speed(problem: PagedProblem) -> dict[str, int | str]:
    """What determines which implementation is fast, beside how long sequences are."""
    more = {
        "window": problem.window is not None,
        "softcap": problem.softcap is not None,
        "sinks": problem.sinks,
    }
    return {
        "batch": problem.batch,
        "new": problem.new,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "room": problem.table * problem.page_size,
        "dim": problem.dim,
        "value_dim": problem.value_dim,
        "pages": "+".join(sorted(set(problem.pages_dtypes))),
        "more": "+".join(name for name, there in more.items() if there) or "none",
    }
