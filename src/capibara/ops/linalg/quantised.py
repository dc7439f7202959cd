"""Products with a quantized matrix: eight or four bits per element, and a scale per group of elements.

A weight ``[out, in]`` is kept as codes and one scale for each group along ``in``; its entry is
``level(code) · scale(group)``. The decoded matrix never exists as a whole. That saves memory (a quarter or an eighth
of float32's remains) and, for few vectors, time, which is dominated by reading the matrix. On CPUs compiled kernels
read the codes (:mod:`capibara.ops.linalg.quantised_native`); on TPUs, for few vectors, a kernel in Pallas does. With
XLA alone, rows are decoded a slab at a time, and each slab is multiplied and discarded. ``python -m benchmarks
compression_fixed`` measures it.

Four-bit codes are stored two to a byte, the first in the lower half. Their sixteen levels are looked up by selection,
bit by bit: vector units select in registers, while a table would be read entry by entry. Even and odd columns are
multiplied separately, so that they need not be interleaved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.native.levels import NF4
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.linalg import quantised_native, quantised_tpu
from capibara.ops.linalg.arguments import FLOATS, check_count, check_matrix, on_any_mesh
from capibara.ops.one_device import alike
from capibara.ops.registry import Implementation, Op, public

__all__ = ["by_slabs", "dequantise_matrix", "quantise_matrix", "quantised_matmul", "transposable"]

# Numbers of a slab: 8 MiB as float32, which a cache holds and which is large enough for a product's threads.
_SLAB = 1 << 21
_ALIGNED = 256  # a multiple of what any kernel reads at a time


@dataclass(frozen=True)
class QuantisedProblem:
    """``x [*batch, inner] @ W.T`` with W ``[rows, inner]`` quantized to ``bits``."""

    batch: tuple[int, ...]
    rows: int
    inner: int
    bits: int
    group: int
    table: bool
    scale_codes: bool
    dtype: str
    implementation: str


def _prepare(
    x: Any,
    codes: Any,
    scales: Any,
    levels: Any = None,
    *,
    group: int,
    scale_table: Any = None,
    implementation: str = "auto",
) -> tuple[QuantisedProblem, tuple[Any, ...]]:
    op = "quantised_matmul"
    dtype = check_matrix(op, "x", x, rank=1)
    kind = check_matrix(op, "codes", codes, ("int8", "uint8"))
    check_matrix(op, "scales", scales, FLOATS if scale_table is None else ("uint8",))
    bits, inner = (8 if kind == "int8" else 4), int(x.shape[-1])
    # Of groups longer than a row the length does not matter; it may be more than integers of 64 bits hold.
    group = min(check_count(op, "group", group, 1), max(-(-inner // _ALIGNED), 1) * _ALIGNED)
    if len(codes.shape) != 2 or len(scales.shape) != 2:
        raise OpShapeError(
            f"{op}: codes and scales must have two axes, got {tuple(codes.shape)} and {tuple(scales.shape)}. "
            "Remedy: jax.vmap for several matrices."
        )
    width = inner if bits == 8 else -(-inner // 2)
    if codes.shape[1] != width:
        raise OpShapeError(
            f"{op}: codes must be [rows, {width}] ({codes.dtype}) for x {tuple(x.shape)}, got {tuple(codes.shape)}"
        )
    expected = (codes.shape[0], -(-inner // group))
    if tuple(scales.shape) != expected:
        raise OpShapeError(f"{op}: scales must be {expected} with group={group}, got {tuple(scales.shape)}")
    if levels is not None:
        if bits == 8:
            raise OpTypeError(f"{op}: levels go with uint8 codes of four bits; int8 codes are the levels")
        check_matrix(op, "levels", levels, rank=1)
        if tuple(levels.shape) != (16,):
            raise OpShapeError(f"{op}: levels must have the shape (16,), got {tuple(levels.shape)}")
    if scale_table is not None:
        check_matrix(op, "scale_table", scale_table, rank=1)
        if len(scale_table.shape) != 1 or not 1 <= scale_table.shape[0] <= 256:
            raise OpShapeError(
                f"{op}: scale_table must have one axis of 1 to 256 entries, got {tuple(scale_table.shape)}"
            )
    problem = QuantisedProblem(
        tuple(x.shape[:-1]),
        int(codes.shape[0]),
        inner,
        bits,
        group,
        levels is not None,
        scale_table is not None,
        dtype,
        implementation,
    )
    return problem, (x, codes, scales, levels, scale_table)


def _select(codes: jax.Array, levels: jax.Array) -> jax.Array:
    """``levels[codes]`` by fifteen selections."""
    found = [levels[i] for i in range(16)]
    for bit in range(4):
        is_set = (codes >> bit) & 1 != 0
        found = [jnp.where(is_set, found[i + 1], found[i]) for i in range(0, len(found), 2)]
    return found[0]


def _levels(problem: QuantisedProblem, codes: jax.Array, levels: Any) -> jax.Array:
    """What codes of four bits stand for, one in each entry, as float32."""
    if problem.table:
        return _select(codes, levels.astype("float32"))
    return codes.astype("int32").astype("float32") - 8.0


def _scaled(values: jax.Array, scales: jax.Array, group: int) -> jax.Array:
    """[rows, length] times each group's scale. A broadcast, which is fused; repeated scales would be gathered."""
    rows, length = values.shape
    scales = scales.astype("float32")
    whole = length // group
    cut = whole * group
    even = values[:, :cut].reshape(rows, whole, group) * scales[:, :whole, None]
    if cut == length:
        return even.reshape(rows, cut)
    return jnp.concatenate([even.reshape(rows, cut), values[:, cut:] * scales[:, whole : whole + 1]], axis=1)


def _numbers(problem: QuantisedProblem, codes: jax.Array, scales: jax.Array, levels: Any) -> jax.Array:
    """Some rows of the matrix, float32 [rows, inner]."""
    if problem.bits == 8:
        return _scaled(codes.astype("float32"), scales, problem.group)
    both = jnp.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)[:, : problem.inner]
    return _scaled(_levels(problem, both, levels), scales, problem.group)


def _slab(
    problem: QuantisedProblem, x: jax.Array, codes: jax.Array, scales: jax.Array, levels: Any
) -> jax.Array:
    """The product with some rows, [count, rows]."""

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.dot_general(
            x,
            weight.astype(x.dtype),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if x.dtype in (jnp.float32, jnp.float64) else None,
            preferred_element_type="float64" if x.dtype == jnp.float64 else "float32",
        )

    if problem.bits == 8 or problem.group % 2 or problem.inner < 2:
        return product(x, _numbers(problem, codes, scales, levels))
    # Even columns and odd ones are products of their own: to put them together would be a copy of all of them.
    out = None
    for first, half in enumerate((codes & 15, (codes >> 4)[:, : problem.inner // 2])):
        weight = _scaled(_levels(problem, half, levels), scales, problem.group // 2)
        part = product(x[:, first::2], weight)
        out = part if out is None else out + part
    assert out is not None
    return out


def by_slabs(
    problem: QuantisedProblem, x: jax.Array, codes: jax.Array, scales: jax.Array, levels: Any
) -> jax.Array:
    """All rows, slab by slab; the backward pass decodes them again instead of storing them."""
    flat = x.reshape(-1, problem.inner)
    run = jax.checkpoint(partial(_slab, problem))
    size = max(_SLAB // max(problem.inner, 1), 1)
    count = problem.rows // size
    if count <= 1:
        out = run(flat, codes, scales, levels)
    else:
        whole = count * size
        several = (a[:whole].reshape(count, size, -1) for a in (codes, scales))

        def step(carry: Any, slab: Any) -> tuple[Any, jax.Array]:
            return carry, run(flat, *slab, levels)

        _, parts = lax.scan(step, alike(jnp.zeros(()), flat, codes, scales), tuple(several))
        out = jnp.moveaxis(parts, 0, 1).reshape(flat.shape[0], whole)
        if whole < problem.rows:
            out = jnp.concatenate([out, run(flat, codes[whole:], scales[whole:], levels)], axis=1)
    return out.reshape(*problem.batch, problem.rows).astype(problem.dtype)


def _reference(
    problem: QuantisedProblem, x: jax.Array, codes: jax.Array, scales: jax.Array, levels: Any
) -> jax.Array:
    """The whole matrix by indexing, then one product."""
    wide = jnp.promote_types(problem.dtype, "float32")
    if problem.bits == 8:
        values = codes.astype(wide)
    else:
        table = jnp.arange(-8, 8) if levels is None else levels
        place = jnp.arange(problem.inner)
        values = table.astype(wide)[(codes[:, place // 2] >> (4 * (place % 2)).astype("uint8")) & 15]
    weight = values * scales.astype(wide)[:, jnp.arange(problem.inner) // problem.group]
    out = jnp.matmul(x.astype(wide), weight.T, precision=lax.Precision.HIGHEST)
    return out.astype(problem.dtype)


def _with_scales(form: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """For a form that takes no codes of scales."""

    def forward(
        problem: QuantisedProblem, x: Any, codes: Any, scales: Any, levels: Any, table: Any
    ) -> jax.Array:
        return form(problem, x, codes, table[scales] if problem.scale_codes else scales, levels)

    return forward


OP = Op(
    "quantised_matmul",
    _prepare,
    [
        Implementation(
            "pallas_tpu",
            {"forward": _with_scales(quantised_tpu.forward)},
            platforms=("tpu",),
            check=quantised_tpu.check,
        ),
        Implementation(
            "native",
            {"forward": quantised_native.forward},
            platforms=("cpu",),
            check=quantised_native.check,
            portable=False,
        ),
        Implementation("xla", {"forward": _with_scales(by_slabs)}),
        Implementation("reference", {"forward": _with_scales(_reference)}),
    ],
)


@partial(jax.jit, static_argnums=0)
def _run(problem: QuantisedProblem, *arrays: Any) -> jax.Array:
    return OP.run("forward", problem, *arrays)


@public(OP)
def quantised_matmul(
    x: Any,
    codes: Any,
    scales: Any,
    levels: Any = None,
    *,
    group: int,
    scale_table: Any = None,
    implementation: str = "auto",
) -> jax.Array:
    """``x @ W.T`` for a matrix W ``[rows, inner]`` quantized to eight or four bits.

    In plain JAX, for int8: ``x @ (codes * jnp.repeat(scales, group, axis=1)[:, :inner]).T``. Summed in float32.
    Differentiable in ``x``, ``scales``, ``levels`` and ``scale_table``; works under ``jit`` and ``vmap``. Tensors of
    an archive are loaded in this form by :func:`capibara.compress.direct.load_quantised`.

    Args:
      x: ``[..., inner]``: float32, float64, bfloat16 or float16.
      codes: int8 ``[rows, inner]``; or uint8 ``[rows, ceil(inner / 2)]``, two codes of four bits each, the first in the
        lower half.
      scales: ``[rows, ceil(inner / group)]``, of either sign; with a ``scale_table`` uint8.
      levels: ``[16]``, the value of each four-bit code; None: the code - 8.
      group: Elements of a row that share a scale; the last group may have fewer.
      scale_table: ``[count]``, 1 to 256 scales, which ``scales`` then indexes (codes beyond the last take the last);
        None: ``scales`` are the scales.
      implementation: ``"auto"``, ``"pallas_tpu"`` (kernels for few vectors and for many; interpreted, slowly, on
        other platforms), ``"native"`` (compiled kernels for CPUs, if the library is built), ``"xla"`` (slab by slab)
        or ``"reference"`` (the whole matrix at once).

    Returns:
      ``[..., rows]`` in ``x``'s dtype.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    OP.check_name(implementation)
    problem, arrays = _prepare(
        x, codes, scales, levels, group=group, scale_table=scale_table, implementation=implementation
    )
    if 0 in (problem.rows, problem.inner, *problem.batch):
        return jnp.zeros((*problem.batch, problem.rows), problem.dtype)
    arrays = tuple(None if a is None else jnp.asarray(a) for a in arrays)
    return on_any_mesh(partial(_run, problem), arrays, len(problem.batch))


def transposable(dtype: str) -> str:
    """The implementation that ``jax.linear_transpose`` can transpose for this dtype: Pallas has no transpose."""
    problem = QuantisedProblem((), 1, 1, 8, 1, False, False, dtype, "auto")
    return "native" if "native" in OP.usable(problem, "cpu") else "xla"


def quantise_matrix(matrix: Any, *, kind: str, group: int) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of a matrix ``[rows, inner]`` for :func:`quantised_matmul`, each rounded to the nearest level.

    Args:
      matrix: floating point. A group of zeros, or of numbers that are not finite, has no scale that fits it: of zeros
        it stays zeros.
      kind: ``"int8"``, whole numbers to ±127; or ``"nf4"``, whose ``levels`` are :data:`capibara.native.levels.NF4`
        (Dettmers et al., arXiv:2305.14314). The largest of a group is ±127, or ±1.
      group: elements of a row that share a scale; the last group may have fewer.

    Returns:
      ``(codes, scales)``: int8 ``[rows, inner]`` or uint8 ``[rows, ceil(inner / 2)]``; float32
      ``[rows, ceil(inner / group)]``.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    op = "quantise_matrix"
    check_matrix(op, "matrix", matrix)
    group = check_count(op, "group", group, 1)
    if kind not in ("int8", "nf4"):
        raise OpValueError(f"{op}: kind must be 'int8' or 'nf4', got {kind!r}")
    if len(matrix.shape) != 2:
        raise OpShapeError(f"{op}: matrix must be [rows, inner], got shape {tuple(matrix.shape)}")
    rows, inner = matrix.shape
    matrix = jnp.asarray(matrix).astype("float32")
    groups = -(-inner // group)
    grouped = jnp.pad(matrix, ((0, 0), (0, groups * group - inner))).reshape(rows, groups, group)
    scales = jnp.max(jnp.abs(grouped), axis=2) / (127 if kind == "int8" else 1)
    grouped = grouped / jnp.where(scales == 0, 1, scales)[..., None]
    flat = grouped.reshape(rows, groups * group)[:, :inner]
    if kind == "int8":
        return jnp.rint(flat).astype("int8"), scales
    between = jnp.asarray([(a + b) / 2 for a, b in itertools.pairwise(NF4)], jnp.float32)
    codes = sum(((flat > edge).astype("uint8") for edge in between), jnp.zeros(flat.shape, "uint8"))
    codes = jnp.pad(codes, ((0, 0), (0, inner % 2)))
    return codes[:, ::2] | codes[:, 1::2] << 4, scales


def dequantise_matrix(codes: Any, scales: Any, levels: Any = None, *, inner: int, group: int) -> jax.Array:
    """The matrix of :func:`quantised_matmul` as float32 ``[rows, inner]``; for row look-ups.

    Args:
      codes: as there.
      scales: as there.
      levels: as there.
      inner: Elements of a row.
      group: as there.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    inner = check_count("dequantise_matrix", "inner", inner, 1)
    shape = jax.ShapeDtypeStruct((inner,), jnp.float32)
    problem, _ = _prepare(shape, codes, scales, levels, group=group)
    codes, scales = jnp.asarray(codes), jnp.asarray(scales)
    return _numbers(problem, codes, scales, None if levels is None else jnp.asarray(levels))
