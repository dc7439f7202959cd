"""Solve an affine scan: order the parts of its carry, and solve each for many steps at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from capibara.jax_versions import scan_counts
from capibara.ops.explicit import laid_as
from capibara.ops.scan.affine import Affine, Other, bind, carried, interpret
from capibara.ops.scan.recurrence import previous, recurrence

__all__ = ["Loop", "Stage", "recognise", "solve"]


@dataclass(frozen=True, eq=False)
class Loop:
    """A ``scan`` equation: its body, the jaxpr of one step, and the numbers of constant and carry inputs."""

    eqn: Any
    body: Any
    consts: int
    carry: int
    length: int
    reverse: bool

    @classmethod
    def of(cls, eqn: Any) -> Loop:
        params = eqn.params
        return cls(eqn, params["jaxpr"], *scan_counts(eqn), params["length"], params["reverse"])

    @property
    def avals(self) -> list[Any]:
        """The types of the parts of the carry."""
        return [v.aval for v in self.body.jaxpr.invars[self.consts : self.consts + self.carry]]


@dataclass(frozen=True)
class Stage:
    """A part of the carry that can be solved once the previous ones are: its position and kind of recurrence."""

    leaf: int
    kind: str  # "given" | "diagonal" | "matrix"
    mixed: tuple[int, ...]  # the axes that a matrix acts on
    cleared: bool = False  # a selection takes something else for it in some steps


def recognise(loop: Loop) -> tuple[Stage, ...] | str:
    """The order in which the carry can be solved, or the reason why it cannot."""
    body, consts, carry = loop.body, loop.consts, loop.carry
    avals = [v.aval for v in body.jaxpr.invars]
    stages: list[Stage] = []
    while len(stages) < carry:
        known = {stage.leaf for stage in stages}
        kinds: dict[int, Stage] = {}
        reasons: list[str] = []

        def step(*given: Any, known: Any = known, kinds: Any = kinds, reasons: Any = reasons) -> Any:
            new = _new_carry(body, consts, carry, given, known)
            for leaf in range(carry):
                if leaf not in known:
                    found = _stage(leaf, new[leaf])
                    if isinstance(found, str):
                        reasons.append(found)
                    else:
                        kinds[leaf] = found
            return ()

        jax.eval_shape(step, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        if not kinds:
            return reasons[0]
        stages += kinds.values()
    return tuple(stages)


def _new_carry(body: Any, consts: int, carry: int, given: Sequence[Any], known: Any) -> list[Any]:
    """The new carry of a step, as values that say how they depend on the parts of it that are not yet known."""
    values = list(given)
    for leaf in range(carry):
        if leaf not in known:
            values[consts + leaf] = carried(leaf, body.jaxpr.invars[consts + leaf].aval)
    return interpret(body.jaxpr, body.consts, values)[:carry]


def _stage(leaf: int, value: Any) -> Stage | str:
    """How a part of the carry can be solved now, or why it cannot."""
    if isinstance(value, Other):
        return value.reason
    if not isinstance(value, Affine) or not value.terms:
        return Stage(leaf, "given", ())
    if set(value.terms) != {leaf}:
        return "parts of the carry depend on one another in a circle"
    term = value.terms[leaf]
    mixed = tuple(axis for axis, link in enumerate(term.links) if link != axis)
    if not mixed and not term.inner:
        return Stage(leaf, "diagonal", (), term.cleared)
    every = tuple(range(len(term.shape)))
    apart = all(term.links[axis] is None for axis in mixed)
    if apart and term.inner == mixed and (len(mixed) == 1 or mixed == every):
        return Stage(leaf, "matrix", mixed, term.cleared)
    return "an axis of the carry takes the place of another, or some of several are mixed"


def _dependent(jaxpr: Any, moving: Sequence[bool]) -> list[bool]:
    """Which results depend on inputs that change from step to step."""
    env: dict[Any, bool] = dict(zip(jaxpr.invars, moving, strict=True))
    for eqn in jaxpr.eqns:
        found = any(env.get(v, False) for v in eqn.invars if not hasattr(v, "val"))
        env.update(dict.fromkeys(eqn.outvars, found))
    return [not hasattr(v, "val") and env.get(v, False) for v in jaxpr.outvars]


def _over_steps(step: Callable[..., Any], fixed: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
    """``step`` of every step at once; what is the same for all steps has one only."""
    if not moving:
        return [jnp.asarray(v)[None] for v in step(*fixed)]
    count = len(fixed)
    closed = jax.make_jaxpr(lambda *v: step(*v[:count], *(m[0] for m in v[count:])))(*fixed, *moving)
    depends = _dependent(closed.jaxpr, [False] * count + [True] * len(moving))
    out = jax.vmap(
        step, in_axes=(None,) * count + (0,) * len(moving), out_axes=[0 if d else None for d in depends]
    )(*fixed, *moving)
    return [v if d else v[None] for v, d in zip(out, depends, strict=True)]


def solve(
    body: Any,
    stages: Sequence[Stage],
    native: bool,
    steps: int,
    consts: list[Any],
    first: list[Any],
    xs: list[Any],
) -> tuple[list[Any], list[Any]]:
    """The last carry and the outputs of a number of steps of ``body``, the jaxpr of a scan with an affine step."""
    n, carry = len(consts), len(first)
    before: dict[int, Any] = {}
    after: dict[int, Any] = {}
    for stage in stages:
        order = list(before)

        def step(*values: Any, leaf: int = stage.leaf, order: list[int] = order) -> Any:
            given: list[Any] = [*values[:n], *[None] * carry, *values[n + len(order) :]]
            for k, v in zip(order, values[n : n + len(order)], strict=True):
                given[n + k] = v
            found = _new_carry(body, n, carry, given, order)[leaf]
            if not isinstance(found, Affine):
                return [found]
            offset = jnp.zeros(found.shape, found.dtype) if found.offset is None else found.offset
            if not found.terms:
                return [offset]
            c = found.terms[leaf].coefficients
            return [offset, jnp.ones((1,) * len(found.shape), found.dtype) if c is None else c]

        found = _over_steps(step, consts, [*(before[k] for k in order), *xs])
        h = _states(stage, body.jaxpr.invars[n + stage.leaf].aval, found, first[stage.leaf], steps, native)
        after[stage.leaf] = h
        before[stage.leaf] = previous(h, first[stage.leaf])
    new_vars = body.jaxpr.outvars[:carry]

    def outputs(*values: Any) -> Any:
        # The new carry is known already: what the outputs take from it is not computed again.
        mine = dict(zip(new_vars, values[n + carry : n + 2 * carry], strict=True))
        inputs = [*values[: n + carry], *values[n + 2 * carry :]]
        return _evaluate(body, inputs, mine)[carry:]

    leaves = range(carry)
    moving = [*(before[k] for k in leaves), *(after[k] for k in leaves), *xs]
    ys = _over_steps(outputs, consts, moving)
    ys = [jnp.broadcast_to(y, (steps, *y.shape[1:])) for y in ys]
    return [after[k][-1] for k in leaves], ys


def _evaluate(body: Any, inputs: Sequence[Any], known: dict[Any, Any]) -> list[Any]:
    """The results of a jaxpr in which some variables are known."""
    jaxpr = body.jaxpr
    env = dict(zip(jaxpr.constvars, body.consts, strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))
    # A variable that goes in cannot be replaced: where a part of the carry is handed on its old value is meant.
    known = {v: value for v, value in known.items() if not hasattr(v, "val") and v not in env}

    def read(v: Any) -> Any:
        return v.val if hasattr(v, "val") else env[v]

    for eqn in jaxpr.eqns:
        out = (
            [known[v] for v in eqn.outvars]
            if all(v in known for v in eqn.outvars)
            else bind(eqn, *map(read, eqn.invars))
        )
        for v, value in zip(eqn.outvars, out, strict=True):
            env[v] = known.get(v, value)
    return [read(v) for v in jaxpr.outvars]


def _states(stage: Stage, aval: Any, found: list[Any], first: Any, steps: int, native: bool) -> Any:
    offset = laid_as(aval, jnp.broadcast_to(found[0], (steps, *aval.shape)).astype(aval.dtype))
    if stage.kind == "given":
        return offset
    a = found[1].astype(aval.dtype)
    if stage.kind == "diagonal":
        return recurrence(laid_as(aval, a), offset, first, native=native)[0]
    if len(stage.mixed) > 1 or len(aval.shape) == 1:  # the leaf is one vector
        size = math.prod(aval.shape)
        a = jnp.broadcast_to(a, (a.shape[0], *aval.shape, *aval.shape))
        a = a.reshape(a.shape[0], size, size)
        h = recurrence(a, offset.reshape(steps, size, 1), first.reshape(size, 1), matrix=True)[0]
        return h.reshape(offset.shape)
    axis = min(stage.mixed)
    size = aval.shape[axis]
    # Coefficients that are the same for all entries of the new value have one row.
    a = jnp.broadcast_to(a, (*a.shape[: 1 + axis], size, *a.shape[2 + axis :]))
    a = jnp.moveaxis(a, 1 + axis, -2)
    x, begin = jnp.moveaxis(offset, 1 + axis, -1), jnp.moveaxis(first, axis, -1)
    if all(s == 1 for s in a.shape[1:-2]):  # one matrix for all: the other axes are columns of one product
        columns = jnp.swapaxes(x.reshape(steps, -1, size), 1, 2)
        begin = jnp.swapaxes(begin.reshape(-1, size), 0, 1)
        h = recurrence(a.reshape(a.shape[0], size, size), columns, begin, matrix=True)[0]
        h = jnp.swapaxes(h, 1, 2).reshape(x.shape)
    else:
        h = recurrence(a, x[..., None], begin[..., None], matrix=True)[0][..., 0]
    return jnp.moveaxis(h, -1, 1 + axis)
