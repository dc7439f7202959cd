"""Gradient checkpointing of any JAX function, without changing it.

What is kept for the backward pass of a function are the results of almost all its operations. To keep less, a
function's program is cut into segments, and each is marked with ``jax.checkpoint``: only what goes from one segment to
the next is kept, and the rest is computed again. For a program of *n* equal parts about √n segments need least (Chen et
al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174). The cuts are where the fewest bytes cross,
which in a network of blocks is between blocks. A loop (``lax.scan``) has its cuts already: between its iterations.

When straight code is computed again is for the compiler to decide. That for CPUs does so early, so that less is saved
there than between the iterations of a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

from capibara.jax_versions import scan_counts
from capibara.ops.scan.affine import bind

__all__ = ["recomputed"]

_CALLS = ("jit", "pjit", "closed_call")
_HEAVY = ("dot_general", "conv_general_dilated", "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map")
_FEW = 8  # operations that are not worth a segment of their own


def recomputed(function: Callable[..., Any], policy: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The same function of pytrees of arrays; its backward pass computes intermediate values again.

    Equivalent JAX, for a function that is a chain of blocks: ``jax.checkpoint`` around every few of them, and around
    the body of each ``lax.scan``.

    Args:
      function: of pytrees of arrays.
      policy: what of a segment is kept nevertheless, as for ``jax.checkpoint``; None: nothing.
    """

    @wraps(function)
    def run(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        closed, shape = jax.make_jaxpr(
            lambda *leaves: function(*jax.tree.unflatten(tree, leaves)), return_shape=True
        )(*leaves)
        out = _evaluate(closed.jaxpr, closed.consts, leaves, policy)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return run


def _evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], policy: Any) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for equations, alone in _runs(jaxpr.eqns):
        if alone:
            (equation,) = equations
            inputs = [_read(values, x) for x in equation.invars]
            inner = equation.params.get("jaxpr")
            if equation.primitive.name == "scan":
                found = _scan(equation, inputs, policy)
            else:
                found = _evaluate(inner.jaxpr, inner.consts, inputs, policy)
            values.update(zip(equation.outvars, found, strict=True))
            continue
        later = _needed_after(jaxpr, equations[-1])
        segments = _segments(equations, later)
        needed = [later]
        for segment in reversed(segments[1:]):
            needed.insert(0, needed[0] | {x for e in segment for x in e.invars if not isinstance(x, Literal)})
        for n, (segment, used) in enumerate(zip(segments, needed, strict=True)):
            # The backward pass begins with the last one: computing it again would keep nothing less.
            last = equations[-1] is jaxpr.eqns[-1] and 0 < n == len(segments) - 1
            _run_segment(segment, values, used, policy, again=not last)
    return [_read(values, x) for x in jaxpr.outvars]


def _runs(equations: Sequence[Any]) -> list[tuple[list[Any], bool]]:
    """Straight code, and single loops or calls that have cuts inside."""
    runs: list[tuple[list[Any], bool]] = []
    for equation in equations:
        if _has_cuts(equation):
            runs.append(([equation], True))
        elif runs and not runs[-1][1]:
            runs[-1][0].append(equation)
        else:
            runs.append(([equation], False))
    return runs


def _has_cuts(equation: Any) -> bool:
    name = equation.primitive.name
    if name == "scan":
        return True
    inner = equation.params.get("jaxpr") if name in _CALLS else None
    if inner is None or not hasattr(inner, "consts"):
        return False
    heavy = sum(each.primitive.name in _HEAVY for each in inner.jaxpr.eqns)
    return heavy > 1 or any(_has_cuts(each) for each in inner.jaxpr.eqns)


def _scan(equation: Any, inputs: list[Any], policy: Any) -> list[Any]:
    given = equation.params
    constants, carried = scan_counts(equation)
    fixed, first, rows = (
        inputs[:constants],
        inputs[constants : constants + carried],
        inputs[constants + carried :],
    )
    body = jaxpr_as_fun(given["jaxpr"])

    def step(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        out = jax.checkpoint(lambda *arrays: body(*arrays), policy=policy, prevent_cse=False)(
            *fixed, *carry, *row
        )
        return list(out[:carried]), list(out[carried:])

    options = {"length": given["length"], "reverse": given["reverse"], "unroll": given["unroll"]}
    carry, stacked = lax.scan(step, first, rows, **options)
    return [*carry, *stacked]


def _needed_after(jaxpr: Any, last: Any) -> set[Any]:
    """What is used after an equation."""
    needed = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    for equation in reversed(jaxpr.eqns):
        if equation is last:
            break
        needed.update(x for x in equation.invars if not isinstance(x, Literal))
    return needed


def _segments(equations: list[Any], later: set[Any]) -> list[list[Any]]:
    """Cut straight code where the fewest bytes cross."""
    heavy = sum(equation.primitive.name in _HEAVY for equation in equations)
    count = math.isqrt(heavy)
    if count < 2 or len(equations) < 2 * _FEW:
        return [equations]
    crossing, made = _bytes_across(equations, later)
    total, cuts = made[-1], [0]
    for n in range(1, count):
        low, high = ((n + side) * total / count for side in (-0.5, 0.5))
        inside = [i for i in range(cuts[-1] + 1, len(equations)) if low <= made[i - 1] < high]
        if inside:
            cuts.append(min(inside, key=lambda i: crossing[i]))
    return [equations[a:b] for a, b in zip(cuts, [*cuts[1:], len(equations)], strict=True)]


def _bytes_across(equations: list[Any], later: set[Any]) -> tuple[list[int], list[int]]:
    """For each place before an equation the bytes that are made before and used after; bytes made so far."""
    last_use: dict[Any, int] = {}
    for i, equation in enumerate(equations):
        for x in equation.invars:
            if not isinstance(x, Literal):
                last_use[x] = i
    changes, made, total = [0] * (len(equations) + 2), [], 0
    for i, equation in enumerate(equations):
        for x in equation.outvars:
            size = _bytes(x)
            total += size
            end = len(equations) if x in later else last_use.get(x, i)
            changes[i + 1] += size
            changes[end + 1] -= size
        made.append(total)
    crossing, live = [], 0
    for change in changes[: len(equations)]:
        live += change
        crossing.append(live)
    return crossing, made


def _bytes(x: Any) -> int:
    size = getattr(x.aval, "size", 0)
    return int(size * getattr(getattr(x.aval, "dtype", None), "itemsize", 0))


def _run_segment(
    equations: list[Any], values: dict[Any, Any], used: set[Any], policy: Any, *, again: bool
) -> None:
    made = {x for equation in equations for x in equation.outvars}
    inputs = list(
        dict.fromkeys(x for e in equations for x in e.invars if not isinstance(x, Literal) and x not in made)
    )
    outputs = [x for e in equations for x in e.outvars if x in used]

    def segment(*given: Any) -> list[Any]:
        here = dict(zip(inputs, given, strict=True))
        for equation in equations:
            found = bind(equation, *(_read(here, x) for x in equation.invars))
            here.update(zip(equation.outvars, found, strict=True))
        return [here[x] for x in outputs]

    run = jax.checkpoint(segment, policy=policy) if again else segment
    found = run(*(values[x] for x in inputs))
    values.update(zip(outputs, found, strict=True))


def _read(values: dict[Any, Any], x: Any) -> Any:
    return x.val if isinstance(x, Literal) else values[x]
