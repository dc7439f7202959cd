"""The rotation on TPUs, in one pass over the heads of a position where a projection wrote them.

XLA splits heads into halves that fill half of the 128 lanes of a register, in several passes over the array in float32,
and keeps heads apart where the products and kernels around it have those of a position side by side. The kernel reads
``[rows, heads * features]`` once, rotates the lanes of each head by half of them, and writes the dtype that it read.

The rotation is linear in what is turned, and its transpose is the rotation backwards. A primitive says so, so that
derivatives of all kinds and orders are those of the XLA form.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from capibara.ops.one_device import compile_calls, kernel_results, on_platform, typed_as
from capibara.ops.rotary import xla
from capibara.ops.rotary.problem import RotaryProblem

__all__ = ["FEWEST_ROWS", "check", "forward"]

LANES = 128
# Of a block of rows: small enough for two copies of it and of the result, large enough to hide the latency of memory.
BLOCK_BYTES = 1 << 20
# With fewer rows XLA fuses the rotation with what is around it.
FEWEST_ROWS = 128

_primitive = Primitive("capibara_rotary_tpu")


def check(problem: RotaryProblem) -> None:
    """Refuse what the kernel does not turn."""
    for shape, dtype in zip(problem.shapes, problem.dtypes, strict=True):
        if not all(isinstance(n, int) for n in shape):
            raise NotImplementedError("turns arrays of known sizes")
        length, heads, features = shape[-3:]
        if dtype not in ("bfloat16", "float32") or problem.wide != "float32":
            raise NotImplementedError(f"turns float32 and bfloat16 by tables in float32, not {dtype}")
        if problem.layout != "halves" or problem.dim != features:
            raise NotImplementedError("turns whole heads by halves")
        if not features or (LANES % features and features % LANES) or heads * features % LANES:
            raise NotImplementedError(
                f"{heads} heads of {features} features do not fill registers of {LANES} lanes"
            )
        if length < FEWEST_ROWS:
            raise NotImplementedError(f"{length} rows are few enough for XLA to fuse")


def forward(problem: RotaryProblem, cos: jax.Array, sin: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Each of ``arrays``, turned; of tables in ``problem.wide``."""
    found = []
    for i, x in enumerate(arrays):
        one = replace(problem, shapes=problem.shapes[i : i + 1], dtypes=problem.dtypes[i : i + 1])
        # The types of arrays inside `shard_map`: all of them vary over the same mesh axes.
        tables = [typed_as(jax.typeof(x), table) for table in (cos, sin)]
        found.append(_primitive.bind(typed_as(jax.typeof(tables[0]), x), *tables, problem=one))
    return found


def _kernel(features: int, x: Any, cos: Any, sin: Any, out: Any) -> None:
    from jax.experimental.pallas import tpu as pltpu

    width = cos.shape[-1]
    for at in range(0, x.shape[-1], width):
        wide = x[:, at : at + width].astype(jnp.float32)
        other = pltpu.roll(wide, features // 2, 1)
        if features < width:
            # Registers of several heads: what a second half has before it, a first half has after it.
            after = pltpu.roll(wide, width - features // 2, 1)
            place = jax.lax.broadcasted_iota(jnp.int32, wide.shape, 1) % features
            other = jnp.where(place < features // 2, after, other)
        out[:, at : at + width] = (wide * cos[...] + other * sin[...]).astype(out.dtype)


def _turned(problem: RotaryProblem, interpret: bool, x: jax.Array, cos: jax.Array, sin: jax.Array) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    length, heads, features = x.shape[-3:]
    flat = x.reshape(-1, length, heads * features)
    batch, _, last = flat.shape
    width = max(features, LANES)
    # As wide as a register, of all heads alike.
    tables = [
        jnp.tile(jnp.concatenate(halves, axis=-1), (1,) * (cos.ndim - 1) + (width // features,))
        for halves in ((cos, cos), (-sin, sin))
    ]
    tables = [table.reshape(-1, length, width) for table in tables]
    rows = max(8, BLOCK_BYTES // (last * 4) // 16 * 16)
    rows = length if rows >= length else rows
    by_row = tables[0].shape[0] > 1
    block = pl.BlockSpec((None, rows, last), lambda i, b: (b, i, 0))
    # With the batch innermost a table that all rows share is fetched once.
    table = pl.BlockSpec((None, rows, width), lambda i, b: (b if by_row else 0, i, 0))
    moved = 2 * flat.size * flat.dtype.itemsize + sum(t.size * t.dtype.itemsize for t in tables)
    call = pl.pallas_call(
        partial(_kernel, features),
        grid=(-(-length // rows), batch),
        in_specs=[block, table, table],
        out_specs=block,
        out_shape=kernel_results((flat, *tables), (flat.shape, flat.dtype))[0],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name="capibara_rotary",
    )
    return call(flat, *tables).reshape(x.shape)


def _plain(problem: RotaryProblem, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return xla.forward(problem, cos, sin, x)[0]


def _compute(x: jax.Array, cos: jax.Array, sin: jax.Array, *, problem: RotaryProblem) -> jax.Array:
    kernel, otherwise = partial(_turned, problem), partial(_plain, problem)
    return on_platform("tpu", problem.implementation, kernel, otherwise, x, cos, sin)


@_primitive.def_abstract_eval
def _shape(x: Any, cos: Any, sin: Any, *, problem: RotaryProblem) -> Any:
    return x


compile_calls(_primitive)
mlir.register_lowering(_primitive, mlir.lower_fun(_compute, multiple_results=False))


def _tangent(primals: Any, tangents: Any, *, problem: RotaryProblem) -> Any:
    x, cos, sin = primals
    out = _primitive.bind(*primals, problem=problem)
    of_x, *of_tables = tangents
    parts = []
    if not isinstance(of_x, ad.Zero):
        parts.append(_primitive.bind(of_x, cos, sin, problem=problem))
    if not all(isinstance(each, ad.Zero) for each in of_tables):
        tables = [
            jnp.zeros(table.shape, table.dtype) if isinstance(each, ad.Zero) else each
            for each, table in zip(of_tables, (cos, sin), strict=True)
        ]
        parts.append(_plain(problem, x, *tables))
    return out, sum(parts[1:], start=parts[0]) if parts else jnp.zeros_like(out)


def _transpose(given: Any, x: Any, cos: Any, sin: Any, *, problem: RotaryProblem) -> Any:
    if isinstance(given, ad.Zero):
        return ad.Zero(x.aval), None, None
    return _primitive.bind(given, cos, -sin, problem=problem), None, None


def _map(arrays: Any, axes: Any, *, problem: RotaryProblem) -> Any:
    x, *tables = arrays
    size = next(a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None)
    x = jnp.moveaxis(x, axes[0], 0) if axes[0] is not None else jnp.broadcast_to(x, (size, *x.shape))
    lead = x.shape[:-3]
    if any(axis is not None for axis in axes[1:]) or tables[0].ndim > 2:
        # Tables of each row.
        moved = []
        for table, axis in zip(tables, axes[1:], strict=True):
            table = table[None] if axis is None else jnp.moveaxis(table, axis, 0)
            if table.ndim == 3 and len(lead) > 1:  # one for all rows of a part
                table = table.reshape(table.shape[0], *(1,) * (len(lead) - 1), *table.shape[1:])
            moved.append(jnp.broadcast_to(table, (*lead, *table.shape[-2:])))
        tables = moved
    mapped = replace(problem, shapes=(x.shape,), table=tables[0].shape)
    alike = [typed_as(jax.typeof(x), table) for table in tables]
    return _primitive.bind(x, *alike, problem=mapped), 0


ad.primitive_jvps[_primitive] = _tangent
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _map
