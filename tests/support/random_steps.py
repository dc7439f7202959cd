"""Random steps of a scan, as small programs that NumPy and JAX run alike.

``Step(seed)`` is a program over pytrees of floats and integers, mostly affine in its carry: elementwise operations with
broadcasting, reductions, changes of shape, slices, concatenations, selections, products of matrices, casts. The same
program runs with ``numpy`` in a Python loop: an oracle that shares nothing with a scan.

    python tests/support/random_steps.py FIRST COUNT    # checks parallel_scan on so many of them
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

__all__ = ["Step", "check"]

SHAPES = ((), (3,), (1,), (2, 3), (3, 1), (3, 3), (2, 1, 3))
LINEAR = [
    *(
        "add",
        "add",
        "add",
        "sub",
        "sub",
        "neg",
        "scale",
        "scale",
        "times_x",
        "times_x",
        "sum",
        "mean",
        "keep",
    ),
    *("transpose", "flat", "expand", "spread", "slice", "join", "where", "where_x", "matrix", "matrix_left"),
    *("flip", "cast", "copy", "take", "roll", "bias", "running", "div"),
]
FAST = {"xla_backend_optimization_level": 0}
CURVED = ["tanh", "product", "max", "maximum", "where_self", "norm", "sort"]


class Step:
    """A random ``f(carry, x) -> (carry, y)``; ``f(xp, consts, carry, x)`` with ``xp`` numpy or jax.numpy."""

    def __init__(self, seed: int) -> None:
        r = self.random = np.random.default_rng(seed)
        self.steps = int(r.integers(1, 8))
        self.reverse = bool(r.integers(2))
        leaves = int(r.integers(1, 4))
        self.shapes = [SHAPES[r.integers(len(SHAPES))] for _ in range(leaves)]
        self.counter = bool(r.random() < 0.4)  # an integer in the carry
        carry: dict[str, Any] = {f"c{i}": r.normal(size=s) for i, s in enumerate(self.shapes)}
        if self.counter:
            carry["n"] = (np.asarray(r.integers(0, 5), "int32"),)
        self.init = carry
        self.xs: Any = {
            "v": r.normal(size=(self.steps, 3)),
            "s": r.normal(size=(self.steps,)),
            "m": r.normal(size=(self.steps, 3, 3)),
        }
        self.consts = {"a": r.normal(size=(3, 3)) / 2, "b": r.normal(size=(3,))}
        names = LINEAR + CURVED if r.random() < 0.3 else LINEAR
        self.program: list[tuple[str, float, float, int]] = [
            (names[r.integers(len(names))], *r.random(2), int(r.integers(1 << 16)))
            for _ in range(int(r.integers(2, 9)))
        ]
        self.ends = r.random(2 * leaves + 3)

    def __call__(self, xp: Any, consts: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        env = [carry[f"c{i}"] for i in range(len(self.shapes))]
        if self.counter:
            x = {**x, "s": x["s"] + 0.1 * carry["n"][0]}
        for name, first, second, number in self.program:
            a, b = env[int(first * len(env))], env[int(second * len(env))]
            made = _operation(xp, name, a, b, number, x, consts)
            if made is not None and made.size <= 64:
                env.append(made)
        new: dict[str, Any] = {}
        for i, shape in enumerate(self.shapes):
            value = env[-1 - int(self.ends[2 * i] * min(len(env), 4))]
            kind = self.ends[2 * i + 1]
            if kind < 0.1:
                new[f"c{i}"] = carry[f"c{i}"]
            elif kind < 0.2:
                new[f"c{i}"] = _fit(xp, x["v"] + 0.0, shape)
            else:
                new[f"c{i}"] = 0.3 * _fit(xp, value, shape) + (0.2 * x["s"] if kind < 0.7 else 0.0)
        if self.counter:
            new["n"] = (carry["n"][0] * 3 % 7 if self.ends[-1] < 0.3 else carry["n"][0] + 1,)
        y = (env[-1], [x["v"] if self.ends[-2] < 0.2 else new["c0"] * env[0].sum()], None)
        return new, y


def _fit(xp: Any, value: Any, shape: tuple[int, ...]) -> Any:
    try:
        fits = np.broadcast_shapes(value.shape, shape) == shape
    except ValueError:
        fits = False
    return xp.broadcast_to(value if fits else value.mean(), shape)


def _with(xp: Any, a: Any, b: Any, join: Any) -> Any:
    """``join(a, b)``, with a scalar in place of what does not broadcast."""
    try:
        np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        b = b.mean()
    return join(a, b)


def _operation(xp: Any, name: str, a: Any, b: Any, number: int, x: Any, consts: Any) -> Any:
    axis = number % a.ndim if a.ndim else 0
    if name in ("add", "sub"):
        return _with(xp, a, b, lambda a, b: a + b if name == "add" else a - b)
    if name == "product":
        return _with(xp, a, b, lambda a, b: 0.3 * a * b)
    if name == "maximum":
        return _with(xp, a, b, xp.maximum)
    if name == "where":
        return _with(xp, a, b, lambda a, b: xp.where(x["s"] > 0, a, b))
    if name == "where_x":
        return _with(xp, a, x["v"], lambda a, v: xp.where(v > 0, a, v if number % 2 else 0.0))
    if name == "where_self":
        return xp.where(a > 0.1, a, 0.5 * a)
    if name == "neg":
        return -a
    if name == "tanh":
        return xp.tanh(a)
    if name == "norm":
        return a / (1.0 + xp.abs(a))
    if name == "scale":
        return a * (0.5, -1.25, 0.75)[number % 3]
    if name == "times_x":
        return _with(xp, a, (x["v"], x["s"], x["m"], consts["b"])[number % 4], lambda a, v: a * v)
    if name == "div":
        return _with(xp, a, x["v"], lambda a, v: a / (1.0 + v * v))
    if name == "bias":
        return _with(xp, a, x["v"], lambda a, v: v - a)
    if name in ("sum", "mean", "max", "keep"):
        axes = None if number % 3 == 0 else axis if a.ndim else None
        if name == "keep":
            return xp.sum(a, axes, keepdims=True)
        return {"sum": xp.sum, "mean": xp.mean, "max": xp.max}[name](a, axes)
    if name == "transpose":
        return xp.transpose(a)
    if name == "flat":
        return a.reshape(-1)
    if name == "expand":
        return xp.expand_dims(a, number % (a.ndim + 1))
    if name == "spread":
        return xp.broadcast_to(a, (2, *a.shape))
    if name == "cast":
        return a.astype("float32").astype(a.dtype) if number % 4 == 0 else a + 0 * number
    if name == "copy":
        return xp.array(a, copy=True)
    if a.ndim == 0:
        return None
    if name == "slice":
        return a[..., : 1 + number % a.shape[-1]]
    if name == "take":
        return xp.take(a, np.array([0, a.shape[axis] - 1]), axis)
    if name == "join":
        return xp.concatenate([a, a], axis)
    if name == "flip":
        return xp.flip(a, axis)
    if name == "roll":
        return xp.roll(a, 1, axis)
    if name == "running":
        return xp.cumsum(a, axis)
    if name == "sort":
        return xp.sort(a, axis)
    matrix = x["m"] / 2 if number % 2 else consts["a"]
    if name == "matrix" and a.shape[-1] == 3:
        return a @ matrix
    if name == "matrix_left" and a.shape[0 if a.ndim == 1 else -2] == 3:
        return matrix @ a
    return None


def _loop(step: Step, consts: Any, init: Any, xs: Any) -> list[Any]:
    """The scan in NumPy: the leaves of the last carry and of the outputs."""
    import jax

    carry, rows = init, []
    places = range(step.steps)
    for t in reversed(places) if step.reverse else places:
        carry, y = step(np, consts, carry, {k: v[t] for k, v in xs.items()})
        rows.append(y)
    if step.reverse:
        rows.reverse()
    ys = [np.stack(each) for each in zip(*map(jax.tree.leaves, rows), strict=True)]
    return [*map(np.asarray, jax.tree.leaves(carry)), *ys]


def check(seed: int) -> str:
    """``parallel_scan`` of ``Step(seed)`` in float64, against NumPy and ``lax.scan``; the implementation on TPUs.

    Value, and gradient in carry, inputs and closed-over arrays, under ``jit``, and ``vmap`` of both.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax

    from capibara.ops import explain
    from capibara.ops.scan import parallel_scan

    step = Step(seed)
    chosen = explain(
        parallel_scan, lambda c, v: step(jnp, step.consts, c, v), step.init, step.xs, platform="tpu"
    )
    assert "failed" not in chosen.reasons.get("affine", ""), (seed, chosen)
    segments = [None, 1, 2, 3][seed % 4]
    ways = {"auto", chosen.chosen, ("sequential", "reference")[seed % 2]}

    def run(way: str, consts: Any, init: Any, xs: Any) -> Any:
        def f(c: Any, v: Any) -> Any:
            return step(jnp, consts, c, v)

        if way == "lax":
            return lax.scan(f, init, xs, reverse=step.reverse)
        return parallel_scan(f, init, xs, reverse=step.reverse, num_segments=segments, implementation=way)

    def floats(tree: Any) -> list[Any]:
        return [v for v in jax.tree.leaves(tree) if jnp.issubdtype(v.dtype, jnp.inexact)]

    def everything(way: str, consts: Any, init: Any, xs: Any) -> Any:
        out = run(way, consts, init, xs)
        others = {k: v for k, v in init.items() if k == "n"}

        def loss(consts: Any, init: Any, xs: Any) -> Any:
            return sum(jnp.sum(jnp.sin(v + 0.3)) for v in floats(run(way, consts, {**init, **others}, xs)))

        moving = {k: v for k, v in init.items() if k != "n"}
        return out, jax.grad(loss, (0, 1, 2))(consts, moving, xs)

    want = _loop(step, step.consts, step.init, step.xs)
    twice = jax.tree.map(lambda v: np.stack([v, v + v.dtype.type(1)]), step.init)
    found = {}
    for way in ("lax", *sorted(ways)):

        def all_of(consts: Any, init: Any, xs: Any, twice: Any, way: str = way) -> Any:
            one = everything(way, consts, init, xs)
            return one, jax.vmap(lambda start: everything(way, consts, start, xs))(twice)

        found[way] = jax.jit(all_of, compiler_options=FAST)(step.consts, step.init, step.xs, twice)
        got = jax.tree.leaves(found[way][0][0])
        for g, w in zip(got, want, strict=True):
            assert g.shape == w.shape, (seed, way, g.shape, w.shape)
            np.testing.assert_allclose(g, w, rtol=3e-6, atol=3e-6, err_msg=f"{seed} {way} value")
        same = zip(jax.tree.leaves(found[way]), jax.tree.leaves(found["lax"]), strict=True)
        for i, (g, w) in enumerate(same):
            assert (g.shape, g.dtype) == (w.shape, w.dtype)
            np.testing.assert_allclose(g, w, rtol=3e-6, atol=3e-6, err_msg=f"{seed} {way} result {i}")
    return chosen.chosen


if __name__ == "__main__":
    import collections
    import traceback

    import jax

    jax.config.update("jax_enable_x64", True)
    begin, count = map(int, sys.argv[1:3])
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(begin, begin + count):
        try:
            seen[check(seed)] += 1
        except Exception:
            seen["WRONG"] += 1
            print("seed", seed, Step(seed).program)
            traceback.print_exc(limit=-3)
        if seed % 20 == 19:
            jax.clear_caches()
    print(dict(seen))
