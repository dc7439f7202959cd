"""Calls of operations on 4 × 8 emulated devices, in two ways, compared with an oracle on one: see :mod:`mesh_cases`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

__all__ = [
    "ALL",
    "BOTH",
    "EACH",
    "RANDOM",
    "SECOND",
    "Case",
    "draw",
    "over",
    "positive",
    "run",
    "same",
    "simple",
]

BOTH = ("data", "model")
ALL = P(BOTH)
EACH = P()
SECOND = P(None, BOTH)
RANDOM = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """``function(*arrays)`` inside ``shard_map`` and ``oracle(*arrays)`` on the whole arrays.

    With ``own`` the function works on a device's own part or names mesh axes, and has no meaning outside of
    ``shard_map``; ``whole`` is then the operation, if there is one, for arrays sharded over a mesh. Without
    ``manual`` it is not meant for ``shard_map``: the arrays' sharding needs communication.
    """

    name: str
    function: Callable[..., Any]
    oracle: Callable[..., Any]
    arrays: tuple[Any, ...]
    specs: tuple[Any, ...]
    out: Any = ALL
    gradient: bool = True
    check_vma: bool = True
    own: bool = False
    manual: bool = True
    whole: Callable[..., Any] | None = None


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


def positive(*shape: int) -> jax.Array:
    return jnp.asarray(RANDOM.uniform(0.1, 0.9, size=shape), jnp.float32)


def simple(
    name: str, function: Callable[..., Any], arrays: Any, specs: Any, out: Any = ALL, **more: Any
) -> Case:
    """A case whose oracle is the function with ``implementation="reference"``."""
    return Case(name, function, partial(function, implementation="reference"), arrays, specs, out, **more)


def same(
    name: str, function: Callable[..., Any], arrays: Any, specs: Any, out: Any = ALL, **more: Any
) -> Case:
    """A case whose oracle is the function itself on one device; its own tests hold that against NumPy."""
    return Case(name, function, function, arrays, specs, out, **more)


def over(name: str, function: Callable[..., Any], arrays: Any, specs: Any, **more: Any) -> Case:
    """A case for explicit axes alone; the oracle is the function itself on one device."""
    return Case(name, function, function, arrays, specs, manual=False, **more)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def value_and_gradient(function: Callable[..., Any], gradient: bool, arrays: Any) -> list[Any]:
    leaves, tree = jax.tree.flatten(arrays)
    places = [i for i, x in enumerate(leaves) if _is_float(x)]

    def loss(*floats: Any) -> Any:
        filled = list(leaves)
        for i, x in zip(places, floats, strict=True):
            filled[i] = x
        out = jax.tree.leaves(function(*jax.tree.unflatten(tree, filled)))
        # Infinities have no gradient to compare: their places in the sum are left out.
        found = (jnp.where(jnp.isfinite(x), x, 0) for x in out if _is_float(x))
        return sum((jnp.sum(jnp.sin(x)) for x in found), jnp.zeros(())), out

    floats = [leaves[i] for i in places]
    if not gradient:
        return loss(*floats)[1]
    grads, out = jax.grad(loss, tuple(range(len(floats))), has_aux=True)(*floats)
    return [*out, *grads]


def difference(got: list[Any], want: list[Any]) -> float:
    assert len(got) == len(want), (len(got), len(want))
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, (a.shape, b.shape)
        finite = np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return float("inf")
        gap = np.max(np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)), initial=0.0)
        worst = max(worst, float(gap / (1 + np.max(np.abs(b), where=finite, initial=0.0))))
    return worst


def on_devices(functions: list[Any], cases: list[Case], arrays: list[Any]) -> list[Any]:
    def all_of_them(arrays: list[Any]) -> list[Any]:
        return [
            value_and_gradient(f, c.gradient, a) for f, c, a in zip(functions, cases, arrays, strict=True)
        ]

    return jax.jit(all_of_them)(arrays)


def run(cases: list[Case]) -> dict[str, dict[str, float]]:
    """For each way the differences of the cases that have it."""
    names = [c.name for c in cases]
    assert len(set(names)) == len(names), f"two cases of one name: {names}"
    want = on_devices([c.oracle for c in cases], cases, [c.arrays for c in cases])

    known = dict(zip(names, want, strict=True))

    mesh = jax.make_mesh((4, 8), BOTH, axis_types=(AxisType.Auto,) * 2)
    some = [c for c in cases if c.manual]
    mapped = [
        jax.shard_map(c.function, mesh=mesh, in_specs=c.specs, out_specs=c.out, check_vma=c.check_vma)
        for c in some
    ]
    got = on_devices(mapped, some, [c.arrays for c in some])
    manual = {c.name: difference(a, known[c.name]) for c, a in zip(some, got, strict=True)}

    cases = [c for c in cases if c.whole or not c.own]
    mesh = jax.make_mesh((4, 8), BOTH, axis_types=(AxisType.Explicit,) * 2)
    specs = [jax.tree.broadcast(c.specs, c.arrays, is_leaf=lambda x: isinstance(x, P)) for c in cases]
    laid = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    with jax.set_mesh(mesh):
        got = on_devices(
            [c.whole or c.function for c in cases], cases, jax.device_put([c.arrays for c in cases], laid)
        )
    explicit = {c.name: difference(a, known[c.name]) for c, a in zip(cases, got, strict=True)}
    return {"manual": manual, "explicit": explicit}
