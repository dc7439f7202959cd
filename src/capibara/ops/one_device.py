"""Kernels that XLA's partitioner cannot split.

A Mosaic kernel in a program for several devices is an error unless it is inside ``jax.shard_map``. Whether it is, is
known only when the program is lowered. :func:`on_one_device` therefore carries two forms of the same mathematics: the
kernel, lowered where each device has its own arrays (a program for one device, or the inside of ``shard_map``), and
one made of XLA operations, lowered where the arrays are sharded over several devices and XLA has to split the work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from capibara import native
from capibara.jax_versions import HeldJaxpr, varying_axes

__all__ = [
    "alike",
    "compile_calls",
    "kernel_results",
    "native_call",
    "native_call_one_by_one",
    "on_one_device",
    "on_platform",
    "typed_as",
]

_primitive = Primitive("capibara_on_one_device")
_primitive.multiple_results = True


def on_one_device(kernel: Callable[..., Any], otherwise: Callable[..., Any], *arrays: Any) -> Any:
    """``kernel(*arrays)`` where each device has its own arrays, ``otherwise(*arrays)`` where XLA has to split them.

    Works under ``jit`` and ``vmap``. Its derivatives are those of ``otherwise``; for gradients by a kernel wrap it in
    ``jax.custom_vjp``.

    Args:
      kernel, otherwise: two forms of one function of arrays, with results of the same shapes and dtypes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:  # inside shard_map
        whole = set(mesh.manual_axes) == set(mesh.axis_names)
        return (kernel if whole else otherwise)(*arrays)
    # Arrays along explicit mesh axes are already sharded over several devices; a kernel cannot be traced there.
    if any(any(jax.typeof(x).sharding.spec) for x in arrays):
        return otherwise(*arrays)
    jaxpr, shape = jax.make_jaxpr(kernel, return_shape=True)(*arrays)
    out = _primitive.bind(*arrays, kernel=HeldJaxpr(jaxpr), otherwise=_Flat(otherwise))
    return jax.tree.unflatten(jax.tree.structure(shape), out)


def on_platform(
    platform: str,
    implementation: str,
    kernel: Callable[..., Any],
    otherwise: Callable[..., Any],
    *arrays: Any,
) -> Any:
    """A Pallas kernel made for one platform: on others an explicit request runs it interpreted: correct, but slow.

    Args:
      platform: where it is compiled, as lowering calls it.
      implementation: the requested implementation; ``"auto"`` uses the kernel only on its platform.
      kernel: ``kernel(interpret, *arrays)``.
      otherwise: as for :func:`on_one_device`.
    """

    def in_32_bits(interpret: bool, *arrays: Any) -> Any:
        # With 64 bits a kernel's counters would have them, too, and Mosaic takes none.
        with jax.enable_x64(False):
            return kernel(interpret, *arrays)

    compiled = functools.partial(on_one_device, functools.partial(in_32_bits, False), otherwise)
    if implementation == "auto":
        return compiled(*arrays)
    special: dict[str, Any] = {platform: compiled}
    return jax.lax.platform_dependent(*arrays, **special, default=functools.partial(in_32_bits, True))


def alike(tree: Any, *arrays: Any) -> Any:
    """``tree``, inside ``jax.shard_map`` varying over every mesh axis that any of ``arrays`` varies over.

    There the type of an array says over which axes it varies; what a loop carries must not change its type, and what
    differs between devices must have a gradient that does. Elsewhere it is ``tree`` itself.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return tree
    never = jnp.zeros((), bool)
    for x in jax.tree.leaves(arrays):
        one = x[(0,) * x.ndim] if x.size else jnp.sum(x)
        never = never | (jnp.zeros((), bool) & (one == 0))
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros((), x.dtype), x), tree)


def kernel_results(
    arrays: tuple[Any, ...], *shapes: tuple[tuple[int, ...], Any]
) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of results; inside ``shard_map`` they vary over every mesh axis that an operand varies over."""
    varying = frozenset().union(*(varying_axes(jax.typeof(x)) for x in arrays))
    more: dict[str, Any] = (
        {"manual_axis_type": jax.sharding.ManualAxisType(varying=varying)} if varying else {}
    )
    return [jax.ShapeDtypeStruct(shape, dtype, **more) for shape, dtype in shapes]


def native_call(
    target: str, out: Sequence[jax.ShapeDtypeStruct], *arrays: Any, **attributes: int | float
) -> Any:
    """:func:`capibara.native.call`, whose results inside ``jax.shard_map`` vary over what the arrays vary over."""
    return alike(native.call(target, out, *arrays, **attributes), arrays)


def typed_as(aval: Any, x: Any) -> Any:
    """``x``, inside ``jax.shard_map`` varying over every mesh axis that ``aval``, the type of an array, varies over.

    For what is bound to an equation of a jaxpr, whose primitives want the types that they were traced with.
    """
    lacking = varying_axes(aval) - varying_axes(jax.typeof(x))
    return jax.lax.pcast(x, tuple(sorted(lacking, key=str)), to="varying") if lacking else x


def native_call_one_by_one(
    target: str, out: Sequence[jax.ShapeDtypeStruct], *arrays: Any, **attributes: int | float
) -> Any:
    """:func:`native_call`, which under ``vmap`` calls once for each element."""
    return alike(native.call_one_by_one(target, out, *arrays, **attributes), arrays)


class _Flat:
    """A function whose results are a list."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arrays: Any) -> list[Any]:
        return jax.tree.leaves(self.function(*arrays))


def compile_calls(primitive: Primitive, *, keep: bool = True) -> None:
    """Compile what a primitive computes where no program is compiled around it, under ``jax.disable_jit`` too.

    Args:
      keep: compile once for the same parameters, which have to be hashable and few.
    """

    def compiled(params: tuple[tuple[str, Any], ...]) -> Any:
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    found = functools.cache(compiled) if keep else compiled

    @primitive.def_impl
    def _run(*arrays: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # otherwise the call would come here again, without end
            return found(tuple(sorted(params.items())))(*arrays)


compile_calls(_primitive, keep=False)


@_primitive.def_abstract_eval
def _shapes(*_: Any, kernel: HeldJaxpr, otherwise: _Flat) -> Any:
    return kernel.out_avals


def _lower(ctx: mlir.LoweringRuleContext, *values: Any, kernel: HeldJaxpr, otherwise: _Flat) -> Any:
    context = ctx.module_context.axis_context
    # A ShardingContext counts the devices of the program; the other contexts are those of manual mesh axes.
    several = getattr(context, "num_devices", 1) != 1
    # A program for several platforms has one form for all of them.
    several |= len(ctx.platforms or ctx.module_context.platforms) > 1
    chosen = otherwise if several else kernel
    return mlir.lower_fun(chosen, multiple_results=True)(ctx, *values)


mlir.register_lowering(_primitive, _lower)


def _map(arrays: Any, axes: Any, *, kernel: HeldJaxpr, otherwise: _Flat) -> Any:
    out = on_one_device(*(jax.vmap(form, tuple(axes)) for form in (kernel, otherwise)), *arrays)
    return out, [0] * len(out)


batching.primitive_batchers[_primitive] = _map


def _derive(primals: Any, tangents: Any, *, kernel: HeldJaxpr, otherwise: _Flat) -> Any:
    return jax.jvp(otherwise, primals, tuple(ad.instantiate_zeros(t) for t in tangents))


ad.primitive_jvps[_primitive] = _derive
