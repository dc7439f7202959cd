"""Products of the same rows with several matrices in one call.

Each call of a compiled kernel wakes other threads and waits for them at its end. Between products of a few rows, which
take a tenth of a millisecond, that is felt; so those of the same rows, as of queries, keys and values, become one call.
The matrices stay where they are.

The function is traced, and its equations are evaluated again, products of the same rows at the place of the first one
of them. Primitives say how they are computed together (:func:`joinable`). A matrix of bfloat16 that was made float32
for a product is read as it is stored, where the product can, and so is one that was made of panels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Primitive

from capibara.ops.linalg.panel_operations import matrix_of_panels

__all__ = ["Flat", "Step", "Value", "joinable", "joined", "named", "read_as_stored"]

_CALLS = ("jit", "pjit", "closed_call", "core_call")
# The same of the same operand is computed once: products see their rows through these.
_VIEWS = ("reshape", "squeeze", "convert_element_type")
# Of several products with the same first operand: that operand, the others of each, and the parameters of each. What it
# returns are the results of each; None: they cannot be computed together.
_Together = Callable[[Any, list[list[Any]], list[dict[str, Any]]], list[list[Any]] | None]
_joinable: dict[Primitive, _Together] = {}
_as_stored: dict[Primitive, Callable[[dict[str, Any]], bool]] = {}


def joinable(primitive: Primitive) -> Callable[[_Together], _Together]:
    """Say how equations of a primitive with the same first operand are computed together.

    The decorated function gets that operand, the other operands of each equation, and the parameters of each. It
    returns the results of each, or ``None`` where they have to be computed one by one.
    """

    def register(together: _Together) -> _Together:
        _joinable[primitive] = together
        return together

    return register


def read_as_stored(primitive: Primitive, transposed: Callable[[dict[str, Any]], bool]) -> None:
    """Allow operands after the first to be passed as stored: in bfloat16, or packed into panels.

    Args:
      transposed: from an equation's parameters, whether its unpacked operands are transposed.
    """
    _as_stored[primitive] = transposed


def joined(
    function: Callable[..., Any], arrange: Callable[[Flat, Sequence[Value]], None] | None = None
) -> Callable[..., Any]:
    """The same function of nested arrays, whose products of the same rows are computed together.

    Its results are those of ``function``, bit by bit.

    Args:
      arrange: called with the equations, which it may compute in another way (:attr:`Step.chain`), and the results.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        flat = Flat()
        given = [Value(array, aval=jax.typeof(array)) for array in jax.tree.leaves(args)]
        out = flat.add(closed.jaxpr, closed.consts, given)
        flat.join()
        if arrange is not None:
            arrange(flat, out)
        for step in flat.steps:
            flat.compute(step)
        return jax.tree.unflatten(jax.tree.structure(shape), [value.array for value in out])

    return run


@dataclass(eq=False)
class Value:
    """An array of the program: known, or a result of a step."""

    array: Any = None
    step: Step | None = None
    of_product: bool = False  # whether it depends on a product that may be joined
    aval: Any = None
    stored: Value | None = None  # the same numbers in bfloat16, of which these were made
    made_by: Step | None = None  # unpacks it from panels; only reshapes come in between

    def as_stored(self, transposed: bool) -> Value:
        """The stored form of this matrix, if there is one."""
        value = self.stored or self
        made = value.made_by
        if (
            made is None
            or made.eqn.params["transposed"] != transposed
            or made.outs[0].aval.shape != value.aval.shape
        ):
            return value
        return made.ins[0]


@dataclass(eq=False)
class Step:
    """An equation, and the names that it is computed under (``jax.named_scope``), by which profiles know it."""

    eqn: Any
    ins: list[Value]
    scope: str
    outs: list[Value] = field(default_factory=list)
    together: list[Step] = field(default_factory=list)
    done: bool = False
    chain: Callable[[Flat], None] | None = None
    """What computes it with others."""


class Flat:
    """The equations of a program, those of calls that contain products included."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._views: dict[Any, list[Value]] = {}

    def add(self, jaxpr: Any, consts: Sequence[Any], given: Sequence[Value], outer: str = "") -> list[Value]:
        """The program's results."""
        env: dict[Any, Value] = dict(
            zip(jaxpr.constvars, (Value(c, aval=jax.typeof(c)) for c in consts), strict=True)
        )
        env.update(zip(jaxpr.invars, given, strict=True))

        def read(v: Any) -> Value:
            return Value(v.val, aval=v.aval) if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            if eqn.primitive in _as_stored:
                transposed = _as_stored[eqn.primitive](eqn.params)
                ins[1:] = [value.as_stored(transposed) for value in ins[1:]]
            inner = eqn.params.get("jaxpr") if eqn.primitive.name in _CALLS else None
            scope = _within(outer, str(eqn.source_info.name_stack))
            if inner is not None and _has_products(inner.jaxpr):
                name = eqn.params.get("name")
                scope = scope if name is None else _within(scope, f"jit({name})")
                outs = self.add(inner.jaxpr, inner.consts, ins, scope)
            elif eqn.primitive.name in _VIEWS:
                outs = self._add_view(eqn, ins, scope)
            else:
                outs = self._add_step(eqn, ins, scope)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _add_view(self, eqn: Any, ins: list[Value], scope: str) -> list[Value]:
        same = eqn.primitive, tuple(eqn.params.items()), tuple(map(id, ins))
        if same not in self._views:
            (value,), (out,) = ins, self._add_step(eqn, ins, scope)
            if eqn.primitive.name != "convert_element_type":
                if eqn.params.get("dimensions") is None:  # of a reshape that transposes
                    out.made_by = value.made_by
                if value.stored is not None:
                    (out.stored,) = self._add_view(eqn, [value.stored], scope)
                    out.stored.aval = out.aval.update(dtype=value.stored.aval.dtype)
            elif (value.aval.dtype, out.aval.dtype) == (jnp.bfloat16, jnp.float32):
                out.stored = value
            self._views[same] = [out]
        return self._views[same]

    def _add_step(self, eqn: Any, ins: list[Value], scope: str) -> list[Value]:
        step = Step(eqn, ins, scope)
        touched = eqn.primitive in _joinable or any(value.of_product for value in ins)
        step.outs = [Value(None, step, touched, v.aval) for v in eqn.outvars]
        if eqn.primitive is matrix_of_panels:
            step.outs[0].made_by = step
        self.steps.append(step)
        return step.outs

    def join(self) -> None:
        """Find products of the same rows with matrices that wait for no other product."""
        groups: dict[tuple[Any, int], list[Step]] = {}
        for step in self.steps:
            if step.eqn.primitive in _joinable and not any(value.of_product for value in step.ins[1:]):
                groups.setdefault((step.eqn.primitive, id(step.ins[0])), []).append(step)
        for group in groups.values():
            if len(group) > 1:
                for step in group:
                    step.together = group

    def compute(self, step: Step) -> None:
        """Compute a step, and what it waits for."""
        if step.done:
            return
        if step.chain is not None:
            step.chain(self)
            return
        group = step.together or [step]
        for one in group:
            for value in one.ins:
                if value.step is not None:
                    self.compute(value.step)
        operands = [[value.array for value in one.ins] for one in group]
        params = [one.eqn.params for one in group]
        found = None
        if len(group) > 1:
            together = _joinable[step.eqn.primitive]
            with named(step.scope):
                found = together(operands[0][0], [each[1:] for each in operands], params)
        if found is None:
            found = [_bind(one, each) for one, each in zip(group, operands, strict=True)]
        for one, results in zip(group, found, strict=True):
            for value, array in zip(one.outs, results, strict=True):
                value.array = array
            one.done = True


def _bind(step: Step, operands: list[Any]) -> list[Any]:
    eqn = step.eqn
    with named(step.scope):
        out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _within(outer: str, inner: str) -> str:
    return "/".join(filter(None, (outer, inner)))


def named(scope: str) -> AbstractContextManager[Any]:
    return jax.named_scope(scope) if scope else nullcontext()


def _has_products(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive in _joinable:
            return True
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in _CALLS else None
        if inner is not None and _has_products(inner.jaxpr):
            return True
    return False
