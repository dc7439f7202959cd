"""``lax.scan`` for any step, parallel if the step is affine in its carry.

The step is traced by ``lax.scan`` itself, so arguments, results, promotions and errors are the same; the loop is then
extracted from the trace and run differently. The parts of the carry are solved one after the other: a part whose new
value is affine in itself (see :mod:`capibara.ops.scan.affine`) is a linear recurrence, and is computed for all steps
of a segment at once; from then on it is treated as an input, which may enter the other parts in any way. The outputs
are then computed for all steps of a segment at once, however they depend on the carry.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax

from capibara.ops.errors import OpTypeError
from capibara.ops.one_device import typed_as
from capibara.ops.registry import Implementation, Op, public
from capibara.ops.scan import specs
from capibara.ops.scan.affine import bind
from capibara.ops.scan.linear import check_segments
from capibara.ops.scan.recurrence import takes_native
from capibara.ops.scan.stages import Loop, Stage, recognise, solve
from capibara.ops.tuning import Tuned, Tuning

__all__ = ["parallel_scan"]

SEGMENT_MIB = 16
# The same for the compiled loop, which is limited by memory: cutting and joining segments would cost as much again.
NATIVE_SEGMENT_MIB = 256


@dataclass(frozen=True, eq=False)
class ParallelProblem:
    """A traced scan. ``refusal`` says why the step is not treated as affine; ``stages`` is then empty."""

    outer: Any  # the jaxpr around the scan
    loop: Loop | None  # the scan in it
    out_tree: Any
    arrays: tuple[Any, ...]  # the inputs of ``outer``
    stages: tuple[Stage, ...]
    refusal: str | None
    effects: bool
    num_segments: int | None
    use_checkpointing: bool
    implementation: str
    segment_mib: int | None = (
        None  # of the states of a segment, where the caller does not say how many segments
    )
    tuned: Tuned | None = None

    @property
    def carry(self) -> list[Any]:
        """The types of the parts of the carry."""
        return [] if self.loop is None else self.loop.avals

    @property
    def traced(self) -> Loop:
        assert self.loop is not None
        return self.loop

    @functools.cached_property
    def affine(self) -> Any:
        """The jaxpr of the affine form of all steps, or the reason why there is none."""
        return _attempt(_affine_form, self, False, SEGMENT_MIB)

    @functools.cached_property
    def native(self) -> Any:
        """The same with the compiled loop."""
        return _attempt(_affine_form, self, True, NATIVE_SEGMENT_MIB)

    @property
    def dtype(self) -> str:
        return str(self.carry[0].dtype) if self.carry else "none"


def _default_segments(p: ParallelProblem, length: int, most: int) -> int:
    if not p.stages:
        return max(1, math.isqrt(length))
    size = length * sum(a.size * a.dtype.itemsize for a in p.carry)
    return max(1, min(-(-size // ((p.segment_mib or most) << 20)), length))


def alike_in_speed(p: ParallelProblem) -> dict[str, int | str] | None:
    """What determines which segments are fast; None for steps that are not affine, or segments that are given."""
    if p.loop is None or not p.stages or p.num_segments is not None or not p.use_checkpointing:
        return None
    if any(stage.cleared for stage in p.stages):
        return None  # what was fastest for other steps must not choose a form with other infinities for these
    return {
        "steps": p.loop.length,
        "numbers": sum(a.size for a in p.carry),
        "parts": "+".join(stage.kind for stage in p.stages),
    }


def _segmented(segment: Callable[..., Any], p: ParallelProblem, *arrays: Any, most: int = SEGMENT_MIB) -> Any:
    """The traced scan, segment by segment; ``segment(steps, consts, first, xs)`` gives the last carry and outputs."""
    loop = p.traced
    n, carry, length = loop.consts, loop.carry, loop.length
    count = 1 if not p.use_checkpointing else p.num_segments or _default_segments(p, length, most)
    count = _dividing(length, min(count, length))
    size = length // count

    def run(*values: Any) -> list[Any]:
        consts, first, xs = list(values[:n]), list(values[n : n + carry]), list(values[n + carry :])
        if loop.reverse:
            xs = [jnp.flip(x, 0) for x in xs]
        kept = [v.aval for v in loop.body.jaxpr.outvars[:carry]]

        def one(steps: int, consts: Any, first: Any, xs: Any) -> Any:
            last, ys = segment(steps, consts, first, xs)
            return [typed_as(a, v.astype(a.dtype)) for v, a in zip(last, kept, strict=True)], ys

        if count == 1:
            last, ys = one(length, consts, first, xs)
        else:
            whole = count * size
            cut = [x[:whole].reshape(count, size, *x.shape[1:]) for x in xs]
            last, ys = _pieces(functools.partial(one, size), consts, first, cut, count, math.isqrt(length))
            ys = [y.reshape(whole, *y.shape[2:]) for y in ys]
            if whole < length:
                rest = jax.checkpoint(functools.partial(one, length - whole))
                last, more = rest(consts, last, [x[whole:] for x in xs])
                ys = [jnp.concatenate(pair) for pair in zip(ys, more, strict=True)]
        if loop.reverse:
            ys = [jnp.flip(y, 0) for y in ys]
        return [*last, *ys]

    return _around(p, run, *arrays)


def _dividing(length: int, count: int) -> int:
    """The number nearest to ``count`` that divides the steps, up to a factor of 2; ``count`` where there is none.

    Steps that are left over would need copies of all inputs and outputs.
    """
    if count == 1:
        return 1
    every = (n for more in range(count + 1) for n in (count + more, count - more))
    return next((n for n in every if max(2, count / 2) <= n <= 2 * count and length % n == 0), count)


def _pieces(one: Callable[..., Any], consts: Any, first: Any, xs: Any, count: int, root: int) -> Any:
    """``one`` of each of ``count`` pieces; for gradients only the carries between them are kept.

    With far more pieces than the root of the steps these would take more memory than the pieces save: then only those
    between so many groups of pieces.
    """
    part = jax.checkpoint(one)
    groups = next(n for n in range(root, 0, -1) if count % n == 0) if count > 2 * root else 1
    if groups == 1:
        return lax.scan(lambda h, x: part(consts, h, x), first, xs, length=count)
    inner = count // groups
    group = jax.checkpoint(lambda consts, h, x: lax.scan(lambda h, x: part(consts, h, x), h, x, length=inner))
    cut = [x.reshape(groups, inner, *x.shape[1:]) for x in xs]
    last, ys = lax.scan(lambda h, x: group(consts, h, x), first, cut, length=groups)
    return last, [y.reshape(count, *y.shape[2:]) for y in ys]


def _around(p: ParallelProblem, run: Callable[..., list[Any]], *arrays: Any) -> Any:
    """What stands around the scan in the trace, with ``run`` in its place."""
    jaxpr = p.outer.jaxpr
    arrays = tuple(v if isinstance(v, jax.Array) else jnp.asarray(v) for v in arrays)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), arrays, strict=True))

    def read(v: Any) -> Any:
        return v.val if hasattr(v, "val") else env[v]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        out = run(*values) if p.loop is not None and eqn is p.loop.eqn else bind(eqn, *values)
        env.update(zip(eqn.outvars, out, strict=True))
    return jax.tree.unflatten(p.out_tree, [read(v) for v in jaxpr.outvars])


def _attempt(analysis: Callable[..., Any], *args: Any) -> Any:
    """``analysis(*args)``; where that fails the step runs one by one, and ``explain`` gives the reason, a string."""
    try:
        return analysis(*args)
    except Exception as error:
        return f"the analysis failed ({type(error).__name__}: {str(error).partition(chr(10))[0]})"


def _affine_form(p: ParallelProblem, native: bool, most: int) -> Any:
    segment = functools.partial(solve, p.traced.body, p.stages, native)
    return jax.make_jaxpr(functools.partial(_segmented, segment, p, most=most))(*p.arrays)


def _affine(p: ParallelProblem, *arrays: Any) -> Any:
    return jax.tree.unflatten(p.out_tree, jax.extend.core.jaxpr_as_fun(p.affine)(*arrays))


def _native(p: ParallelProblem, *arrays: Any) -> Any:
    return jax.tree.unflatten(p.out_tree, jax.extend.core.jaxpr_as_fun(p.native)(*arrays))


def _sequential(p: ParallelProblem, *arrays: Any) -> Any:
    run: Any = jax.extend.core.jaxpr_as_fun(p.traced.body)

    def segment(steps: int, consts: Any, first: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            out = run(*consts, *h, *x)
            return out[: len(h)], out[len(h) :]

        return lax.scan(step, first, xs, length=steps)

    return _segmented(segment, p, *arrays)


def _reference(p: ParallelProblem, *arrays: Any) -> Any:
    return _around(p, lambda *values: bind(p.traced.eqn, *values), *arrays)


def _takes_affine(p: ParallelProblem) -> None:
    _takes_stages(p)
    _takes_form(p.affine)


def _takes_stages(p: ParallelProblem) -> None:
    _takes_segments(p)
    _takes_form(p.refusal)


def _takes_form(found: Any) -> None:
    if isinstance(found, str):
        raise NotImplementedError(f"does not find the step affine in its carry: {found}")


def _takes_native(p: ParallelProblem) -> None:
    _takes_stages(p)
    for stage in p.stages:
        aval = p.carry[stage.leaf]
        if stage.kind != "given":
            takes_native(str(aval.dtype), stage.kind == "matrix", None)
    if p.implementation == "auto" and any(stage.cleared for stage in p.stages):
        raise NotImplementedError(
            "would select by a product with 0, which does not clear a carry that has become infinite: ask for it by "
            "name where carries stay finite"
        )
    if all(stage.kind == "given" for stage in p.stages):
        raise NotImplementedError("has nothing to solve: no part of the carry depends on itself")
    _takes_form(p.native)


def _takes_segments(p: ParallelProblem) -> None:
    if p.loop is None:
        raise NotImplementedError("needs a traced loop, and there is none (jax.disable_jit)")
    if p.effects:
        raise NotImplementedError("does not take steps with side effects, whose order it would change")
    if p.loop.length == 0:
        raise NotImplementedError("has nothing to do for no steps")


def _prepare(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    *,
    num_segments: int | None = None,
    use_checkpointing: bool = True,
    length: int | None = None,
    reverse: bool = False,
    implementation: str = "auto",
) -> tuple[ParallelProblem, tuple[Any, ...]]:
    op = "parallel_scan"
    if not callable(f):
        raise OpTypeError(f"{op}: f must be a function (carry, x) -> (carry, y), got {type(f).__name__}")
    num_segments = check_segments(op, num_segments)
    for name, value in (("use_checkpointing", use_checkpointing), ("reverse", reverse)):
        if not isinstance(value, bool):
            raise OpTypeError(f"{op}: {name} must be True or False, got {value!r}")

    def whole(init: Any, xs: Any) -> Any:
        return lax.scan(f, init, xs, length=length, reverse=reverse)

    outer, shapes = jax.make_jaxpr(whole, return_shape=True)(init, xs)
    loop = next((Loop.of(e) for e in outer.jaxpr.eqns if e.primitive.name == "scan"), None)
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        loop = None
    found = () if loop is None or implementation == "reference" else _attempt(recognise, loop)
    stages, refusal = ((), found) if isinstance(found, str) else (found, None)
    effects = loop is not None and bool(loop.body.effects)
    arrays = (*outer.consts, *jax.tree.leaves((init, xs)))
    problem = ParallelProblem(
        outer,
        loop,
        jax.tree.structure(shapes),
        arrays,
        stages,
        refusal,
        effects,
        num_segments,
        use_checkpointing,
        implementation,
    )
    return problem, arrays


_SEGMENTS: dict[str, tuple[int | str, ...]] = {"segment_mib": (1, 4, 16, 64)}

OP = Op(
    "parallel_scan",
    _prepare,
    [
        Implementation("native", {"forward": _native}, ("cpu",), _takes_native, portable=False),
        # On CPUs XLA's loop costs nanoseconds a step: measured, the composition takes up to twice its time there.
        Implementation(
            "affine",
            {"forward": _affine},
            ("tpu", "cuda", "rocm"),
            _takes_affine,
            tuned_on=("cpu",),
            tunables=_SEGMENTS,
        ),
        Implementation("sequential", {"forward": _sequential}, check=_takes_segments, tunables=_SEGMENTS),
        Implementation("reference", {"forward": _reference}),
    ],
    Tuning(lambda: specs.PARALLEL, specs.parallel_arguments, alike_in_speed),
    own_program=False,  # a problem holds the traced step
)


@public(OP)
def parallel_scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    *,
    num_segments: int | None = None,
    use_checkpointing: bool = True,
    length: int | None = None,
    reverse: bool = False,
    implementation: str = "auto",
) -> tuple[Any, Any]:
    """``jax.lax.scan(f, init, xs)``, parallel if ``f`` is affine in its carry.

    This is determined from the primitives in ``f``, never from samples: additions, products with values that do not
    depend on the carry (elementwise, or matrices along one axis), selections, sums, changes of shape. Parts of the
    carry may depend on other parts, in any way if those can be solved first. The outputs may be any function of the
    carry. All other steps run sequentially; ``capibara.ops.explain(parallel_scan, f, init, xs)`` says which
    implementation runs, and why.

    Affine steps are computed in a different order than sequential ones: sums and products of floats are rounded
    differently (the states of a growing recurrence can differ as much as they are sensitive to rounding), and the
    states of narrow floats are kept in float32. The coefficients of a step are combined first, so that infinities can
    arise differently (``(c * 1e30) * 1e-30`` does not overflow, ``c * 1e30 * 1e30`` of 0 is NaN). A carry that has
    become infinite is not cleared by a selection (``jnp.where(reset, x, a * c)``), which becomes a product with 0: on
    CPUs such steps run sequentially unless ``"native"`` is requested by name; elsewhere use
    ``implementation="sequential"`` for them. Integers are exact, and so are all sequential steps.

    Args:
      f: ``(carry, x) -> (carry, y)``, as for ``lax.scan``.
      init: the first carry, a pytree. xs: a pytree of arrays ``[steps, …]``, or None with ``length``.
      num_segments: segments of the sequence that are computed one after the other; the carry between them is stored,
        and their inner states are recomputed for gradients, so that gradients need memory in proportion to ``steps /
        num_segments`` (and to ``num_segments`` carries; far beyond the square root of the steps, to about that root,
        for one more pass). If it does not divide the steps, the nearest number that does is used, up to a factor of
        2. ``None``: about the square root of the steps for sequential steps; for affine ones as few as keep a
        segment's states below 16 MiB (``"native"``: 256 MiB), or what ``capibara tune`` has measured to be faster (64
        MiB at most).
      use_checkpointing: False stores everything for the gradient, in one segment, regardless of ``num_segments``.
      length, reverse: as for ``lax.scan``.
      implementation: ``"auto"`` (``"affine"`` on TPUs and GPUs if possible; on CPUs ``"native"``, a compiled loop
        over affine steps that are elementwise in float32; otherwise ``"sequential"``), or one of these, or
        ``"reference"`` (``lax.scan``).

    Returns:
      the last carry and the outputs ``[steps, …]``, as ``lax.scan``.

    Raises:
      OpTypeError, OpValueError: an option is invalid; the message names it. NoImplementationError: ``"affine"`` was
      requested, and the step is not affine. The errors of ``lax.scan`` for invalid ``f``, ``init`` and ``xs``.

    Source: Blelloch 1990, "Prefix Sums and Their Applications"; Griewank 1992, "Achieving logarithmic growth of
    temporal and spatial complexity in reverse automatic differentiation", for the segments.
    """
    OP.check_name(implementation)
    problem, arrays = OP.prepare(
        f,
        init,
        xs,
        num_segments=num_segments,
        use_checkpointing=use_checkpointing,
        length=length,
        reverse=reverse,
        implementation=implementation,
    )
    return OP.run("forward", problem, *arrays)
