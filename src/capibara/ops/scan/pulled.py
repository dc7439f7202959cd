"""A linear function with a custom transpose, for compiled gradients.

``jax.custom_vjp`` would give a function the compiled gradient, but disable its forward mode. Reverse mode is
transposed forward mode: here a tangent is computed by one function, ``push``, and its transpose by another, ``pull``,
so that both modes work, to any order, under ``jit``, ``vmap`` and inside ``shard_map``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from capibara.jax_versions import HeldJaxpr
from capibara.ops.one_device import alike

__all__ = ["linear_with_transpose"]

_primitive = Primitive("capibara_linear")
_primitive.multiple_results = True

Pull = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def linear_with_transpose(
    push: Callable[[Sequence[Any], Sequence[Any]], Any],
    pull: Pull,
    values: tuple[Any, ...],
    linear: tuple[Any, ...],
) -> Any:
    """``push(values, linear)``, which is linear in ``linear``; transposed in it, ``pull(values, cotangents)``.

    Args:
      push: any differentiable function of two tuples of arrays, linear in the second; returns a tuple of arrays.
      pull: the cotangents of all of ``linear`` from those of all results. For higher derivatives it must be
        differentiable in both arguments.
    """
    count = len(values)
    step, shape = jax.make_jaxpr(lambda *v: push(v[:count], v[count:]), return_shape=True)(*values, *linear)
    out = _primitive.bind(*values, *linear, step=HeldJaxpr(step), pull=pull, count=count)
    return jax.tree.unflatten(jax.tree.structure(shape), out)


@_primitive.def_impl
def _run(*arrays: Any, step: HeldJaxpr, pull: Pull, count: int) -> Any:
    del pull, count
    return jax.jit(step)(*arrays)


@_primitive.def_abstract_eval
def _shapes(*_: Any, step: HeldJaxpr, pull: Pull, count: int) -> Any:
    del pull, count
    return step.out_avals


def _plain(*arrays: Any, step: HeldJaxpr, pull: Pull, count: int) -> Any:
    del pull, count
    return step(*arrays)


mlir.register_lowering(_primitive, mlir.lower_fun(_plain, multiple_results=True))


def _tangent(primals: Any, tangents: Any, *, step: HeldJaxpr, pull: Pull, count: int) -> Any:
    if all(isinstance(t, ad.Zero) for t in tangents[:count]):
        options = {"step": step, "pull": pull, "count": count}
        moved = [ad.instantiate_zeros(t) for t in tangents[count:]]
        return _primitive.bind(*primals, **options), _primitive.bind(*primals[:count], *moved, **options)
    return jax.jvp(step, primals, [ad.instantiate_zeros(t) for t in tangents])


ad.primitive_jvps[_primitive] = _tangent


def _transposed(cotangents: Any, *arrays: Any, step: HeldJaxpr, pull: Pull, count: int) -> Any:
    values, linear = arrays[:count], arrays[count:]
    if any(ad.is_undefined_primal(v) for v in values):
        raise NotImplementedError("this function is linear in its last arguments only")
    given = [alike(ad.instantiate_zeros(ct), *values) if isinstance(ct, ad.Zero) else ct for ct in cotangents]
    grads = pull(values, given)
    # Tangents that are known to be zero are not arguments of the linear function.
    found = [g if ad.is_undefined_primal(v) else None for g, v in zip(grads, linear, strict=True)]
    return [None] * count + found


ad.primitive_transposes[_primitive] = _transposed


def _map(arrays: Any, axes: Any, *, step: HeldJaxpr, pull: Pull, count: int) -> Any:
    axes = tuple(axes)
    stepped = jax.vmap(step, axes)

    def pulled(values: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        grads = jax.vmap(pull, (list(axes[:count]), [0] * len(cotangents)))(list(values), list(cotangents))
        return [
            jnp.sum(g, 0) if axis is None else jnp.moveaxis(g, 0, axis)
            for g, axis in zip(grads, axes[count:], strict=True)
        ]

    out = linear_with_transpose(
        functools.partial(_joined, stepped), pulled, tuple(arrays[:count]), tuple(arrays[count:])
    )
    return out, [0] * len(out)


def _joined(function: Callable[..., Any], values: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
    return list(function(*values, *linear))


batching.primitive_batchers[_primitive] = _map
