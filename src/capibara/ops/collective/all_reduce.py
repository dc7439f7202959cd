"""All-reduce of a pytree, with or without compression; its implementations are in reductions.py."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from capibara.errors import did_you_mean
from capibara.ops.collective import placement, reductions
from capibara.ops.collective.reductions import ReduceProblem
from capibara.ops.collective.rings import Axis
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.registry import Implementation, Op, public

__all__ = ["async_all_reduce", "zero_residual"]


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise OpTypeError(f"async_all_reduce: {name} must be an int, got {value!r}")
    if value < 1:
        raise OpValueError(f"async_all_reduce: {name} must be at least 1, got {value}")
    return int(value)


def prepare(
    gradients: Any,
    reduction_op: str = "mean",
    use_compression: bool = False,
    overlap_compute: bool = True,
    *,
    axis_name: Axis | None = None,
    residual: Any = None,
    block_size: int = 256,
    bucket_bytes: int = 4 << 20,
    implementation: str = "auto",
) -> tuple[ReduceProblem, tuple[Any, ...]]:
    """Check a call of ``async_all_reduce``; return its problem and its arrays."""
    if not isinstance(reduction_op, str):
        raise OpTypeError(f"async_all_reduce: reduction_op must be a string, got {reduction_op!r}")
    if reduction_op not in reductions.REDUCE:
        raise OpValueError(
            f"async_all_reduce: reduction_op must be one of {', '.join(reductions.REDUCE)}, got {reduction_op!r}."
            f"{did_you_mean(reduction_op, reductions.REDUCE)}"
        )
    for name, flag in (("use_compression", use_compression), ("overlap_compute", overlap_compute)):
        if not isinstance(flag, bool):
            raise OpTypeError(f"async_all_reduce: {name} must be True or False, got {flag!r}")
    if use_compression and reduction_op not in ("sum", "mean"):
        raise OpValueError(
            f"async_all_reduce: use_compression=True takes reduction_op 'sum' or 'mean', got {reduction_op!r}: what "
            "rounding loses can be made up for in a later sum, not in a later maximum, minimum or product"
        )
    if residual is not None and not use_compression:
        raise OpValueError(
            "async_all_reduce: a residual was given, but use_compression is False: nothing is rounded"
        )
    leaves, tree = jax.tree.flatten(gradients)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(gradients)]
    for path, leaf in zip(paths, leaves, strict=True):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise OpTypeError(
                f"async_all_reduce: gradients{path} must be an array, got {type(leaf).__name__}"
            )
        if not (jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)):
            raise OpTypeError(
                f"async_all_reduce: gradients{path} must be floating point or integer, got {leaf.dtype}"
            )
    block_size, bucket_bytes = _positive("block_size", block_size), _positive("bucket_bytes", bucket_bytes)
    rest: list[Any] = []
    if residual is not None:
        rest, other = jax.tree.flatten(residual)
        if other != tree:
            raise OpTypeError(
                f"async_all_reduce: residual must have the tree of gradients, {tree}; got {other}. Remedy: start with "
                "zero_residual(gradients)."
            )
        for path, leaf, left in zip(paths, leaves, rest, strict=True):
            if getattr(left, "shape", None) != leaf.shape:
                raise OpShapeError(
                    f"async_all_reduce: residual{path} must have the shape of gradients{path}, {leaf.shape}; got "
                    f"{getattr(left, 'shape', type(left).__name__)}"
                )
    problem = ReduceProblem(
        shapes=tuple(tuple(leaf.shape) for leaf in leaves),
        dtypes=tuple(str(leaf.dtype) for leaf in leaves),
        reduction_op=reduction_op,
        use_compression=use_compression,
        overlap_compute=overlap_compute,
        axis_name=placement.check_axis_name("async_all_reduce", axis_name),
        block_size=block_size,
        bucket_bytes=bucket_bytes,
        implementation=implementation,
    )
    return problem, (*leaves, *rest)


def _takes_int8(problem: ReduceProblem) -> None:
    if not problem.use_compression:
        raise NotImplementedError("use_compression=False")


def _takes_rings(problem: ReduceProblem) -> None:
    _takes_exact(problem)
    if not problem.overlap_compute:
        raise NotImplementedError("overlap_compute=False")


def _takes_exact(problem: ReduceProblem) -> None:
    if problem.use_compression:
        raise NotImplementedError("sends integers, and use_compression=True")


OP = Op(
    "async_all_reduce",
    prepare,
    [
        Implementation("int8", {"forward": reductions.by_int8}, check=_takes_int8),
        Implementation("ring", {"forward": reductions.by_rings}, check=_takes_rings),
        Implementation("xla", {"forward": reductions.by_collectives}, check=_takes_exact),
        Implementation("reference", {"forward": reductions.by_gathering}, check=_takes_exact),
    ],
)


def zero_residual(gradients: Any) -> Any:
    """The initial residual: zeros of the gradients' shapes, in float32 (float64 for float64).

    Equivalent JAX: ``jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.promote_types(g.dtype, jnp.float32)), gradients)``.
    Integers, which are not compressed, get an array of zeros as well. On a mesh the zeros are sharded like the
    gradients.

    Raises:
      OpTypeError: a leaf is not an array; the message gives its place in ``gradients``.
    """

    def zero(path: Any, g: Any) -> Any:
        if not hasattr(g, "shape") or not hasattr(g, "dtype"):
            raise OpTypeError(
                f"zero_residual: gradients{jax.tree_util.keystr(path)} must be an array, got {type(g).__name__}"
            )
        kind = jnp.promote_types(g.dtype, jnp.float32)
        if isinstance(g, jax.Array) and not isinstance(g, Tracer) and g.committed:
            return jnp.zeros(g.shape, kind, device=g.sharding)
        return jnp.zeros(g.shape, kind)

    return jax.tree_util.tree_map_with_path(zero, gradients)


@public(OP)
def async_all_reduce(
    gradients: Any,
    reduction_op: str = "mean",
    use_compression: bool = False,
    overlap_compute: bool = True,
    *,
    axis_name: Axis | None = None,
    residual: Any = None,
    block_size: int = 256,
    bucket_bytes: int = 4 << 20,
    implementation: str = "auto",
) -> Any:
    """Reduce arrays over all devices; each device gets the result.

    Inside ``jax.shard_map`` (or any function with a bound axis) each device passes its own arrays. Outside, the
    shards of an array on a mesh are reduced: an array ``[devices * n, …]`` that is sharded along its first dimension
    gives ``[n, …]``; a replicated array is already reduced and is returned unchanged.

    Differentiable, also with compression: the derivative is that of the exact sum or mean.

    Args:
      gradients: An array or a pytree of arrays, floating point or integer, any shapes.
      reduction_op: ``"sum"``, ``"mean"`` (of integers: floating point), ``"max"``, ``"min"`` or ``"product"``.
      use_compression: For a sum or mean of floating-point arrays, send int8, with a float32 scale per block of
        ``block_size`` elements; integers are sent uncompressed. The error is at most about 1/254 of a block's largest
        element for each device's part, and the same again for the sum. A NaN or infinity makes its block NaN.
      overlap_compute: Send bucket by bucket, the last arrays first, and by ``ppermute``, which TPUs overlap with
        arithmetic; rings round partial sums to the arrays' dtype at each step. False: one exchange for all arrays of
        a dtype, by XLA's own collectives.
      axis_name: The mesh axis or axes; by default all axes of the ``shard_map`` around the call, or, outside, all
        that an array is sharded over.
      residual: The rounding error of earlier calls on this device (initially :func:`zero_residual`), added before
        rounding again: error feedback. It belongs to the device: inside ``shard_map`` it varies over the axis.
      block_size: Elements that share a scale. Each array starts a new block.
      bucket_bytes: The size at which a bucket is sent.
      implementation: ``"auto"``, ``"int8"``, ``"ring"``, ``"xla"`` or ``"reference"`` (gathers all).

    Returns:
      The reduced pytree; with ``residual`` a pair of it and the residual for the next call.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it. Or, outside
        ``shard_map``, the sharding of an array is not known.

    Equivalent JAX: ``lax.psum``, ``lax.pmean``, ``lax.pmax``, ``lax.pmin``;
    ``jnp.prod(lax.all_gather(x, axis_name), axis=0)``.

    Sources: Patarasuk & Yuan 2009 (ring all-reduce); Seide et al. 2014 and Karimireddy et al. 2019,
    arXiv:1901.09847 (error feedback); Dettmers 2015, arXiv:1511.04561 (8-bit gradients).
    """
    OP.check_name(implementation)
    problem, arrays = prepare(
        gradients,
        reduction_op,
        use_compression,
        overlap_compute,
        axis_name=axis_name,
        residual=residual,
        block_size=block_size,
        bucket_bytes=bucket_bytes,
        implementation=implementation,
    )
    OP.choose(problem, jax.default_backend())
    tree = jax.tree.structure(gradients)
    count = len(problem.shapes)
    leaves, rest = list(arrays[:count]), list(arrays[count:])
    axis = placement.bound_axis("async_all_reduce", problem.axis_name, needed=False)
    if axis is not None:
        problem = _with(problem, axis_name=axis)
        reduced, left = _reduce(problem, leaves, rest)
    else:
        reduced, left = _reduce_shards(problem, leaves, rest)
    result = jax.tree.unflatten(tree, reduced)
    return result if residual is None else (result, jax.tree.unflatten(tree, left))


def _with(problem: ReduceProblem, **changes: Any) -> ReduceProblem:
    return ReduceProblem(**{**problem.__dict__, **changes})


def _reduce(problem: ReduceProblem, leaves: list[Any], rest: list[Any]) -> tuple[list[Any], list[Any]]:
    leaves = [jnp.asarray(x) for x in leaves]
    if not leaves:
        return [], []
    if not problem.use_compression:
        return list(OP.run("forward", problem, *leaves)), []
    started = rest or [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in leaves]
    values = [lax.stop_gradient(x) for x in leaves]
    reduced, left = OP.run("forward", problem, *values, *map(lax.stop_gradient, started))

    # Rounding has a derivative of zero almost everywhere; what is wanted is the derivative of the exact sum. So a
    # zero is added that has it, and costs no communication where no derivative is taken.
    @jax.custom_jvp
    def nothing(x: jax.Array) -> jax.Array:
        return reductions.zeros(problem, x)

    @nothing.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return nothing(*primals), reductions.exact(problem, *tangents)

    reduced = [
        y + nothing(x) if x.size and jnp.issubdtype(x.dtype, jnp.floating) else y
        for x, y in zip(leaves, reduced, strict=True)
    ]
    return reduced, left


def _reduce_shards(problem: ReduceProblem, leaves: list[Any], rest: list[Any]) -> tuple[list[Any], list[Any]]:
    """Outside ``shard_map``: the arrays that are split over the same axes of a mesh go together."""
    reduced, left = list(leaves), list(rest)
    groups: dict[Any, list[tuple[int, Any]]] = {}
    for i, x in enumerate(leaves):
        found = placement.split_over("async_all_reduce", x, problem.axis_name)
        if found is not None:
            groups.setdefault((found[0].mesh, found[1]), []).append((i, found[0]))
    for (mesh, axis), members in groups.items():
        places = [i for i, _ in members]
        specs = [sharding.spec for _, sharding in members]
        out_specs = [placement.without(sharding, axis) for _, sharding in members]
        local = _with(problem, axis_name=axis)

        def run(values: list[Any], residuals: list[Any], local: ReduceProblem = local) -> Any:
            shapes = tuple(tuple(x.shape) for x in values)
            kinds = tuple(str(x.dtype) for x in values)
            return _reduce(_with(local, shapes=shapes, dtypes=kinds), values, residuals)

        chosen = [leaves[i] for i in places], [rest[i] for i in places] if rest else []
        left_specs = specs if rest or problem.use_compression else []
        out = placement.over_shards(
            run, chosen, mesh, (specs, specs if rest else []), (out_specs, left_specs)
        )
        for n, i in enumerate(places):
            reduced[i] = out[0][n]
            if rest:
                left[i] = out[1][n]
    return reduced, left
