"""How a family is called: alone, compiled, mapped, differentiated, and over devices in three ways.

Each way compiles one program for a family and runs all draws through it. It gives, for each draw or stack of draws,
how many problems these were and what was wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fuzz_ops.case import Ambiguous, Family, Over, compare, slack, widen

__all__ = ["WAYS", "Problem", "over_devices", "precision"]

Found = Iterator[tuple[int, str | None]]


class Problem:
    """A draw and what the oracle says of it."""

    def __init__(self, family: Family, arrays: list[np.ndarray], rng: np.random.Generator, mood: str) -> None:
        self.arrays, self.mood = arrays, mood
        self.wide = [widen(x) for x in arrays]
        with np.errstate(all="ignore"):
            self.want = [np.asarray(x) for x in family.oracle(*self.wide)]
            self.magnitude = None if family.magnitude is None else family.magnitude(*self.wide)
        outs = [x for x in self.want if x.dtype.kind == "f"]
        weights = family.weights or (1.0,) * len(outs)
        # Differences of large numbers say little.
        self.smooth = mood != "large" and all(
            bool(np.isfinite(x).all()) for x, w in zip(outs, weights, strict=True) if w
        )
        wide = np.float64 if family.x64 else np.float32
        self.cotangents = [
            (w * rng.normal(size=x.shape)).astype(wide) for x, w in zip(outs, weights, strict=True)
        ]
        # What a second derivative bends is about 1.
        self.shrink = [
            np.asarray(1 / max(1.0, float(np.max(np.abs(x), where=np.isfinite(x), initial=0))), wide)
            for x in outs
        ]
        self.along, self.there = (
            [rng.normal(size=self.arrays[i].shape) for i in family.differentiable] for _ in range(2)
        )


def precision(family: Family) -> contextlib.AbstractContextManager[Any]:
    return jax.enable_x64(True) if family.x64 else contextlib.nullcontext()


def leaves(call: Callable[..., Any], *arrays: Any) -> list[Any]:
    return jax.tree.leaves(call(*arrays))


def total(call: Callable[..., Any], family: Family, bent: bool = False) -> Callable[..., Any]:
    """The weighted sum of the results as a function of the differentiable arguments, and the results."""

    def loss(chosen: Any, arrays: Any, cotangents: Any, shrink: Any = ()) -> Any:
        arrays = list(arrays)
        for i, x in zip(family.differentiable, chosen, strict=True):
            arrays[i] = x
        outs = leaves(call, *arrays)
        summed = [x for x in outs if jnp.issubdtype(x.dtype, jnp.floating)]
        wide = jnp.float64 if family.x64 else jnp.float32
        terms = [x.astype(wide) for x in summed]
        terms = [jnp.sin(s * x) for x, s in zip(terms, shrink, strict=True)] if bent else terms
        terms = [jnp.sum(x * c) for x, c in zip(terms, cotangents, strict=True)]
        return sum(terms, jnp.zeros((), wide)), outs

    return loss


def wanted(family: Family, problem: Problem, shift: list[np.ndarray], bent: bool = False) -> float:
    """The oracle's loss at the arrays shifted."""
    arrays = list(problem.wide)
    for i, x in zip(family.differentiable, shift, strict=True):
        arrays[i] = arrays[i] + x
    with np.errstate(all="ignore"):
        outs = [np.asarray(x) for x in family.oracle(*arrays)]
    outs = [x for x in outs if x.dtype.kind == "f"]
    outs = [np.sin(s * x) for x, s in zip(outs, problem.shrink, strict=True)] if bent else outs
    return float(
        sum(np.sum(np.where(c == 0, 0, x) * c) for x, c in zip(outs, problem.cotangents, strict=True))
    )


def slope(family: Family, problem: Problem, finer: bool = False) -> float:
    """The derivative of the loss along the problem's direction; by ``finer`` differences, if by these."""
    if family.gradient is not None:
        with np.errstate(all="ignore"):
            exact = family.gradient(problem.wide, [c.astype(np.float64) for c in problem.cotangents])
        return float(sum(np.sum(g * d) for g, d in zip(exact, problem.along, strict=True)))

    def difference(step: float) -> float:
        ahead, behind = (
            wanted(family, problem, [sign * step * d for d in problem.along]) for sign in (1.0, -1.0)
        )
        return (ahead - behind) / (2 * step)

    # In float64 the error of one difference would show.
    if finer:
        return difference(1e-7)
    return (4 * difference(1e-4) - difference(2e-4)) / 3 if family.x64 else difference(1e-5)


def read(x: Any) -> np.ndarray:
    """An array's numbers. JAX cannot read one of nothing that lies on several devices."""
    return np.asarray(x) if x.size else np.zeros(x.shape, x.dtype)


def check_value(family: Family, problem: Problem, got: list[Any]) -> str | None:
    got = [read(x) for x in got]
    if family.dtypes is not None and tuple(x.dtype.name for x in got) != family.dtypes:
        return f"dtypes {[x.dtype.name for x in got]}, expected {list(family.dtypes)}"
    if family.check is not None:
        return family.check(problem.wide, got)
    if len(got) != len(problem.want):
        return f"{len(got)} results, expected {len(problem.want)}"
    for i, (x, y) in enumerate(zip(got, problem.want, strict=True)):
        magnitude = None if problem.magnitude is None else problem.magnitude[i]
        wrong = compare(x, y, family.tolerance, magnitude)
        if wrong:
            return f"result {i}: {wrong}"
    return None


def check_slope(
    family: Family, problems: list[Problem], got: list[Any], along: list[np.ndarray]
) -> str | None:
    """Hold a gradient, of the sum of several problems' losses, against the oracle's derivative along a direction."""
    wide = [read(g).astype(np.float64) for g in got]
    if not all(np.isfinite(g).all() for g in wide):
        return "the gradient is not finite"
    found = float(sum(np.sum(g * d) for g, d in zip(wide, along, strict=True)))
    want = sum(slope(family, p) for p in problems)
    scale = sum(float(np.sum(np.abs(g * d))) for g, d in zip(wide, along, strict=True))
    bound = slack(family) * (scale + abs(want) + 1) + 1e-8 * (1 + abs(want))
    if not abs(found - want) <= bound and family.gradient is None:
        # A maximum may have changed hands on the way: not on a shorter one, whose differences are less exact.
        want = sum(slope(family, p, finer=True) for p in problems)
        bound += 1e-6 * (scale + abs(want) + 1)
    if not abs(found - want) <= bound:
        return f"gradient along a direction {found:.9g}, differences say {want:.9g}, tolerance {bound:.2g}"
    return None


def chosen(family: Family, arrays: Any) -> list[Any]:
    return [arrays[i] for i in family.differentiable]


def value(family: Family, problems: list[Problem], rng: np.random.Generator) -> Found:
    for p in problems:
        yield 1, check_value(family, p, leaves(family.call, *map(jnp.asarray, p.arrays)))


def jit(family: Family, problems: list[Problem], rng: np.random.Generator) -> Found:
    compiled = jax.jit(partial(leaves, family.call))
    for p in problems:
        yield 1, check_value(family, p, compiled(*p.arrays))


def gradient(family: Family, problems: list[Problem], rng: np.random.Generator) -> Found:
    compiled = jax.jit(jax.grad(total(family.call, family), has_aux=True))
    for p in problems:
        if p.smooth:
            got, _ = compiled(chosen(family, p.arrays), p.arrays, p.cotangents)
            yield 1, check_slope(family, [p], got, p.along)


def gradient_twice(family: Family, problems: list[Problem], rng: np.random.Generator) -> Found:
    def bend(start: Any, arrays: Any, cotangents: Any, shrink: Any, there: Any) -> Any:
        grads, _ = jax.grad(total(family.call, family, bent=True), has_aux=True)(
            start, arrays, cotangents, shrink
        )
        return sum(
            jnp.sum(g.astype(jnp.promote_types(g.dtype, jnp.float32)) * d)
            for g, d in zip(grads, there, strict=True)
        )

    compiled = jax.jit(jax.grad(bend))

    def difference(p: Problem, step: float) -> float:
        corners = (
            i
            * j
            * wanted(
                family,
                p,
                [step * (i * a + j * b) for a, b in zip(p.along, p.there, strict=True)],
                bent=True,
            )
            for i in (1, -1)
            for j in (1, -1)
        )
        return sum(corners) / (4 * step * step)

    for p in problems:
        if not p.smooth:
            continue
        there = [x.astype(np.float64 if family.x64 else np.float32) for x in p.there]
        got = [
            np.asarray(g, np.float64)
            for g in compiled(chosen(family, p.arrays), p.arrays, p.cotangents, p.shrink, there)
        ]
        found = float(sum(np.sum(g * d) for g, d in zip(got, p.along, strict=True)))
        want = (4 * difference(p, 2e-4) - difference(p, 4e-4)) / 3 if family.x64 else difference(p, 1e-4)
        scale = sum(float(np.sum(np.abs(g * d))) for g, d in zip(got, p.along, strict=True))
        bound = (10 * slack(family) + 1e-5) * (scale + abs(want) + 1)
        wrong = None
        if not abs(found - want) <= bound:
            wrong = f"second derivative {found:.9g}, differences say {want:.9g}, tolerance {bound:.2g}"
        yield 1, wrong


def vmap(family: Family, problems: list[Problem], rng: np.random.Generator) -> Found:
    """Mapped over any axis of some of the arguments, value and gradient."""
    if family.over is not None and family.over.mapped:
        yield from along_an_axis(family, problems)
        return
    size = 3
    mapped = [family.together or bool(rng.random() < 0.7) for _ in family.args]
    if not any(mapped):
        mapped[int(rng.integers(len(mapped)))] = True
    axes = [
        int(rng.integers(-1, len(a.shape) + 1)) if m else None
        for a, m in zip(family.args, mapped, strict=True)
    ]
    grads = bool(family.differentiable)

    def one(cotangents: Any, *arrays: Any) -> Any:
        if not grads:
            return leaves(family.call, *arrays), []
        got, outs = jax.grad(total(family.call, family), has_aux=True)(
            chosen(family, arrays), arrays, cotangents
        )
        return outs, got

    compiled = jax.jit(jax.vmap(one, in_axes=(0, *axes)))
    for first in range(0, len(problems), size):
        some = [problems[(first + k) % len(problems)] for k in range(size)]
        each = _mixed(family, some, mapped, rng)
        if each is None:
            continue
        stacked = [
            some[0].arrays[i] if axis is None else np.stack([p.arrays[i] for p in some], axis)
            for i, axis in enumerate(axes)
        ]
        cotangents = [np.stack(c) for c in zip(*(p.cotangents for p in each), strict=True)]
        outs, got = compiled(cotangents, *stacked)
        wrong = None
        for k, p in enumerate(each):
            wrong = wrong or check_value(family, p, [x[k] for x in outs])
            if grads and p.smooth:
                wrong = wrong or check_slope(family, [p], [g[k] for g in got], p.along)
        yield size, None if wrong is None else f"in_axes={axes}: {wrong}"


def _mood(some: list[Problem]) -> str:
    return "large" if any(p.mood == "large" for p in some) else some[0].mood


def _mixed(
    family: Family, some: list[Problem], own: list[Any], rng: np.random.Generator
) -> list[Problem] | None:
    """The problems with the arguments that are not their own taken from the first; None if an oracle cannot say."""
    try:
        return [
            Problem(
                family,
                [p.arrays[i] if mine else some[0].arrays[i] for i, mine in enumerate(own)],
                rng,
                _mood(some),
            )
            for p in some
        ]
    except Ambiguous:
        return None


@cache
def mesh(kind: AxisType) -> Any:
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:4])


def shard(family: Family, problems: list[Problem], rng: np.random.Generator, check_vma: bool) -> Found:
    """Each device has a problem; some arguments are the same on all, or on those along one axis of the mesh."""
    if family.over is not None:
        yield from together(family, problems, rng, check_vma)
        return
    kinds = [("a", "b")] if family.together else [("a", "b"), ("a", "b"), ("a",), ("b",), ()]
    own = [kinds[int(rng.integers(len(kinds)))] for _ in family.args]
    if not any(own):
        own[0] = ("a", "b")
    sizes = {"a": 2, "b": 2}

    def place(axes: tuple[str, ...], device: int) -> int:
        at = {"a": device // 2, "b": device % 2}
        index = 0
        for name in axes:
            index = index * sizes[name] + at[name]
        return index

    def local(*arrays: Any) -> list[Any]:
        mine = [x[0] if axes else x for x, axes in zip(arrays, own, strict=True)]
        return [x[None] for x in leaves(family.call, *mine)]

    mapped = jax.shard_map(
        local,
        mesh=mesh(AxisType.Auto),
        in_specs=tuple(P(axes) if axes else P() for axes in own),
        out_specs=P(("a", "b")),
        check_vma=check_vma,
    )
    grads = bool(family.differentiable)
    compiled = jax.jit(jax.grad(total(mapped, family), has_aux=True) if grads else mapped)
    for first in range(0, len(problems), 4):
        some = [problems[(first + k) % len(problems)] for k in range(4)]
        try:
            each = [
                Problem(
                    family, [some[place(axes, k)].arrays[i] for i, axes in enumerate(own)], rng, _mood(some)
                )
                for k in range(4)
            ]
        except Ambiguous:
            continue
        stacked = []
        for i, axes in enumerate(own):
            count = 2 ** len(axes)
            stacked.append(np.stack([some[k].arrays[i] for k in range(count)]) if axes else some[0].arrays[i])
        wrong = None
        if grads:
            along = []
            for i in family.differentiable:
                d = rng.normal(size=(2 ** len(own[i]), *family.args[i].shape))
                along.append(d if own[i] else d[0])
                for k, p in enumerate(each):
                    p.along[family.differentiable.index(i)] = d[place(own[i], k)]
            cotangents = [np.stack(c) for c in zip(*(p.cotangents for p in each), strict=True)]
            got, outs = compiled(chosen(family, stacked), stacked, cotangents)
            if all(p.smooth for p in each):
                wrong = check_slope(family, each, got, along)
        else:
            outs = compiled(*stacked)
        outs = [read(x) for x in outs]
        for k, p in enumerate(each):
            wrong = wrong or check_value(family, p, [x[k] for x in outs])
        yield 4, None if wrong is None else f"arguments over {own}: {wrong}"


@cache
def devices(sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    count = int(np.prod(sizes))
    return jax.make_mesh(
        sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:count]
    )


def over_devices(over: Over, check_vma: bool = True, same: bool = False) -> Callable[..., Any]:
    """The call of all devices on stacked arrays."""

    def local(*arrays: Any) -> Any:
        outs = leaves(over.local, *(x[0] for x in arrays))
        return outs if same else [x[None] for x in outs]

    @cache
    def mapped() -> Callable[..., Any]:
        # Made when it is needed, since families are drawn in processes of one device, too; and once, so that calls of
        # the same family find what is compiled.
        return jax.shard_map(
            local,
            mesh=devices(over.sizes, over.names),
            in_specs=P(over.names),
            out_specs=P() if same else P(over.names),
            check_vma=check_vma,
        )

    def call(*arrays: Any) -> list[Any]:
        outs = mapped()(*arrays)
        count = int(np.prod(over.sizes))
        return [jnp.broadcast_to(x, (count, *x.shape)) for x in outs] if same else outs

    return call


def together(family: Family, problems: list[Problem], rng: np.random.Generator, check_vma: bool) -> Found:
    """A call that communicates: differentiated from outside, or on each device from inside."""
    assert family.over is not None
    over, grads = family.over, bool(family.differentiable)
    inside = grads and rng.random() < 0.5
    same = over.same and rng.random() < 0.5
    if inside:

        def local(start: Any, arrays: Any, cotangents: Any) -> Any:
            start, arrays, cotangents = jax.tree.map(lambda x: x[0], (start, arrays, cotangents))
            return jax.tree.map(
                lambda x: x[None],
                jax.grad(total(over.local, family), has_aux=True)(start, arrays, cotangents),
            )

        compiled = jax.jit(
            jax.shard_map(
                local,
                mesh=devices(over.sizes, over.names),
                in_specs=P(over.names),
                out_specs=P(over.names),
                check_vma=check_vma,
            )
        )
    else:
        call = over_devices(over, check_vma, same)
        compiled = jax.jit(jax.grad(total(call, family), has_aux=True) if grads else partial(leaves, call))
    for p in problems:
        if grads:
            got, outs = compiled(chosen(family, p.arrays), p.arrays, p.cotangents)
            wrong = check_slope(family, [p], got, p.along) if p.smooth else None
        else:
            outs, wrong = compiled(*p.arrays), None
        wrong = wrong or check_value(family, p, outs)
        yield 1, None if wrong is None else f"gradient inside={inside}, out_specs=P() {same}: {wrong}"


def along_an_axis(family: Family, problems: list[Problem]) -> Found:
    """``vmap(axis_name=…)`` in the place of devices."""
    assert family.over is not None
    over, grads = family.over, bool(family.differentiable)

    def call(*arrays: Any) -> list[Any]:
        return jax.vmap(partial(leaves, over.local), axis_name=over.names[0])(*arrays)

    compiled = jax.jit(jax.grad(total(call, family), has_aux=True) if grads else call)
    for p in problems:
        if grads:
            got, outs = compiled(chosen(family, p.arrays), p.arrays, p.cotangents)
            wrong = check_slope(family, [p], got, p.along) if p.smooth else None
        else:
            outs, wrong = compiled(*p.arrays), None
        yield 1, wrong or check_value(family, p, outs)


def explicit(family: Family, problems: list[Problem], rng: np.random.Generator) -> Found:
    """The call on arrays of a mesh with explicit axes, in any dimensions that these divide."""
    specs: list[Any] = [] if family.specs is None else [P(*s) for s in family.specs]
    for i, arg in enumerate(family.args if family.specs is None else ()):
        free = [("a", 2), ("b", 2), (("a", "b"), 4)]
        entries: list[Any] = [None] * len(arg.shape)
        allowed = range(len(arg.shape)) if family.lay is None else family.lay[i]
        for dim in rng.permutation(len(arg.shape)):
            axis, size = free[int(rng.integers(len(free)))]
            used = {n for e in entries if e for n in (e if isinstance(e, tuple) else (e,))}
            mine = axis if isinstance(axis, tuple) else (axis,)
            # Arrays of nothing are not split: JAX itself cannot read them back.
            if 0 in arg.shape or arg.kind == "key":
                continue
            fits = dim in allowed and arg.shape[dim] % size == 0 and not used & set(mine)
            if fits and rng.random() < 0.6:
                entries[dim] = axis
        specs.append(P(*entries))
    over = mesh(AxisType.Explicit)
    grads = bool(family.differentiable)
    compiled = jax.jit(
        jax.grad(total(family.call, family), has_aux=True) if grads else partial(leaves, family.call)
    )
    with jax.set_mesh(over):
        for p in problems:
            arrays = [jax.device_put(x, NamedSharding(over, s)) for x, s in zip(p.arrays, specs, strict=True)]
            wrong = None
            if grads:
                got, outs = compiled(chosen(family, arrays), arrays, p.cotangents)
                if p.smooth:
                    wrong = check_slope(family, [p], got, p.along)
            else:
                outs = compiled(*arrays)
            wrong = wrong or check_value(family, p, outs)
            yield 1, None if wrong is None else f"laid as {specs}: {wrong}"


WAYS: dict[str, Callable[[Family, list[Problem], np.random.Generator], Found]] = {
    "value": value,
    "jit": jit,
    "vmap": vmap,
    "grad": gradient,
    "grad2": gradient_twice,
    "explicit": explicit,
    "shard_map": partial(shard, check_vma=True),
    "unchecked": partial(shard, check_vma=False),
}
NEED = {"grad": "differentiable", "grad2": "twice"}
