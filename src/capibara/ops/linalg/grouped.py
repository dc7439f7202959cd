"""Products of groups of rows, each with a matrix of its own: the experts of a mixture.

Rows are sorted by group: the first ``group_sizes[0]`` belong to group 0, and so on. There is no capacity: a group may
have all rows or none, and no row is dropped. Both gradients are products of the same kind. That of the rows is
:func:`grouped_matmul` with the matrices transposed; that of the matrices is a product of columns for each group, which
the implementations call ``outer``.

XLA has an operation for this, ``jax.lax.ragged_dot``. On CPUs it multiplies every row with every matrix, so there
compiled kernels run instead (:mod:`capibara.ops.linalg.grouped_native`), or blocks of rows where these do not
(:mod:`capibara.ops.linalg.grouped_blocks`); on TPUs kernels of our own do (:mod:`capibara.ops.linalg.grouped_tpu`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.checks import check_flag, check_precision
from capibara.ops.errors import OpShapeError, OpTypeError
from capibara.ops.explicit import over_explicit_axes
from capibara.ops.linalg import grouped_blocks, grouped_native, grouped_tpu, grouped_xla
from capibara.ops.linalg.arguments import FLOATS, WIDE, check_matrix
from capibara.ops.one_device import alike
from capibara.ops.registry import Implementation, Op, public

__all__ = ["grouped_matmul"]


@dataclass(frozen=True)
class GroupedProblem:
    """``lhs [rows, inner]`` times ``rhs [groups, inner, columns]``, or ``[groups, columns, inner]`` if transposed."""

    rows: int
    inner: int
    columns: int
    groups: int
    dtype: str
    accumulate_dtype: str
    precision: Any
    transpose_rhs: bool
    implementation: str

    @property
    def back(self) -> GroupedProblem:
        """The product that the gradient of the rows is."""
        return replace(self, inner=self.columns, columns=self.inner, transpose_rhs=not self.transpose_rhs)


def _prepare(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    transpose_rhs: bool = False,
    precision: Any = None,
    accumulate_dtype: Any = None,
    implementation: str = "auto",
) -> tuple[GroupedProblem, tuple[Any, ...]]:
    op = "grouped_matmul"
    kinds = [check_matrix(op, name, x) for name, x in (("lhs", lhs), ("rhs", rhs))]
    if len(lhs.shape) != 2 or len(rhs.shape) != 3:
        raise OpShapeError(
            f"{op}: lhs must be [rows, inner] and rhs [groups, inner, columns], got {tuple(lhs.shape)} and "
            f"{tuple(rhs.shape)}. Remedy: jax.vmap for further axes."
        )
    transpose_rhs = check_flag(op, "transpose_rhs", transpose_rhs)
    (rows, inner), groups = lhs.shape, rhs.shape[0]
    inner_rhs, columns = rhs.shape[:0:-1] if transpose_rhs else rhs.shape[1:]
    if inner != inner_rhs:
        raise OpShapeError(
            f"{op}: lhs {tuple(lhs.shape)} has {inner} columns, and the matrices of rhs {tuple(rhs.shape)}"
            f"{' transposed' if transpose_rhs else ''} have {inner_rhs} rows; they must be equal"
        )
    kind = getattr(group_sizes, "dtype", None)
    if kind is None or not jnp.issubdtype(kind, jnp.integer):
        got = type(group_sizes).__name__ if kind is None else kind
        raise OpTypeError(f"{op}: group_sizes must be an array of integers, got {got}. Remedy: dtype int32.")
    if tuple(group_sizes.shape) != (groups,):
        raise OpShapeError(
            f"{op}: group_sizes must be ({groups},), one for each matrix of rhs {tuple(rhs.shape)}, got "
            f"{tuple(group_sizes.shape)}"
        )
    check_precision(op, precision)
    dtype = str(jnp.promote_types(*kinds))
    wide = WIDE[dtype]
    if accumulate_dtype is not None:
        try:
            wide = str(jnp.dtype(accumulate_dtype))
        except TypeError:
            wide = repr(accumulate_dtype)
        if wide not in FLOATS:
            raise OpTypeError(
                f"{op}: accumulate_dtype must be one of {', '.join(FLOATS)}, or None, got {wide}"
            )
        wide = str(jax.dtypes.canonicalize_dtype(wide))
    problem = GroupedProblem(
        int(rows),
        int(inner),
        int(columns),
        int(groups),
        dtype,
        wide,
        precision,
        transpose_rhs,
        implementation,
    )
    return problem, (lhs, rhs, group_sizes)


# ---- plain: each group multiplies all rows, and those of others are 0 --------------------------------------------


def _members(problem: GroupedProblem, sizes: jax.Array) -> jax.Array:
    """Whether a row belongs to a group, ``bool [groups, rows, 1]``."""
    starts, ends = grouped_blocks.bounds(problem, sizes)
    row = jnp.arange(problem.rows)
    return ((row >= starts[:, None]) & (row < ends[:, None]))[..., None]


def _reference(problem: GroupedProblem, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    out = jnp.zeros((problem.rows, problem.columns), problem.dtype)
    for members, matrix in zip(_members(problem, sizes), rhs, strict=True):
        out = jnp.where(members, grouped_blocks.product(problem, lhs, matrix), out)
    return out


def _reference_outer(
    problem: GroupedProblem, lhs: jax.Array, other: jax.Array, sizes: jax.Array
) -> jax.Array:
    found = [
        grouped_blocks.outer_product(problem, *(jnp.where(members, x, 0) for x in (lhs, other)))
        for members in _members(problem, sizes)
    ]
    return jnp.stack(found).astype(problem.dtype)


OP = Op(
    "grouped_matmul",
    _prepare,
    [
        Implementation(
            "native",
            {"forward": grouped_native.forward, "outer": grouped_native.outer},
            platforms=("cpu",),
            check=grouped_native.check,
            portable=False,
        ),
        Implementation(
            "cpu", {"forward": grouped_blocks.forward, "outer": grouped_blocks.outer}, platforms=("cpu",)
        ),
        Implementation(
            "pallas_tpu",
            {"forward": grouped_tpu.forward, "outer": grouped_tpu.outer},
            platforms=("tpu",),
            check=grouped_tpu.check,
        ),
        # XLA's own product of columns multiplies all rows for every group, on TPUs too.
        Implementation("xla", {"forward": grouped_xla.forward, "outer": grouped_blocks.outer}),
        Implementation("reference", {"forward": _reference, "outer": _reference_outer}),
    ],
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(problem: GroupedProblem, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    return OP.run("forward", problem, lhs, rhs, sizes)


def _product_forward(problem: GroupedProblem, lhs: Any, rhs: Any, sizes: Any) -> tuple[jax.Array, Any]:
    return _product(problem, lhs, rhs, sizes), (lhs, rhs, sizes)


def _product_backward(problem: GroupedProblem, kept: Any, slope: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, sizes = kept
    pair = (slope, lhs) if problem.transpose_rhs else (lhs, slope)
    return _product(problem.back, slope, rhs, sizes), _outer(problem, *pair, sizes), None


_product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outer(problem: GroupedProblem, left: jax.Array, right: jax.Array, sizes: jax.Array) -> jax.Array:
    """For each group the product of columns ``[groups, columns of left, columns of right]``."""
    return OP.run("outer", problem, left, right, sizes)


def _outer_forward(problem: GroupedProblem, left: Any, right: Any, sizes: Any) -> tuple[jax.Array, Any]:
    return _outer(problem, left, right, sizes), (left, right, sizes)


def _outer_backward(problem: GroupedProblem, kept: Any, slope: jax.Array) -> tuple[Any, ...]:
    left, right, sizes = kept
    flat = replace(problem, inner=left.shape[1], columns=right.shape[1], transpose_rhs=False)
    return _product(flat.back, right, slope, sizes), _product(flat, left, slope, sizes), None


_outer.defvjp(_outer_forward, _outer_backward)


@public(OP)
@over_explicit_axes("lhs", "rhs", "group_sizes", out=lambda lhs, rhs, sizes: (*lhs[:1], None))
def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    precision: Any = None,
    accumulate_dtype: Any = None,
    implementation: str = "auto",
) -> jax.Array:
    """Multiply rows that are sorted by group, each with the matrix of its group: the experts of a mixture.

    In plain JAX::

        group = jnp.repeat(jnp.arange(groups), group_sizes, total_repeat_length=rows)
        out = jnp.einsum("rk,rkn->rn", lhs, rhs[group])      # rows after sum(group_sizes): 0

    No row is dropped, whatever the sizes are. The work is that of one product ``[rows, inner] @ [inner, columns]``
    (``"cpu"`` rounds each group's rows up to a multiple of 16), and on CPUs matrices of empty groups are not read.
    Works under ``jit``, ``vmap`` and ``grad`` (also twice); forward-mode differentiation (``jvp``) is not defined for
    it. A NaN or infinity stays in its row, and in the gradient of its group's matrix.

    Args:
      lhs: ``[rows, inner]``, floating point.
      rhs: ``[groups, inner, columns]``, floating point; with ``transpose_rhs`` ``[groups, columns, inner]``.
      group_sizes: ``int [groups]``: rows of each group, in the order of the rows. A negative size counts as 0; rows
        beyond the last one of ``lhs`` are ignored.
      transpose_rhs: multiply with the transposed matrices.
      precision: as for ``jnp.matmul``; of float32 products on accelerators.
      accumulate_dtype: of sums; None: float32, and float64 for float64.
      implementation: ``"auto"``, ``"native"`` (compiled kernels for CPUs, float32, if the library is built), ``"cpu"``
        (blocks of rows for XLA's CPU compiler), ``"pallas_tpu"`` (kernels for TPUs, elsewhere interpreted), ``"xla"``
        (``jax.lax.ragged_dot``) or ``"reference"`` (every group multiplies every row).

    Returns:
      ``[rows, columns]`` in the wider dtype of the operands; rows after ``sum(group_sizes)`` are 0.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Source: Gale et al. 2022, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts" (arXiv:2211.15841).
    """
    OP.check_name(implementation)
    problem, arrays = OP.prepare(
        lhs,
        rhs,
        group_sizes,
        transpose_rhs=transpose_rhs,
        precision=precision,
        accumulate_dtype=accumulate_dtype,
        implementation=implementation,
    )
    lhs, rhs, sizes = map(jnp.asarray, arrays)
    if 0 in (problem.rows, problem.inner, problem.columns, problem.groups):
        # A zero that has both gradients.
        zero = jnp.sum(lhs).astype(problem.dtype) * 0 + jnp.sum(rhs).astype(problem.dtype) * 0
        return jnp.broadcast_to(zero, (problem.rows, problem.columns))
    operands = alike((lhs.astype(problem.dtype), rhs.astype(problem.dtype), sizes), lhs, rhs, sizes)
    return _product(problem, *operands)
