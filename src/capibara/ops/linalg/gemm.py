"""Matrix products in a chosen precision, blocked if the operands are large.

A product ``a @ b`` is a sum over slabs of the contracted axis: ``Σ a[:, s] @ b[s, :]``. Only the sum has to stay on
the device, so both operands can be larger than its memory: host arrays (NumPy, including memory-mapped files) are
sent slab by slab, the next one while the previous one is multiplied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from capibara.errors import did_you_mean
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.linalg import specs
from capibara.ops.linalg.arguments import FLOATS, check_bool, check_count, check_matrix, on_any_mesh
from capibara.ops.linalg.orthogonal import t
from capibara.ops.one_device import alike
from capibara.ops.registry import Implementation, Op, public
from capibara.ops.tuning import Tuned, Tuning

__all__ = ["optimized_gemm"]

PRECISIONS = ("bfloat16", "float16", "float32", "float64", "int8")
# Operands on the host larger than this together are sent in slabs where the device does not say what it has.
HOST_BYTES = 1 << 30


@dataclass(frozen=True)
class GemmProblem:
    """``a [*batch, rows, inner] @ b [*batch, inner, columns]``, after the requested transposes."""

    batch: tuple[int, ...]
    rows: int
    inner: int
    columns: int
    precision: str
    out_dtype: str
    use_async: bool
    chunk_size: int | None
    transpose_a: bool
    transpose_b: bool
    implementation: str
    tuned: Tuned | None = None

    @property
    def dtype(self) -> str:
        return self.out_dtype

    @property
    def accumulate_dtype(self) -> str:
        if self.precision == "int8":
            return "int32"
        return "float64" if self.precision == "float64" else "float32"

    @property
    def quantised(self) -> bool:
        return self.precision == "int8" and self.out_dtype != "int32"


def alike_in_speed(problem: GemmProblem) -> dict[str, int | str] | None:
    """What determines which slabs are fast; None if the caller specified them."""
    if problem.chunk_size is not None:
        return None
    stored = ("t" if problem.transpose_a else "n") + ("t" if problem.transpose_b else "n")
    return {
        "batch": math.prod(problem.batch),
        "rows": problem.rows,
        "inner": problem.inner,
        "columns": problem.columns,
        "precision": problem.precision,
        "stored": stored,
        "async": str(problem.use_async),
    }


def _prepare(
    a: Any,
    b: Any,
    precision: Any = None,
    use_async: bool = True,
    chunk_size: int | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    implementation: str = "auto",
) -> tuple[GemmProblem, tuple[Any, ...]]:
    op = "optimized_gemm"
    kinds = [check_matrix(op, name, x, (*FLOATS, "int8")) for name, x in (("a", a), ("b", b))]
    integers = [kind == "int8" for kind in kinds]
    if any(integers) and not all(integers):
        raise OpTypeError(
            f"{op}: a is {a.dtype} and b is {b.dtype}; int8 goes with int8. Remedy: convert one of them."
        )
    out_dtype = "int32" if all(integers) else str(jnp.promote_types(*kinds))
    if precision is None:
        precision = "int8" if all(integers) else out_dtype
    elif not isinstance(precision, str):
        try:
            precision = str(jnp.dtype(precision))
        except TypeError:
            raise OpTypeError(
                f"{op}: precision must be one of {', '.join(PRECISIONS)} or None, got {precision!r}"
            ) from None
    if precision not in PRECISIONS:
        raise OpValueError(
            f"{op}: precision must be one of {', '.join(PRECISIONS)} or None, got {precision!r}."
            f"{did_you_mean(precision, PRECISIONS)}"
        )
    if all(integers) and precision != "int8":
        raise OpValueError(
            f"{op}: int8 operands are multiplied as integers; precision must be 'int8' or None, got {precision!r}"
        )
    if precision == "float64" and out_dtype != "float64":
        raise OpValueError(f"{op}: precision='float64' needs float64 operands, got {kinds[0]} and {kinds[1]}")
    transpose_a = check_bool(op, "transpose_a", transpose_a)
    transpose_b = check_bool(op, "transpose_b", transpose_b)
    rows, inner = a.shape[-2:][::-1] if transpose_a else a.shape[-2:]
    inner_b, columns = b.shape[-2:][::-1] if transpose_b else b.shape[-2:]
    if inner != inner_b:
        raise OpShapeError(
            f"{op}: a {tuple(a.shape)}{' transposed' if transpose_a else ''} has {inner} columns, and b "
            f"{tuple(b.shape)}{' transposed' if transpose_b else ''} has {inner_b} rows; they must be equal"
        )
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise OpShapeError(
            f"{op}: the leading axes of a {tuple(a.shape)} and b {tuple(b.shape)} do not broadcast"
        ) from None
    if chunk_size is not None:
        chunk_size = check_count(op, "chunk_size", chunk_size, 1)
    problem = GemmProblem(
        batch=tuple(batch),
        rows=rows,
        inner=inner,
        columns=columns,
        precision=precision,
        out_dtype=out_dtype,
        use_async=check_bool(op, "use_async", use_async),
        chunk_size=chunk_size,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        implementation=implementation,
    )
    return problem, (a, b)


def _axes(problem: GemmProblem) -> tuple[int, int]:
    """The contracted axis of each operand as it is stored, from the end."""
    return (-2 if problem.transpose_a else -1), (-1 if problem.transpose_b else -2)


def _turned(problem: GemmProblem, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (t(a) if problem.transpose_a else a), (t(b) if problem.transpose_b else b)


def _product(problem: GemmProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    """One slab's product (or the whole), in the dtype of accumulation."""
    a, b = _turned(problem, a, b)
    return jnp.matmul(
        a.astype(problem.precision),
        b.astype(problem.precision),
        precision=lax.Precision.HIGHEST if problem.precision in ("float32", "float64") else None,
        preferred_element_type=problem.accumulate_dtype,
    )


def _slabs(problem: GemmProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum over slabs of ``chunk_size`` of the contracted axis."""
    size, inner = problem.chunk_size, problem.inner
    if size is None or size >= inner:
        return _product(problem, a, b)
    axes = _axes(problem)

    def slab(start: Any, length: int) -> jax.Array:
        parts = (
            lax.dynamic_slice_in_dim(x, start, length, x.ndim + axis)
            for x, axis in zip((a, b), axes, strict=True)
        )
        # So that a compiler does not round whole operands before the loop. (The one for v5p does so even then.)
        return _product(problem, *lax.optimization_barrier(tuple(parts)))

    def step(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        return total + slab(index * size, size), None

    count = inner // size
    zero = jnp.zeros((*problem.batch, problem.rows, problem.columns), problem.accumulate_dtype)
    # Of two steps in one body the compiler may load the operands of the second while it multiplies the first's.
    unroll = 2 if problem.use_async else 1
    total, _ = lax.scan(step, alike(zero, a, b), jnp.arange(count), unroll=unroll)
    return total + slab(count * size, inner - count * size) if inner % size else total


def _scale(x: Any, axis: int) -> Any:
    """What makes the largest entry along ``axis``, the contracted one, 127; an infinity or a NaN makes it NaN."""
    array = np if isinstance(x, np.ndarray) else jnp
    size = array.abs(x).astype("float32")
    # Not left to the maximum: XLA's on CPUs may drop a NaN.
    finite = array.all(array.isfinite(size), axis=axis, keepdims=True)
    largest = array.max(size, axis=axis, keepdims=True, initial=0.0)
    return array.where(finite, largest / np.float32(127), np.float32(np.nan))


def _quantise(x: jax.Array, scale: jax.Array) -> jax.Array:
    rounded = jnp.round(x.astype("float32") / jnp.where(scale > 0, scale, jnp.ones_like(scale)))
    # A NaN or an infinity has no int8; the scale carries it into every product it takes part in.
    return jnp.where(jnp.isfinite(rounded), rounded, jnp.zeros_like(rounded)).astype("int8")


def _scaled(problem: GemmProblem, total: jax.Array, scale_a: Any, scale_b: Any) -> jax.Array:
    scale_a, scale_b = _turned(problem, scale_a, scale_b)
    return (total.astype("float32") * scale_a * scale_b).astype(problem.out_dtype)


def _undifferentiated(problem: GemmProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    if not problem.quantised:
        return _slabs(problem, a, b).astype(problem.out_dtype)
    scales = [_scale(x, axis) for x, axis in zip((a, b), _axes(problem), strict=True)]
    a, b = _quantise(a, scales[0]), _quantise(b, scales[1])
    return _scaled(problem, _slabs(problem, a, b), *scales)


_differentiated = jax.custom_jvp(_undifferentiated, nondiff_argnums=(0,))


def _jvp(problem: GemmProblem, primals: Any, tangents: Any) -> Any:
    # The derivative is two products, which need no slabs: their operands are there already. Rounding to integers has
    # derivative zero almost everywhere; what is of use is the derivative of the product it stands for.
    wide = replace(problem, precision="float32") if problem.quantised else problem
    (a, b), (da, db) = primals, tangents
    out = _differentiated(problem, a, b)
    change = jnp.zeros_like(out)
    for changed, left, right in ((da, da, b), (db, a, db)):
        if not isinstance(changed, SymbolicZero):
            change += _product(wide, left, right).astype(problem.out_dtype)
    return out, change


_differentiated.defjvp(_jvp, symbolic_zeros=True)


def _multiply(problem: GemmProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    run = _undifferentiated if problem.out_dtype == "int32" else _differentiated
    return run(problem, a, b)


def _reference(problem: GemmProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    """The same rounding of the operands, then one product in float32 (int32 for integers)."""
    scales = None
    if problem.quantised:
        scales = [_scale(x, axis) for x, axis in zip((a, b), _axes(problem), strict=True)]
        a, b = _quantise(a, scales[0]), _quantise(b, scales[1])
    left, right = (
        x.astype(problem.precision).astype(problem.accumulate_dtype) for x in _turned(problem, a, b)
    )
    out = jnp.matmul(left, right, precision=lax.Precision.HIGHEST)
    return out.astype(problem.out_dtype) if scales is None else _scaled(problem, out, *scales)


OP = Op(
    "optimized_gemm",
    _prepare,
    [
        Implementation("xla", {"forward": _multiply}, tunables={"chunk_size": (256, 512, 1024, 2048, 4096)}),
        Implementation("reference", {"forward": _reference}),
    ],
    Tuning(lambda: specs.GEMMS, specs.gemm_arguments, alike_in_speed),
)


@partial(jax.jit, static_argnums=0)
def _run(problem: GemmProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    return OP.run("forward", problem, a, b)


@public(OP)
def optimized_gemm(
    a: Any,
    b: Any,
    precision: Any = None,
    use_async: bool = True,
    chunk_size: int | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """The matrix product of ``a`` and ``b``, multiplied in ``precision`` and summed in float32.

    In plain JAX: ``jnp.matmul(a.astype(precision), b.astype(precision), preferred_element_type="float32")``, then
    ``astype`` to the operands' dtype. Differentiable; works under ``jit`` and ``vmap``. A float32 product is computed
    in float32 on every platform (JAX's default on a TPU is bfloat16: request it explicitly).

    Args:
      a: ``[..., rows, inner]`` (``[..., inner, rows]`` with ``transpose_a``): float32, float64, bfloat16, float16 or
        int8.
      b: ``[..., inner, columns]`` (``[..., columns, inner]`` with ``transpose_b``), the leading axes broadcasting.
      precision: ``"bfloat16"``, ``"float16"``, ``"float32"``, ``"float64"`` or ``"int8"``, as a string or dtype; None:
        the operands' common dtype. ``"int8"`` on floating-point operands scales each row of ``a`` and each column of
        ``b`` to 127; the gradient is then that of the unrounded product.
      use_async: With slabs, prepare one while another is multiplied: for host arrays, send the next before the
        previous one is done; in a compiled program, two slabs in each step of the loop. False: one after the other,
        with less memory.
      chunk_size: Elements of the contracted axis per slab. None: one slab, or what ``capibara tune`` has measured to
        be faster; but NumPy operands (including memory-mapped files) that together exceed a quarter of the device's
        memory (1 GiB if unknown) are sent in slabs of that size. Slabs only change the order of summation.
      transpose_a: Multiply with the transpose of ``a``'s last two axes.
      transpose_b: The same for ``b``.
      implementation: ``"auto"``, ``"xla"`` or ``"reference"`` (no slabs).

    Returns:
      ``[..., rows, columns]`` in the operands' common dtype; int32 for int8 operands (exact up to 131,000 for
      ``inner``). With a ``precision`` below ``"float64"``, sums are float32 for float64 operands as well: an error of
      about 1e-7 times the sum of the products' magnitudes, in addition to that of the rounded operands.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    OP.check_name(implementation)
    problem, (a, b) = OP.prepare(
        a,
        b,
        precision,
        use_async,
        chunk_size,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        implementation=implementation,
    )
    if 0 in (problem.rows, problem.columns, problem.inner, *problem.batch):
        return jnp.zeros((*problem.batch, problem.rows, problem.columns), problem.out_dtype)
    size = _host_slab(problem, a, b)
    if size is not None and size < problem.inner:
        return _stream(problem, a, b, size)
    kept = len(problem.batch) if np.ndim(a) - 2 == len(problem.batch) else 0
    return on_any_mesh(partial(_run, problem), (jnp.asarray(a), jnp.asarray(b)), kept)


def _host_slab(problem: GemmProblem, a: Any, b: Any) -> int | None:
    """How much of the contracted axis to send at a time; None where nothing is to be sent, or all at once."""
    on_host = [x for x in (a, b) if isinstance(x, np.ndarray)]
    traced = any(isinstance(x, Tracer) for x in (a, b, jnp.zeros(())))
    if not on_host or traced or problem.implementation == "reference":
        return None
    if problem.chunk_size is not None:
        return problem.chunk_size
    statistics = jax.local_devices()[0].memory_stats() or {}
    limit = statistics.get("bytes_limit", 4 * HOST_BYTES) // 4
    whole = sum(x.nbytes for x in on_host)
    return None if whole <= limit else max(1, problem.inner * limit // whole)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _add(problem: GemmProblem, total: jax.Array, a: jax.Array, b: jax.Array, scales: Any) -> jax.Array:
    if scales is not None:
        a, b = _quantise(a, scales[0]), _quantise(b, scales[1])
    return total + OP.run("forward", problem, a, b)


def _stream(problem: GemmProblem, a: Any, b: Any, size: int) -> jax.Array:
    """The product of operands of which one at least is on the host; at most three slabs of each are on the device."""
    axes = _axes(problem)
    scales = None
    if problem.quantised:
        scales = [_scale_by_parts(x, axis, size) for x, axis in zip((a, b), axes, strict=True)]
    total = jnp.zeros((*problem.batch, problem.rows, problem.columns), problem.accumulate_dtype)
    for sent, start in enumerate(range(0, problem.inner, size), 1):
        stop = min(start + size, problem.inner)
        slabs = [jnp.asarray(_cut(x, axis, start, stop)) for x, axis in zip((a, b), axes, strict=True)]
        part = replace(
            problem, inner=stop - start, out_dtype=problem.accumulate_dtype, chunk_size=None, tuned=None
        )
        total = _add(part, total, *slabs, scales)
        if not problem.use_async or sent % 3 == 0:
            total.block_until_ready()
    return total.astype(problem.out_dtype) if scales is None else _scaled(problem, total, *scales)


def _cut(x: Any, axis: int, start: int, stop: int) -> Any:
    return x[(..., slice(start, stop), *[slice(None)] * (-1 - axis))]


def _scale_by_parts(x: Any, axis: int, size: int) -> Any:
    """:func:`_scale`, reading an operand slab by slab."""
    parts = [_scale(_cut(x, axis, i, i + size), axis) for i in range(0, x.shape[axis], size)]
    return np.max(np.concatenate(parts, axis), axis=axis, keepdims=True)
