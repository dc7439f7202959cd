"""Attention over pages on TPUs: problems that ``paged_tpu_kernel`` supports, and its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

from capibara.ops.attention.pallas_calls import round_up
from capibara.ops.registry import tpu_kind

if TYPE_CHECKING:
    from capibara.ops.attention.paged import PagedProblem

__all__ = ["LANES", "SUBLANES", "PagedPlan", "check", "plan"]

LANES, SUBLANES = 128, 8
# Of keys and values that are copied together: long enough that a copy's start does not count.
BLOCK_BYTES = 1 << 20
VMEM_BYTES = 10 << 20  # of 16 MiB on the smallest chip
SMEM_BYTES = 512 << 10  # for the table, of 1 MiB


@dataclass(frozen=True)
class PagedPlan:
    """The static parameters of the kernel.

    Attributes:
      together: pages of a block.
      group: query heads that share a key head.
      new: positions of each sequence that are queries.
      key_dim: how much of a key's row is not padding.
      window, softcap, scale: as for :func:`capibara.ops.attention.paged_attention`.
      sinks: whether there are logits beside each row's scores.
      dtype: of the output.
      interpret: whether the kernel is interpreted.
    """

    together: int
    group: int
    new: int
    key_dim: int
    window: int | None
    softcap: float | None
    scale: float
    sinks: bool
    dtype: str
    interpret: bool


def check(problem: PagedProblem) -> None:
    """Raise ``NotImplementedError`` with the reason if the kernel does not support a problem."""
    if problem.coded:
        raise NotImplementedError("takes pages of numbers, not of codes")
    dtypes = {problem.dtype, *problem.pages_dtypes}
    if len(dtypes) > 1 or problem.dtype not in ("float32", "bfloat16"):
        raise NotImplementedError(f"takes float32 or bfloat16 throughout, not {' and '.join(sorted(dtypes))}")
    if any(dim % (LANES if dim > LANES else SUBLANES) for dim in (problem.dim, problem.value_dim)):
        raise NotImplementedError(
            f"takes heads of a multiple of {SUBLANES} up to {LANES}, or of {LANES}, not {problem.dim} and "
            f"{problem.value_dim}"
        )
    if min(problem.dim, problem.value_dim) < LANES and _on_v5p():
        raise NotImplementedError(
            f"takes pools with rows of at least {LANES} elements on v5p, not {problem.dim} and {problem.value_dim}: "
            "XLA lays pools of shorter rows out with the pages innermost there, and would copy all of them; pad rows "
            f"to {LANES}"
        )
    # Others are padded in memory: to see pages as rows, XLA would copy all of them.
    if problem.kv_heads not in (1, 2, 4) and problem.kv_heads % SUBLANES:
        raise NotImplementedError(f"takes 1, 2, 4 or a multiple of 8 key heads, not {problem.kv_heads}")
    # Between one head's parts lie those of the others: XLA would copy all pages here, too.
    alone = problem.kv_heads == 1 and problem.dtype == "bfloat16"
    if problem.kv_heads % SUBLANES and not alone and max(problem.dim, problem.value_dim) > LANES:
        raise NotImplementedError(
            f"takes heads of {LANES} numbers where there are {problem.kv_heads} key heads in {problem.dtype}, not "
            f"{problem.dim} and {problem.value_dim}"
        )
    if problem.page_size * problem.kv_heads % SUBLANES:
        raise NotImplementedError(
            f"takes pages with a multiple of 8 rows, not {problem.page_size} times {problem.kv_heads} heads"
        )
    # Each sequence's row of the table is padded there.
    if (needed := 4 * problem.batch * round_up(problem.table, LANES)) > SMEM_BYTES:
        raise NotImplementedError(
            f"would need {needed >> 10} KiB of a chip's memory for a table of {problem.batch} times {problem.table} "
            f"pages, more than {SMEM_BYTES >> 10}"
        )
    if (needed := _vmem_bytes(problem)) > VMEM_BYTES:
        raise NotImplementedError(
            f"would need {needed >> 20} MiB of a chip's memory for its blocks, more than {VMEM_BYTES >> 20}"
        )


def _on_v5p() -> bool:
    """Whether programs are traced for one (:func:`capibara.ops.registry.tpu_kind`)."""
    return tpu_kind() in ("TPU v5", "TPU v5p")


def _page_bytes(problem: PagedProblem) -> int:
    """Of the keys and values of a page: in memory a row takes whole tiles of 128 numbers."""
    size = jnp.dtype(problem.dtype).itemsize
    return size * problem.page_size * problem.kv_heads * _row(problem)


def _row(problem: PagedProblem) -> int:
    return round_up(problem.dim, LANES) + round_up(problem.value_dim, LANES)


def _together(problem: PagedProblem) -> int:
    return max(1, min(problem.table, BLOCK_BYTES // _page_bytes(problem)))


def _vmem_bytes(problem: PagedProblem) -> int:
    rows = round_up(problem.new * (problem.heads // problem.kv_heads), SUBLANES)
    positions = _together(problem) * problem.page_size
    blocks = 2 * _together(problem) * _page_bytes(problem)
    ends = 2 * 4 * problem.kv_heads * rows * _row(problem)
    # Of the best scores and totals, and of the sinks, which are there twice.
    columns = 4 if problem.sinks else 2
    sums = 4 * problem.kv_heads * rows * (round_up(problem.value_dim, LANES) + columns * LANES)
    scores = 4 * 4 * rows * round_up(positions, LANES)
    # A head's keys and values, as words, as float32 and as they are multiplied.
    head = 2 * 4 * positions * _row(problem)
    return blocks + ends + sums + scores + head


def plan(problem: PagedProblem, interpret: bool) -> PagedPlan:
    """The static parameters of the kernel."""
    return PagedPlan(
        together=_together(problem),
        group=problem.heads // problem.kv_heads,
        new=problem.new,
        key_dim=problem.used[0],
        window=problem.window,
        softcap=problem.softcap,
        scale=problem.scale,
        sinks=problem.sinks,
        dtype=problem.dtype,
        interpret=interpret,
    )
