"""Max-plus products on TPUs: problems that ``pallas_tpu_kernel`` supports, blocks and padding.

By the compiler's own count of cycles, the kernel takes 0.80 million for 1024³ on v5e where XLA's reduction takes 10.7;
0.52 would be the bound of the vector units. It was not measured on a TPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.one_device import on_platform
from capibara.ops.tropical import forms
from capibara.ops.tropical.problem import TropicalProblem

__all__ = ["Blocks", "blocks", "both", "check", "value"]

LANES, SUBLANES = 128, 8
_WIDE, _DEEP, _TALL = 1024, 512, 256
_LEAST_ROWS, _LEAST_COLUMNS = 8, 32


class Blocks(NamedTuple):
    """Block sizes of a step of the kernel; ``strip``: rows whose maxima stay in registers."""

    rows: int
    inner: int
    columns: int
    strip: int


def check(problem: TropicalProblem) -> None:
    if problem.dtype != "float32":
        raise NotImplementedError(f"adds float32, not {problem.dtype}")
    if problem.rows < _LEAST_ROWS or problem.columns < _LEAST_COLUMNS or problem.inner == 0:
        raise NotImplementedError(
            f"is for at least {_LEAST_ROWS} rows and {_LEAST_COLUMNS} columns and some depth, not {problem.rows}, "
            f"{problem.columns} and {problem.inner}"
        )


def _block(length: int, most: int, unit: int) -> int:
    """The size of as few equal blocks as cover ``length``."""
    count = -(-length // most)
    return -(-length // (count * unit)) * unit


def blocks(rows: int, inner: int, columns: int) -> Blocks:
    wide = _block(columns, _WIDE, LANES)
    # Sixteen registers of maxima, or as many as eight rows take.
    strip = max(SUBLANES, min(64, 16 * LANES // wide * SUBLANES))
    return Blocks(_block(rows, _TALL, strip), _block(inner, _DEEP, LANES), wide, strip)


def _run(indices: bool, interpret: bool, a: jax.Array, b: jax.Array) -> Any:
    """The product of operands without +inf, and the indices; an entry that NaN meets may be anything."""
    from capibara.ops.tropical import pallas_tpu_kernel

    batch, (rows, inner), columns = a.shape[:-2], a.shape[-2:], b.shape[-1]
    size = blocks(rows, inner, columns)
    down, deep, along = -rows % size.rows, -inner % size.inner, -columns % size.columns
    # What is added is -inf on the left, so it never is the maximum.
    left = jnp.pad(a.reshape(-1, rows, inner), ((0, 0), (0, down), (0, deep)), constant_values=-jnp.inf)
    right = jnp.pad(b.reshape(-1, inner, columns), ((0, 0), (0, deep), (0, along)))
    out = pallas_tpu_kernel.product(size, indices, interpret, left, right)
    return tuple(x[:, :rows, :columns].reshape(*batch, rows, columns) for x in out)


def value(problem: TropicalProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    def work(interpret: bool, a: jax.Array, b: jax.Array) -> jax.Array:
        def plain(a: jax.Array, b: jax.Array) -> jax.Array:
            return _run(False, interpret, a, b)[0]

        return lax.cond(forms.all_finite(a, b), plain, partial(forms.careful, plain), a, b)

    return on_platform("tpu", problem.implementation, work, partial(forms.xla_value, problem), a, b)


def both(problem: TropicalProblem, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    def work(interpret: bool, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        def plain(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _run(True, interpret, a, b)

        def wild(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
            best = forms.careful(lambda a, b: _run(False, interpret, a, b)[0], a, b)
            return best, forms.reached(a, b, best, problem.inner)

        return lax.cond(forms.all_finite(a, b), plain, wild, a, b)

    return on_platform("tpu", problem.implementation, work, partial(forms.xla_both, problem), a, b)
