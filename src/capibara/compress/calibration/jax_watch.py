"""Inputs of a JAX function's linear layers, seen where they meet a leaf of its parameters.

The function is traced to a jaxpr, and that is evaluated equation by equation with real numbers. With each leaf goes
which of its axes each axis of the value stands for: transposing, converting, reshaping and slicing keep that, and where
a ``dot_general`` sums over axes of a leaf, its other operand holds the inputs. Calls are followed inside (``jit``,
``remat``, functions with derivatives of their own, the branch taken of a ``cond``, every step of a ``scan``); loops by
``while`` are run, but not looked into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from capibara.compress.calibration.activations import Moments, Sums

__all__ = ["watch_jax"]


@dataclass(frozen=True)
class _Leaf:
    """Where a value comes from: for each of its axes the whole axes of the parameter that it runs over, or ``None``."""

    name: str
    sizes: tuple[int, ...]
    axes: tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class _Value:
    array: Any
    leaf: _Leaf | None = None


def watch_jax(
    function: Callable[..., Any], params: Any, batches: Iterator[Any], names: Callable[[tuple[Any, ...]], str]
) -> tuple[int, dict[str, Moments]]:
    """How many batches there were, and the moments by the leaf's name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    known = []
    for path, array in leaves:
        shape = np.shape(array)
        name = names(tuple(_key(p) for p in path))
        leaf = _Leaf(name, shape, tuple((a,) for a in range(len(shape)))) if len(shape) >= 2 else None
        known.append(_Value(array, leaf))
    sums, count = Sums(), 0
    for batch in batches:
        closed = jax.make_jaxpr(function)(params, batch)
        inputs = [*known, *map(_Value, jax.tree.leaves(batch))]
        _Evaluation(sums).run(closed.jaxpr, closed.consts, inputs)
        count += 1
    return count, sums.result()


def _key(entry: Any) -> Any:
    for kind in ("key", "idx", "name"):
        if hasattr(entry, kind):
            return getattr(entry, kind)
    return entry


class _Evaluation:
    def __init__(self, sums: Sums) -> None:
        self.sums = sums

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Value]) -> list[_Value]:
        env: dict[Any, _Value] = dict(zip(jaxpr.constvars, map(_Value, consts), strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(v: Any) -> _Value:
            return _Value(v.val) if hasattr(v, "val") else env[v]

        # A variable is let go after its last use: the activations of a whole model do not fit beside each other.
        last = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not hasattr(v, "val")}
        kept = {v for v in jaxpr.outvars if not hasattr(v, "val")}
        for i, eqn in enumerate(jaxpr.eqns):
            env.update(zip(eqn.outvars, self.apply(eqn, [read(v) for v in eqn.invars]), strict=True))
            for v in eqn.invars:
                if not hasattr(v, "val") and last[v] == i and v not in kept:
                    env.pop(v, None)
        return [read(v) for v in jaxpr.outvars]

    def apply(self, eqn: Any, inputs: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        if name in _CALLS and (inner := _inner(eqn)) is not None:
            return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs)
        if name == "cond":
            branches = eqn.params["branches"]
            chosen = branches[min(max(int(inputs[0].array), 0), len(branches) - 1)]
            return self.run(chosen.jaxpr, chosen.consts, inputs[1:])
        if name == "scan":
            return self.scan(eqn, inputs)
        if name == "dot_general":
            self.product(eqn, *inputs)
        out = eqn.primitive.bind(*(x.array for x in inputs), **eqn.primitive.get_bind_params(eqn.params))
        values = [_Value(x) for x in (out if eqn.primitive.multiple_results else [out])]
        if inputs and inputs[0].leaf is not None and (rule := _KEEPING.get(name)) is not None:
            axes = rule(eqn, inputs[0])
            values[0] = replace(values[0], leaf=replace(inputs[0].leaf, axes=axes))
        return values

    def scan(self, eqn: Any, inputs: list[_Value]) -> list[_Value]:
        p = eqn.params
        body, consts, carried, length = p["jaxpr"], p["num_consts"], p["num_carry"], p["length"]
        fixed, carry, moving = (
            inputs[:consts],
            inputs[consts : consts + carried],
            inputs[consts + carried :],
        )
        rows: list[list[Any]] = []
        steps = range(length)
        for i in reversed(steps) if p["reverse"] else steps:
            one = [_Value(x.array[i], x.leaf and replace(x.leaf, axes=x.leaf.axes[1:])) for x in moving]
            out = self.run(body.jaxpr, body.consts, [*fixed, *carry, *one])
            carry = out[:carried]
            rows.append([x.array for x in out[carried:]])
        if p["reverse"]:
            rows.reverse()
        shapes = [v.aval for v in eqn.outvars[carried:]]
        stacked = [
            _Value(jax.numpy.stack([r[k] for r in rows]) if rows else jax.numpy.zeros(s.shape, s.dtype))
            for k, s in enumerate(shapes)
        ]
        return [*carry, *stacked]

    def product(self, eqn: Any, left: _Value, right: _Value) -> None:
        (left_sum, right_sum), _ = eqn.params["dimension_numbers"]
        sides = ((left, left_sum, right, right_sum), (right, right_sum, left, left_sum))
        for weight, over, inputs, summed in sides:
            leaf = weight.leaf
            if leaf is None or inputs.leaf is not None or not over:
                continue
            runs = [leaf.axes[d] for d in over]
            if any(r is None or list(r) != sorted(r) for r in runs):
                continue
            # In the order of the parameter's axes, as moments count features.
            order = sorted(range(len(over)), key=lambda k: runs[k] or ())
            axes = tuple(a for k in order for a in runs[k] or ())
            if list(axes) != sorted(axes):
                continue
            array = np.asarray(inputs.array)
            if array.dtype.kind not in "fiub":
                array = np.asarray(jax.numpy.asarray(inputs.array, jax.numpy.float32))
            others = [d for d in range(array.ndim) if d not in summed]
            array = array.transpose(*others, *(summed[k] for k in order))
            features = math.prod(leaf.sizes[a] for a in axes)
            self.sums.add(leaf.name, array.reshape(-1, features), axes)


_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat", "remat2", "custom_jvp_call", "custom_vjp_call",
          "custom_vjp_call_jaxpr", "core_call")  # fmt: skip


def _inner(eqn: Any) -> Any:
    return next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)


Axes = tuple[tuple[int, ...] | None, ...]


def _leaf_axes(value: _Value) -> Axes:
    assert value.leaf is not None
    return value.leaf.axes


def _same(eqn: Any, value: _Value) -> Axes:
    return _leaf_axes(value)


def _transpose(eqn: Any, value: _Value) -> Axes:
    axes = _leaf_axes(value)
    return tuple(axes[p] for p in eqn.params["permutation"])


def _squeeze(eqn: Any, value: _Value) -> Axes:
    return tuple(a for d, a in enumerate(_leaf_axes(value)) if d not in eqn.params["dimensions"])


def _slice(eqn: Any, value: _Value) -> Axes:
    """An axis that is cut runs over no whole axis any more; the others do."""
    before, after = np.shape(value.array), eqn.outvars[0].aval.shape
    return tuple(a if b == n else None for a, b, n in zip(_leaf_axes(value), before, after, strict=True))


def _reshape(eqn: Any, value: _Value) -> Axes:
    """Whole axes joined into one, or taken apart again; a part of an axis is none."""
    assert value.leaf is not None
    before, after = np.shape(value.array), tuple(eqn.outvars[0].aval.shape)
    if 0 in before:
        return (None,) * len(after)
    out: list[tuple[int, ...] | None] = []
    i = j = 0
    while i < len(before) or j < len(after):
        first, start, old, new = i, j, 1, 1
        while (i == first and j == start) or old != new:
            if (old <= new and i < len(before)) or j == len(after):
                old *= before[i]
                i += 1
            else:
                new *= after[j]
                j += 1
        runs = value.leaf.axes[first:i]
        whole = [] if any(r is None for r in runs) else [a for r in runs for a in r or ()]
        out += _take(whole, value.leaf.sizes, after[start:j]) if whole else [None] * (j - start)
    return tuple(out)


def _take(axes: list[int], sizes: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, ...] | None]:
    """Runs of axes with the wanted sizes, or nothing known of any."""
    out: list[tuple[int, ...] | None] = []
    at = 0
    for size in wanted:
        have, run = 1, []
        while have < size and at < len(axes):
            have *= sizes[axes[at]]
            run.append(axes[at])
            at += 1
        if have != size:
            return [None] * len(wanted)
        out.append(tuple(run) or None)
    return out


_KEEPING: dict[str, Callable[[Any, _Value], Axes]] = {
    "convert_element_type": _same,
    "copy": _same,
    "sharding_constraint": _same,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "slice": _slice,
    "dynamic_slice": _slice,
}
