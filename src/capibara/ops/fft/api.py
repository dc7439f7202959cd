"""The public Fourier transform: mixed radices as matrix products, or XLA's; optionally over devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from capibara.ops.collective import placement
from capibara.ops.collective.rings import Axis
from capibara.ops.errors import OpShapeError, OpValueError
from capibara.ops.explicit import explicit_sharding
from capibara.ops.fft import matmul, plain, specs
from capibara.ops.fft.parallel import along_split
from capibara.ops.fft.problem import NAME, FFTProblem, alike_in_speed, prepare, whole
from capibara.ops.registry import Implementation, Op, public
from capibara.ops.tuning import Tuning

__all__ = ["radix_optimized_fft"]


def _undivided(problem: FFTProblem) -> list[str]:
    if "use_parallel" not in problem.asked:
        return []
    return [
        "use_parallel=True has no effect: signal lies on one device. Remedy: jax.device_put(signal, "
        "NamedSharding(mesh, …)) first, split in a transformed dimension; or use_parallel=False."
    ]


def _of_xla(problem: FFTProblem) -> list[str]:
    ignored = [] if problem.radix_factors is None else [f"radix_factors={list(problem.radix_factors)}"]
    ignored += [f"precision={problem.precision!r}"] if "precision" in problem.asked else []
    if not ignored or problem.implementation != "auto":
        return _undivided(problem)
    return [
        f"{' and '.join(ignored)} {'have' if ignored[1:] else 'has'} no effect: XLA's transform runs, which is faster "
        "here and has neither radices nor bfloat16. Remedy: implementation='matmul', or leave them out.",
        *_undivided(problem),
    ]


OP = Op(
    NAME,
    prepare,
    [
        # By the compiler's own estimates for a TPU v4 it takes between 0.9 (some powers of 2) and 0.03 (primes) of the
        # cycles of XLA's transform; on CPUs it was measured to take several times as long.
        Implementation(
            "matmul",
            {"forward": matmul.forward},
            ("tpu",),
            matmul.check,
            tuned_on=("cpu", "cuda", "rocm"),
            tunables={"most_radix": (16, 32, 64, 128, 256)},
            remarks=_undivided,
        ),
        Implementation("xla", {"forward": plain.xla}, remarks=_of_xla),
        Implementation("reference", {"forward": plain.reference}),
    ],
    Tuning(lambda: specs.SPECS, specs.arguments, alike_in_speed),
)

Signal = jax.Array | tuple[jax.Array, jax.Array]


@functools.partial(jax.jit, static_argnums=0)
def _run(problem: FFTProblem, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return OP.run("forward", problem, *arrays)


def _transform(problem: FFTProblem, arrays: Sequence[Any]) -> tuple[jax.Array, ...]:
    """The transform of arrays that lie here, or anywhere that XLA takes care of."""
    arrays = [jnp.asarray(x) for x in arrays]
    if 0 in problem.shape:
        zero = jnp.zeros(problem.out_shape, problem.out_dtype)
        return matmul.join(problem, zero, None if problem.real and problem.inverse else zero)
    found = explicit_sharding(*arrays)
    if found is None:
        return _run(problem, *arrays)
    spec = [*found.spec, *[None] * (len(problem.shape) - len(found.spec))]
    for axis in problem.axes:
        spec[axis] = None
    # XLA's transforms on CPUs fail where the partitioner gathers their operand, so it is gathered before.
    whole_axes = NamedSharding(found.mesh, PartitionSpec(*spec))
    arrays = [jax.sharding.reshard(x, whole_axes) for x in arrays]
    explicit = tuple(
        n
        for n, kind in zip(found.mesh.axis_names, found.mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    )
    inner: Any = jax.sharding.auto_axes(
        functools.partial(_run, problem),
        axes=explicit,
        out_sharding=whole_axes,
    )
    return inner(*arrays)


def _distributed(
    problem: FFTProblem, splits: tuple[tuple[int, Axis], ...], *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """The transform of blocks inside ``shard_map``; ``splits`` says which dimensions the blocks split, over what."""

    def local(parts: list[jax.Array], axes: Any, real: bool = False, length: Any = None) -> list[jax.Array]:
        signal = parts[0] if len(parts) == 1 else tuple(parts)
        inner, given = prepare(
            signal,
            problem.radix_factors,
            precision=problem.precision,
            axis=axes,
            length=length,
            inverse=problem.inverse,
            real=real,
            norm=problem.norm,
            implementation=problem.implementation,
        )
        return list(_transform(inner, given))

    parts = list(arrays)
    split = dict(splits)
    rest = [(a, n) for a, n in zip(problem.axes, problem.lengths, strict=True) if a not in split]

    def whole_axes(parts: list[jax.Array]) -> list[jax.Array]:
        if not rest:
            return parts
        return local(parts, tuple(a for a, _ in rest), problem.real, tuple(n for _, n in rest))

    late = problem.real and problem.inverse
    if not late:
        parts = whole_axes(parts)
    for axis, names in splits:
        parts = along_split(parts, axis, names, problem.inverse, lambda x, a: local(x, a))
    if late:
        parts = whole_axes(parts)
    return tuple(x.astype(problem.out_dtype) if x.dtype.kind != "c" else x for x in parts)


def _inside(
    problem: FFTProblem, arrays: Sequence[Any], names: Axis, split_axis: Any, length: Any
) -> tuple[jax.Array, ...]:
    axis = problem.axes[0]
    if split_axis is not None:
        (axis,) = whole("split_axis", (split_axis,))
        if not -len(problem.shape) <= axis < len(problem.shape):
            raise OpShapeError(
                f"{NAME}: split_axis must be a dimension of signal {problem.shape}, got {split_axis!r}"
            )
        axis %= len(problem.shape)
    devices = lax.axis_size(names)
    if axis not in problem.axes or devices == 1:
        return _transform(problem, arrays)
    if problem.real and axis == problem.axes[-1]:
        raise OpValueError(
            f"{NAME}: half a spectrum cannot be split evenly, and real=True halves dimension {axis}, which is split "
            f"over {names!r}. Remedy: real=False, or split another dimension (split_axis=…) than the last of axis."
        )
    whole_size = problem.shape[axis] * devices
    if length is not None and problem.lengths[problem.axes.index(axis)] != whole_size:
        raise OpValueError(
            f"{NAME}: a dimension that is split cannot be cropped or padded: length must be None or {whole_size} in "
            f"dimension {axis}, got {length!r}"
        )
    return _distributed(problem, ((axis, names),), *(jnp.asarray(x) for x in arrays))


@functools.lru_cache(maxsize=128)
def _over_shards(
    problem: FFTProblem, splits: tuple[tuple[int, Axis], ...], mesh: Any, spec: PartitionSpec, count: int
) -> Any:
    half = problem.real and not problem.inverse and problem.axes[-1] in dict(splits)
    inner = problem
    if half:
        inner = dataclasses.replace(problem, real=False)
    mapped = jax.shard_map(
        functools.partial(_distributed, inner, splits),
        mesh=mesh,
        in_specs=(spec,) * count,
        out_specs=spec,
        check_vma=False,
    )

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        out = mapped(*arrays)
        if not half:
            return out
        return tuple(matmul.fit(x, problem.axes[-1], problem.lengths[-1] // 2 + 1) for x in out)

    return jax.jit(run)


def _on_mesh(
    problem: FFTProblem, arrays: Sequence[Any], names: Axis | None, length: Any
) -> tuple[jax.Array, ...] | None:
    """The transform of arrays that are split over a mesh in a transformed dimension; None where they are not."""
    first = arrays[0]
    if isinstance(first, Tracer) and explicit_sharding(first) is None and names is None:
        return None  # where it lies is for XLA to say
    splits: list[tuple[int, Axis]] = []
    sharding: NamedSharding | None = None
    for axis in problem.axes:
        found = placement.split_over(NAME, first, None, axis)
        if found is not None:
            sharding = found[0]
            splits.append((axis, found[1]))
    if names is not None:
        placement.split_over(NAME, first, names)  # refuses names that the mesh does not have
        if (
            not isinstance(getattr(first, "sharding", None), NamedSharding)
            and explicit_sharding(first) is None
        ):
            raise OpValueError(
                f"{NAME}: there is no mesh axis {names!r} here: signal lies on one device. Remedy: axis_name=None, or "
                f"jax.device_put(signal, NamedSharding(mesh, …)) first."
            )
        asked = {names} if isinstance(names, str) else set(names)
        splits = [
            (a, over) for a, over in splits if asked >= ({over} if isinstance(over, str) else set(over))
        ]
    unfit = problem.real and problem.inverse and problem.axes[-1] in dict(splits)
    if not splits or length is not None or unfit:
        return None
    assert sharding is not None
    return _over_shards(problem, tuple(splits), sharding.mesh, sharding.spec, len(arrays))(*arrays)


@public(OP)
def radix_optimized_fft(
    signal: Signal,
    radix_factors: Sequence[int] | None = None,
    use_parallel: bool = False,
    precision: Any = None,
    *,
    axis: int | Sequence[int] = -1,
    length: int | Sequence[int] | None = None,
    inverse: bool = False,
    real: bool = False,
    norm: str = "backward",
    axis_name: str | Sequence[str] | None = None,
    split_axis: int | None = None,
    implementation: str = "auto",
) -> Any:
    """The discrete Fourier transform, of any length, along one or several axes.

    Equivalent JAX: ``jnp.fft.fftn(signal, length, axis, norm)``; with ``inverse`` ``ifftn``, with ``real`` ``rfftn``,
    with both ``irfftn``.

    There are two implementations. ``"matmul"`` splits the length into radices, each a product with a matrix of roots
    of unity, on real and imaginary parts: it supports bfloat16 and every length (by Bluestein's convolution if the
    radices do not cover it). ``"xla"`` is ``jax.numpy.fft``, in float32 or float64. ``"auto"`` chooses the first on
    TPUs, where XLA has no bfloat16 transform, and the second elsewhere: on CPUs it was measured to be faster.

    Differentiable in both modes, to any order. Works under ``jit``, ``vmap`` and inside ``jax.shard_map``.

    Args:
      signal: a real or complex array, or a pair ``(real part, imaginary part)`` of arrays of the same floating-point
        dtype, which returns a pair: JAX has no 16-bit complex dtype.
      radix_factors: the radices that may be used, each any number of times; if their product is the length, exactly
        these in this order. ``None``: the cheapest by a cost model of a TPU, at most 256. Only for ``"matmul"``.
      use_parallel: whether a transformed dimension that is sharded over devices is transformed without gathering it,
        by all-to-alls. Inside ``jax.shard_map`` this is dimension ``split_axis``, sharded evenly over ``axis_name``;
        each device gets its block of the spectrum. Elsewhere it follows from the sharding of ``signal``, and the
        spectrum is sharded like the signal; under ``jit`` this needs a mesh with explicit axes, otherwise XLA
        decides. It has no effect on one device. ``False``: inside ``jax.shard_map`` each device transforms its own
        part, and elsewhere XLA gathers sharded dimensions.
      precision: the dtype to which factors of products are rounded: ``"bfloat16"``, ``"float32"`` or ``"float64"``,
        as a string or dtype; sums are in float32 or float64. ``None``: the signal's own (float32 for float16).
        ``"xla"`` has no bfloat16 and computes in float32.
      axis: the dimension or dimensions to transform.
      length: the signal's length in each of them, to which it is cropped or zero-padded (NumPy's ``n`` or ``s``).
      inverse: the inverse transform.
      real: the signal is real, and the result is the half ``length // 2 + 1`` of its spectrum along the last of
        ``axis``; with ``inverse``, that half is the input. The length is then ``2 (size - 1)`` unless ``length`` says
        otherwise.
      norm: ``"backward"`` (the inverse is divided by the length), ``"ortho"`` (each by its root) or ``"forward"``.
      axis_name: the mesh axis or axes of ``use_parallel``; by default all axes of the ``shard_map`` around the call,
        or those that ``signal`` is sharded over.
      split_axis: the dimension that is sharded inside ``jax.shard_map``; by default the first of ``axis``.
      implementation: ``"auto"``, ``"matmul"``, ``"xla"`` or ``"reference"`` (one product with the whole matrix).

    Returns:
      An array of complex64 (complex128 for 64 bits), or a pair in the pair's dtype; with ``real`` and ``inverse`` a
      real array.

    The error, as ``norm(got - exact) / norm(exact)``, for each stage of radices (a Bluestein transform has about six):
    at most 1e-6 in float32, 1e-15 in float64 and 6e-3 in bfloat16. NaN and infinity propagate to everything that
    depends on them, as in NumPy.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
      NoImplementationError: ``implementation="matmul"`` for lengths of more than 2²⁸.

    Source: Cooley and Tukey 1965; the permutation-free arrangement is Stockham's (Cochran et al. 1967, "What is the
    fast Fourier transform?"); other lengths by Bluestein 1970. Over devices: Bailey 1990, "FFTs in external or
    hierarchical memory".
    """
    OP.check_name(implementation)
    problem, arrays = OP.prepare(
        signal,
        radix_factors,
        use_parallel,
        precision,
        axis=axis,
        length=length,
        inverse=inverse,
        real=real,
        norm=norm,
        implementation=implementation,
    )
    out = None
    if use_parallel:
        names = placement.check_axis_name(NAME, axis_name)
        bound = placement.bound_axis(NAME, names, needed=False)
        if bound is not None:
            out = _inside(problem, arrays, bound, split_axis, length)
        else:
            if split_axis is not None:
                raise OpValueError(
                    f"{NAME}: split_axis={split_axis!r} is for inside jax.shard_map; here the array's sharding says it"
                )
            out = _on_mesh(problem, arrays, names, length)
    elif axis_name is not None or split_axis is not None:
        raise OpValueError(f"{NAME}: axis_name and split_axis are for use_parallel=True, which is False")
    out = _transform(problem, arrays) if out is None else out
    return out if len(out) == 2 else out[0]
