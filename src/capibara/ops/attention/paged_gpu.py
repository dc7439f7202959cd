"""Attention over pages on NVIDIA GPUs: problems that ``paged_gpu_kernel`` supports, and its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capibara.ops.attention.paged import PagedProblem

__all__ = ["PagedPlan", "check", "plan"]

SMALLEST, WIDEST = 16, 256  # what Triton multiplies, and what registers hold
_DTYPES = ("float32", "bfloat16", "float16")
# So many programs keep all multiprocessors of a large GPU busy: two for each.
_PROGRAMS = 264
_LEAST_PART = 4  # blocks of keys that a program should have, before a sequence is cut into parts


@dataclass(frozen=True)
class PagedPlan:
    """The static parameters of the kernel.

    Attributes:
      rows: query rows of a block: new positions times the heads of a group. keys: positions of a block.
      parts: programs that share the keys of a sequence.
      group: query heads that share a key head. new: positions of each sequence that are queries.
      window, softcap, scale: as for :func:`capibara.ops.attention.paged_attention`.
      dtype: of the output.
      interpret: whether the kernel is interpreted.
    """

    rows: int
    keys: int
    parts: int
    group: int
    new: int
    window: int | None
    softcap: float | None
    scale: float
    dtype: str
    interpret: bool


def check(problem: PagedProblem) -> None:
    """Raise ``NotImplementedError`` with the reason if the kernel does not support a problem."""
    if problem.coded:
        raise NotImplementedError("does not support quantized pages")
    dtypes = {problem.dtype, *problem.pages_dtypes}
    if len(dtypes) > 1 or problem.dtype not in _DTYPES:
        raise NotImplementedError(
            f"takes float32, bfloat16 or float16 throughout, not {' and '.join(sorted(dtypes))}"
        )
    for dim in (problem.dim, problem.value_dim):
        if not SMALLEST <= dim <= WIDEST or dim & (dim - 1):
            raise NotImplementedError(
                f"takes heads of a power of two from {SMALLEST} to {WIDEST}, not {problem.dim} and "
                f"{problem.value_dim}"
            )
    if problem.used != (problem.dim, problem.value_dim):
        raise NotImplementedError("takes pools without padding")


def _power(n: int) -> int:
    """The least power of two of at least ``n``."""
    return 1 << (n - 1).bit_length()


def plan(problem: PagedProblem, interpret: bool) -> PagedPlan:
    """The static parameters of the kernel."""
    wide = max(problem.dim, problem.value_dim) > 128
    narrow = problem.dtype != "float32"
    group = problem.heads // problem.kv_heads
    rows = max(SMALLEST, min(32 if wide else 64, _power(problem.new * group)))
    keys = 64 if narrow and not wide else 32
    programs = problem.batch * problem.kv_heads * -(-problem.new * group // rows)
    blocks = -(-problem.table * problem.page_size // keys)
    parts = max(1, min(-(-_PROGRAMS // programs), blocks // _LEAST_PART))
    return PagedPlan(
        rows=rows,
        keys=keys,
        parts=parts,
        group=group,
        new=problem.new,
        window=problem.window,
        softcap=problem.softcap,
        scale=problem.scale,
        dtype=problem.dtype,
        interpret=interpret,
    )
