"""Products with a quantized matrix on CPUs, by the compiled kernels of :mod:`capibara.native`.

The product is a primitive, linear in the vectors. Its transpose is the product *across*, ``x @ W``, which the kernels
also implement, so gradients and :func:`jax.linear_transpose` read codes as well. Derivatives with respect to scales
and levels are those of the XLA implementation. Under ``jax.vmap`` vectors become more vectors; several matrices are
processed one after another.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from capibara import native
from capibara.measure.flops import register_foreign_call
from capibara.ops.linalg.joined import joinable
from capibara.ops.one_device import alike, compile_calls

if TYPE_CHECKING:
    from capibara.ops.linalg.quantised import QuantisedProblem

__all__ = ["FEW", "CodesProduct", "check", "codes_product", "forward"]

codes_product = Primitive("capibara_codes_product")
_several = Primitive("capibara_codes_products")
_several.multiple_results = True
# Vectors that nothing is packed for (kFewVectors in quantised.h); of more, several matrices take as long one by one.
FEW = 8


@dataclass(frozen=True)
class CodesProduct:
    """The primitive's parameters besides its arrays."""

    problem: QuantisedProblem  # in float32; its batch is not looked at
    across: bool = False

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.problem.inner if self.across else self.problem.rows


def check(problem: QuantisedProblem) -> None:
    reason = native.problem()
    if reason is not None:
        raise NotImplementedError(reason)
    if problem.dtype == "float64":
        raise NotImplementedError("computes in float32, not float64")


def forward(
    problem: QuantisedProblem, x: jax.Array, codes: jax.Array, scales: jax.Array, levels: Any, table: Any
) -> jax.Array:
    """``x @ W.T`` [*batch, rows]; ``scales`` are codes, uint8, where there is a ``table`` of them."""
    arrays = (
        x.reshape(-1, problem.inner).astype(jnp.float32),
        codes,
        scales if problem.scale_codes else scales.astype(jnp.float32),
        _sixteen(problem, levels),
        jnp.zeros(0, jnp.float32) if table is None else _whole_table(table),
    )
    what = CodesProduct(replace(problem, batch=(), dtype="float32"))
    out = _bind(*alike(arrays, *arrays), what=what)
    return out.reshape(*problem.batch, problem.rows).astype(problem.dtype)


def _sixteen(problem: QuantisedProblem, levels: Any) -> jax.Array:
    """What the codes stand for; nothing for eight bits, which are the levels."""
    if problem.bits == 8:
        return jnp.zeros(0, jnp.float32)
    return jnp.arange(-8, 8, dtype=jnp.float32) if levels is None else levels.astype(jnp.float32)


def _whole_table(table: jax.Array) -> jax.Array:
    """256 entries, the last one over and over where there are fewer: so XLA looks up what is out of bounds.

    And it gives such a lookup no derivative.
    """
    table = table.astype(jnp.float32)
    return jnp.concatenate([table, lax.stop_gradient(jnp.broadcast_to(table[-1], 256 - table.shape[0]))])


def _bind(x: Any, codes: Any, scales: Any, levels: Any, table: Any, *, what: CodesProduct) -> jax.Array:
    return codes_product.bind(x, codes, scales, levels, table, what=what)


def _by_xla(x: Any, codes: Any, scales: Any, levels: Any, table: Any, *, what: CodesProduct) -> jax.Array:
    from capibara.ops.linalg import quantised

    problem = replace(what.problem, batch=x.shape[:1])
    scales = table[scales] if problem.scale_codes else scales
    levels = levels if problem.table else None
    problem = replace(problem, scale_codes=False)
    if not what.across:
        return quantised.by_slabs(problem, x, codes, scales, levels)
    like = jax.ShapeDtypeStruct((x.shape[0], problem.inner), jnp.float32)
    product = functools.partial(quantised.by_slabs, problem, codes=codes, scales=scales, levels=levels)
    return jax.linear_transpose(product, like)(x)[0]


def _by_kernel(*arrays: Any, what: CodesProduct) -> jax.Array:
    return _several_by_kernel(*arrays, whats=(what,))[0]


def _several_by_kernel(x: Any, *arrays: Any, whats: tuple[CodesProduct, ...]) -> Any:
    out = [jax.ShapeDtypeStruct((x.shape[0], what.columns), jnp.float32) for what in whats]
    sizes = {
        "inner": tuple(what.problem.inner for what in whats),
        "group": tuple(what.problem.group for what in whats),
    }
    return native.call("capibara_codes_product", out, x, *arrays, **sizes, across=int(whats[0].across))


def _several_by_xla(x: Any, *arrays: Any, whats: tuple[CodesProduct, ...]) -> list[jax.Array]:
    return [_by_xla(x, *arrays[4 * i : 4 * i + 4], what=what) for i, what in enumerate(whats)]


def _flops(ins: Any, outs: Any, _: Any) -> int:
    return sum(2 * math.prod(ins[0]) * out[1] for out in outs)


# By the first name there are both: the primitive and what it calls.
register_foreign_call("capibara_codes_product", _flops)
register_foreign_call("capibara_codes_products", _flops)


compile_calls(codes_product)
compile_calls(_several)


@codes_product.def_abstract_eval
def _shape(x: Any, *_: Any, what: CodesProduct) -> Any:
    return x.update(shape=(x.shape[0], what.columns))


@_several.def_abstract_eval
def _shapes(x: Any, *_: Any, whats: tuple[CodesProduct, ...]) -> Any:
    return [x.update(shape=(x.shape[0], what.columns)) for what in whats]


mlir.register_lowering(codes_product, mlir.lower_fun(_by_xla, multiple_results=False))
mlir.register_lowering(codes_product, mlir.lower_fun(_by_kernel, multiple_results=False), platform="cpu")
mlir.register_lowering(_several, mlir.lower_fun(_several_by_xla, multiple_results=True))
mlir.register_lowering(_several, mlir.lower_fun(_several_by_kernel, multiple_results=True), platform="cpu")


@joinable(codes_product)
def _together(x: Any, others: list[list[Any]], params: list[dict[str, Any]]) -> list[list[Any]] | None:
    whats = tuple(one["what"] for one in params)
    if x.shape[0] > FEW or any(what.across != whats[0].across for what in whats):
        return None
    return [[out] for out in _several.bind(x, *(array for each in others for array in each), whats=whats)]


def _change(out: Any, primals: Any, tangents: Any, what: CodesProduct) -> Any:
    """The tangent of the result."""
    x, codes, scales, levels, table = primals
    dx, _, dscales, dlevels, dtable = tangents
    found = []
    if not isinstance(dx, ad.Zero):
        found.append(_bind(dx, codes, scales, levels, table, what=what))
    # Linear in each of these, too.
    if not isinstance(dlevels, ad.Zero):
        found.append(_by_xla(x, codes, scales, dlevels, table, what=what))
    plain = replace(what, problem=replace(what.problem, scale_codes=False))
    if not isinstance(dtable, ad.Zero):
        found.append(_by_xla(x, codes, dtable[scales], levels, table, what=plain))
    if not what.problem.scale_codes and not isinstance(dscales, ad.Zero):
        found.append(_by_xla(x, codes, dscales, levels, table, what=plain))
    return sum(found[1:], found[0]) if found else ad.Zero(jax.typeof(out).to_tangent_aval())


def _tangent(primals: Any, tangents: Any, *, what: CodesProduct) -> Any:
    out = _bind(*primals, what=what)
    return out, _change(out, primals, tangents, what)


ad.primitive_jvps[codes_product] = _tangent


def _transposed(ct: Any, x: Any, *arrays: Any, what: CodesProduct) -> Any:
    if any(ad.is_undefined_primal(a) for a in arrays):
        raise NotImplementedError("the product of vectors and codes is not linear in both together")
    nothing = (None,) * len(arrays)
    if isinstance(ct, ad.Zero):
        return ad.Zero(x.aval), *nothing
    return _bind(ct, *arrays, what=replace(what, across=not what.across)), *nothing


ad.primitive_transposes[codes_product] = _transposed


def _map(arrays: Any, axes: Any, *, what: CodesProduct) -> Any:
    x, *matrix = arrays
    if all(axis is None for axis in axes[1:]):
        x = jnp.moveaxis(x, axes[0], 0)
        return _bind(x.reshape(-1, x.shape[-1]), *matrix, what=what).reshape(*x.shape[:2], what.columns), 0
    moving = [None if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(arrays, axes, strict=True)]

    def one(now: Any) -> Any:
        return _bind(*(a if n is None else n for a, n in zip(arrays, now, strict=True)), what=what)

    return lax.map(one, moving), 0


batching.primitive_batchers[codes_product] = _map


# Derivatives and maps of several products are those of each.


def _of_one(number: int, every: Any) -> tuple[Any, ...]:
    """What concerns the vectors and one of several matrices."""
    return every[0], *every[1 + 4 * number : 5 + 4 * number]


def _several_tangents(primals: Any, tangents: Any, *, whats: tuple[CodesProduct, ...]) -> Any:
    outs = _several.bind(*primals, whats=whats)
    return outs, [
        _change(out, _of_one(i, primals), _of_one(i, tangents), what)
        for i, (out, what) in enumerate(zip(outs, whats, strict=True))
    ]


ad.primitive_jvps[_several] = _several_tangents


def _several_transposed(cts: Any, *arrays: Any, whats: tuple[CodesProduct, ...]) -> Any:
    every = [
        _transposed(ct, *_of_one(i, arrays), what=what)[0]
        for i, (ct, what) in enumerate(zip(cts, whats, strict=True))
    ]
    found = [one for one in every if not isinstance(one, ad.Zero)]
    return sum(found[1:], found[0]) if found else every[0], *(None,) * (len(arrays) - 1)


ad.primitive_transposes[_several] = _several_transposed


def _map_several(arrays: Any, axes: Any, *, whats: tuple[CodesProduct, ...]) -> Any:
    found = []
    for i, what in enumerate(whats):
        given, mapped = _of_one(i, arrays), _of_one(i, axes)
        apart = all(axis is None for axis in mapped)
        found.append((_bind(*given, what=what), None) if apart else _map(given, mapped, what=what))
    return tuple(zip(*found, strict=True))


batching.primitive_batchers[_several] = _map_several
