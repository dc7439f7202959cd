"""Recurrences, step by step; and scans of random programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from capibara.ops import scan
from fuzz_ops.case import EPS, Ambiguous, Arg, Family, Generator, floats, pick

__all__ = ["OPERATIONS"]


def _backwards(reverse: bool, steps: int) -> range:
    return range(steps)[:: -1 if reverse else 1]


def linear(rng: Generator) -> Family:
    steps, shape = pick(rng, 0, 1, 2, 7, 8), pick(rng, (), (1,), (3,), (4,), (2, 4))
    integers = rng.random() < 0.1
    dtype = "int32" if integers else floats(rng)
    name = pick(rng, "auto", "auto", "xla", "reference", "native" if dtype == "float32" else "auto")
    reverse, state = bool(rng.random() < 0.4), bool(rng.random() < 0.5)
    options: dict[str, Any] = {
        "reverse": reverse,
        "num_segments": pick(rng, None, None, 1, 2, 3),
        "implementation": name,
    }
    narrow = tuple(1 if rng.random() < 0.5 else n for n in shape)
    a_shape = pick(rng, (steps, *shape), (steps, *shape), (steps, *narrow), shape, narrow)

    def call(a: Any, x: Any, *more: Any) -> Any:
        return scan.linear_recurrence(a, x, initial_state=more[0] if more else None, **options)

    def oracle(a: Any, x: Any, h: Any = None) -> list[np.ndarray]:
        wide = a if a.ndim == x.ndim else np.broadcast_to(a, (steps, *a.shape))
        h = np.zeros(shape, x.dtype) if h is None else h
        out = np.zeros_like(x)
        with np.errstate(all="ignore"):
            for t in _backwards(reverse, steps):
                h = (wide[t] * h + x[t]).astype(x.dtype)
                out[t] = h
        return [out, np.asarray(h)]

    kind: Any = range(-3, 4) if integers else "normal"
    args = [Arg(a_shape, dtype, kind), Arg((steps, *shape), dtype, kind)] + [Arg(shape, dtype, kind)] * state
    smooth = dtype in ("float32", "float64")
    return Family(
        f"linear_recurrence({dtype}{a_shape}, {(steps, *shape)}, initial_state={state}, {options})",
        call,
        oracle,
        tuple(args),
        # Infinities have to stay as they are; numbers are halved, so that states do not grow.
        fix=None if integers else lambda arrays, rng: [0.5 * arrays[0].astype(np.float64), *arrays[1:]],
        moods=("normal", "normal", "zeros", "ties", "special" if smooth else "normal"),
        x64=dtype == "float64",
        tolerance=16 * EPS[dtype] if not integers else 0,
        magnitude=None if integers else lambda *arrays: oracle(*map(abs, arrays)),
        differentiable=() if integers else tuple(range(len(args))),
        twice=smooth,
        dtypes=(dtype, dtype),
    )


def matrix(rng: Generator) -> Family:
    steps, lead, n = pick(rng, 0, 1, 2, 5, 8), pick(rng, (), (), (2,), (4,)), pick(rng, 1, 2, 3, 4)
    dtype = floats(rng)
    reverse, state = bool(rng.random() < 0.4), bool(rng.random() < 0.5)
    name = pick(rng, "auto", "auto", "xla", "reference", "native" if dtype == "float32" else "auto")
    options: dict[str, Any] = {
        "reverse": reverse,
        "num_segments": pick(rng, None, None, 1, 2, 3),
        "implementation": name,
    }
    a_shape = pick(rng, (n, n), (steps, *lead, n, n), (steps, *(1 for _ in lead), n, n))

    def call(a: Any, x: Any, *more: Any) -> Any:
        return scan.matrix_linear_recurrence(a, x, initial_state=more[0] if more else None, **options)

    def oracle(a: Any, x: Any, h: Any = None) -> list[np.ndarray]:
        h = np.zeros((*lead, n)) if h is None else h
        out = np.zeros(x.shape)
        for t in _backwards(reverse, steps):
            step = a if a.ndim == 2 and len(a_shape) == 2 else a[t]
            h = (step @ h[..., None])[..., 0] + x[t]
            out[t] = h
        return [out, h]

    args = [Arg(a_shape, dtype), Arg((steps, *lead, n), dtype)] + [Arg((*lead, n), dtype)] * state
    return Family(
        f"matrix_linear_recurrence({dtype}{a_shape}, {(steps, *lead, n)}, initial_state={state}, {options})",
        call,
        oracle,
        tuple(args),
        fix=lambda arrays, rng: [(0.5 * arrays[0].astype(np.float64)), *arrays[1:]],
        moods=("normal", "normal", "zeros", "ties"),
        x64=dtype == "float64",
        tolerance=32 * EPS[dtype],
        magnitude=lambda *arrays: oracle(*map(abs, arrays)),
        differentiable=tuple(range(len(args))),
        twice=dtype in ("float32", "float64"),
        dtypes=(dtype, dtype),
    )


def selective(rng: Generator) -> Family:
    batch, length, heads, width = (
        pick(rng, 1, 2, 4),
        pick(rng, 1, 2, 5, 8),
        pick(rng, 1, 2, 4),
        pick(rng, 1, 3, 4),
    )
    groups, states = pick(rng, 1, heads), pick(rng, 1, 2, 4)
    dtype = floats(rng)
    name = pick(rng, "auto", "auto", "xla", "reference", "native" if dtype == "float32" else "auto")
    state, chunk = bool(rng.random() < 0.5), pick(rng, None, None, 1, 3, 4)
    wide = "float64" if dtype == "float64" else "float32"

    def call(x: Any, dt: Any, a: Any, b: Any, c: Any, *more: Any) -> Any:
        return scan.selective_scan(
            x, dt, a, b, c, initial_state=more[0] if more else None, chunk_size=chunk, implementation=name
        )

    def oracle(x: Any, dt: Any, a: Any, b: Any, c: Any, h: Any = None) -> list[np.ndarray]:
        b, c = (np.repeat(y, heads // groups, 2) for y in (b, c))
        h = np.zeros((batch, heads, width, states)) if h is None else h
        out = np.zeros(x.shape)
        for t in range(length):
            fade = np.exp(dt[:, t] * a)[..., None, None]
            h = fade * h + dt[:, t, :, None, None] * x[:, t, :, :, None] * b[:, t, :, None, :]
            out[:, t] = (h * c[:, t, :, None, :]).sum(-1)
        return [out, h]

    args = [
        Arg((batch, length, heads, width), dtype),
        Arg((batch, length, heads), dtype, "positive"),
        Arg((heads,), dtype, "negative"),
        Arg((batch, length, groups, states), dtype),
        Arg((batch, length, groups, states), dtype),
    ] + [Arg((batch, heads, width, states), wide)] * state
    return Family(
        f"selective_scan({dtype} batch={batch} length={length} heads={heads} width={width} groups={groups} "
        f"states={states}, initial_state={state}, chunk_size={chunk}, implementation={name!r})",
        call,
        oracle,
        tuple(args),
        x64=dtype == "float64",
        tolerance=16 * EPS[dtype],
        # An argument's own rounding is that of its dtype: of a step that is narrow the gradient is too.
        differentiable=tuple(range(len(args))),
        twice=dtype in ("float32", "float64"),
        dtypes=(dtype, wide),
    )


# What a random step is made of: each a name, and a function of `(numpy or jax.numpy, values)`.
def _program(rng: Generator, width: int) -> tuple[str, Callable[..., Any]]:
    """A random step ``(xp, carry, x) -> (carry, y)``, and how it reads; of vectors of one width."""
    length = int(rng.integers(1, 6))
    constants = [0.5 * rng.normal(size=width).round(2) for _ in range(2)]
    matrix = (0.3 * rng.normal(size=(width, width))).round(2)
    affine = rng.random() < 0.5
    text: list[str] = []
    steps: list[Callable[[Any, list[Any]], Any]] = []
    # Values: 0 is the carry, 1 is x; what each instruction makes comes after.
    for i in range(length):
        p, q = int(rng.integers(0, 2 + i)), int(rng.integers(0, 2 + i))
        p = p if rng.random() < 0.6 else max(0, 1 + i)  # the last one, so that programs are deep
        k = int(rng.integers(2))
        shift, factor = int(rng.integers(-2, 3)), float(rng.uniform(-0.9, 0.9).__round__(2))
        linear_ops: list[tuple[str, Callable[[Any, list[Any]], Any]]] = [
            (f"v{p} + v{q}", lambda xp, v, p=p, q=q: v[p] + v[q]),
            (f"v{p} - v{q}", lambda xp, v, p=p, q=q: v[p] - v[q]),
            (f"{factor} * v{p}", lambda xp, v, p=p, f=factor: f * v[p]),
            (f"v{p} * x", lambda xp, v, p=p: v[p] * v[1] * 0.5),
            (f"c{k} * v{p}", lambda xp, v, p=p, k=k: v[p] * xp.asarray(constants[k], v[p].dtype)),
            (f"v{p} + mean(v{q})", lambda xp, v, p=p, q=q: v[p] + v[q].mean()),
            (f"0.3 x * sum(v{p})", lambda xp, v, p=p: 0.3 * v[1] * v[p].sum()),
            (f"cumsum(v{p}) / 4", lambda xp, v, p=p: xp.cumsum(v[p]) / 4),
            (f"roll(v{p}, {shift})", lambda xp, v, p=p, s=shift: xp.roll(v[p], s)),
            (f"M @ v{p}", lambda xp, v, p=p: xp.asarray(matrix, v[p].dtype) @ v[p]),
            (f"flip(v{p})", lambda xp, v, p=p: v[p][::-1]),
            (f"where(x > 0, v{p}, v{q})", lambda xp, v, p=p, q=q: xp.where(v[1] > 0, v[p], v[q])),
            (
                f"(v{p}.reshape(2, -1).T).ravel() + v{q}",
                lambda xp, v, p=p, q=q: v[p].reshape(2, -1).T.reshape(-1) + v[q],
            ),
            (f"concat(v{p}[1:], v{q}[:1])", lambda xp, v, p=p, q=q: xp.concatenate([v[p][1:], v[q][:1]])),
            (f"-v{p} + v{q}[0]", lambda xp, v, p=p, q=q: v[q][0] - v[p]),
            (f"v{p} / (2 + x²)", lambda xp, v, p=p: v[p] / (2 + v[1] * v[1])),
        ]
        others: list[tuple[str, Callable[[Any, list[Any]], Any]]] = [
            (f"tanh(v{p})", lambda xp, v, p=p: xp.tanh(v[p])),
            (f"sin(v{p}) * v{q}", lambda xp, v, p=p, q=q: xp.sin(v[p]) * v[q]),
            (f"v{p} - max(v{q})", lambda xp, v, p=p, q=q: v[p] - v[q].max()),
            (f"where(v{p} > 0.1, v{q}, 0)", lambda xp, v, p=p, q=q: xp.where(v[p] > 0.1, v[q], 0 * v[q])),
            (f"minimum(v{p}, v{q} + 1)", lambda xp, v, p=p, q=q: xp.minimum(v[p], v[q] + 1)),
        ]
        options = linear_ops if affine or rng.random() < 0.6 else others
        name, instruction = options[int(rng.integers(len(options)))]
        text.append(f"v{i + 2} = {name}")
        steps.append(instruction)
    decay, out = float(rng.uniform(0.2, 0.7).__round__(2)), int(rng.integers(0, length + 2))
    text.append(f"carry = {decay} v{length + 1}; y = v{out}")

    def step(xp: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        values = [carry, x]
        for each in steps:
            values.append(each(xp, values))
        return decay * values[-1], values[out]

    return "; ".join(text), step


def parallel(rng: Generator) -> Family:
    width, steps = pick(rng, 2, 4), pick(rng, 0, 1, 3, 6)
    text, step = _program(rng, width)
    dtype = pick(rng, "float32", "float32", "float32", "float64", "bfloat16")
    reverse, nested = bool(rng.random() < 0.3), bool(rng.random() < 0.25)
    name = pick(rng, "auto", "auto", "auto", "sequential", "reference")
    options: dict[str, Any] = {
        "num_segments": pick(rng, None, None, 1, 2, 4),
        "use_checkpointing": bool(rng.random() < 0.8),
        "reverse": reverse,
        "implementation": name,
    }

    def one(xp: Any, carry: Any, x: Any) -> Any:
        if not nested:
            return step(xp, carry, x)
        # A second carry that follows the first.
        new, y = step(xp, carry["a"], x)
        return {"a": new, "b": 0.5 * carry["b"] + new}, {"y": y, "b": carry["b"]}

    def call(init: Any, xs: Any) -> Any:
        first = {"a": init, "b": 0 * init} if nested else init
        return scan.parallel_scan(lambda c, x: one(jnp, c, x), first, xs, **options)

    def oracle(init: Any, xs: Any) -> list[np.ndarray]:
        carry: Any = {"a": init, "b": 0 * init} if nested else init
        outs: list[Any] = [None] * steps
        for t in _backwards(reverse, steps):
            carry, outs[t] = one(np, carry, xs[t])
        if nested:
            ys = [np.stack([o[n] for o in outs]) if steps else np.zeros((0, width)) for n in ("b", "y")]
            found = [carry["a"], carry["b"], *ys]
        else:
            found = [carry, np.stack(outs) if steps else np.zeros((0, width))]
        if any(np.max(np.abs(x), initial=0) > 50 for x in found):
            raise Ambiguous
        return found

    smooth = "where(v" not in text and "max(" not in text and "minimum" not in text
    return Family(
        f"parallel_scan({text!r}, {dtype} carry {width}, steps {steps}, nested={nested}, {options})",
        call,
        oracle,
        (Arg((width,), dtype), Arg((steps, width), dtype)),
        moods=("normal",) if dtype != "bfloat16" or smooth else ("ties",),
        x64=dtype == "float64",
        # Of bfloat16 each step rounds; a chain of them is not near to one that does not.
        tolerance=64 * EPS[dtype],
        gradient_tolerance=0.2 if dtype == "bfloat16" else None,
        differentiable=() if dtype == "bfloat16" and not smooth else (0, 1),
        twice=smooth and dtype in ("float32", "float64"),
        # What a step may be given over a mesh is what `lax.scan` takes: the carry has to come out as it went in.
        together=True,
        lay=((), ()),
    )


def semiring(rng: Generator) -> Family:
    name = pick(rng, "sum_product", "max_plus", "min_plus", "log_sum_exp")
    shape = pick(rng, (1,), (6,), (4, 3), (2, 5, 2), (3, 4))
    axis = int(rng.integers(-len(shape), len(shape)))
    reverse, decay = bool(rng.random() < 0.5), bool(rng.random() < 0.6)
    dtype = floats(rng)

    def oracle(b: Any, a: Any = None) -> list[np.ndarray]:
        b = np.moveaxis(b, axis, 0)
        one = 1.0 if name == "sum_product" else 0.0
        a = np.full(b.shape, one) if a is None else np.moveaxis(a, axis, 0)
        h = np.full(b.shape[1:], {"sum_product": 0.0, "min_plus": np.inf}.get(name, -np.inf))
        out = np.zeros_like(b)
        for t in _backwards(reverse, len(b)):
            if name == "sum_product":
                h = a[t] * h + b[t]
            elif name == "log_sum_exp":
                h = np.logaddexp(a[t] + h, b[t])
            else:
                h = (np.maximum if name == "max_plus" else np.minimum)(a[t] + h, b[t])
            out[t] = h
        return [np.moveaxis(out, 0, axis)]

    smooth = name in ("sum_product", "log_sum_exp")
    wide = dtype in ("float32", "float64")
    return Family(
        f"semiring_scan({dtype}{shape}, a={decay}, semiring={name!r}, axis={axis}, reverse={reverse})",
        lambda *arrays: scan.semiring_scan(*arrays, semiring=name, axis=axis, reverse=reverse),
        oracle,
        (Arg(shape, dtype),) * (2 if decay else 1),
        moods=("normal", "zeros", "ties") if smooth else ("normal",),
        x64=dtype == "float64",
        tolerance=(16 if smooth or wide else 4) * EPS[dtype],
        differentiable=tuple(range(2 if decay else 1)) if smooth or wide else (),
        twice=smooth and wide,
        dtypes=(dtype,),
    )


def lif(rng: Generator) -> Family:
    steps, shape = pick(rng, 0, 1, 4, 7), pick(rng, (), (1,), (4,), (2, 3))
    reset, surrogate = pick(rng, "subtract", "zero"), pick(rng, "fast_sigmoid", "sigmoid", "arctan")
    slope, dtype = pick(rng, 1.0, 5.0, 25.0), pick(rng, "float32", "float32", "float64")
    decay, threshold = pick(rng, 0.9, 0.5, 0.0), pick(rng, 1.0, 0.5)
    state, segments = bool(rng.random() < 0.5), pick(rng, None, 1, 2)
    options: dict[str, Any] = {
        "decay": decay,
        "threshold": threshold,
        "reset": reset,
        "surrogate": surrogate,
        "slope": slope,
        "num_segments": segments,
    }

    def run(x: Any, v: Any) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        spikes, before = np.zeros(x.shape), []
        for t in range(steps):
            v = decay * v + x[t]
            if v.size and np.min(np.abs(v - threshold)) < 1e-5:
                raise Ambiguous
            before.append(v)
            spikes[t] = v >= threshold
            v = v - threshold * spikes[t] if reset == "subtract" else v * (1 - spikes[t])
        return spikes, v, before

    def oracle(x: Any, v: Any = None) -> list[np.ndarray]:
        spikes, v, _ = run(x, np.zeros(shape) if v is None else v)
        return [spikes, np.asarray(v)]

    def gradient(arrays: Any, cotangents: Any) -> list[np.ndarray]:
        x, start = arrays[0], arrays[1] if state else np.zeros(shape)
        spikes, _, before = run(x, start)
        grad, out = np.asarray(cotangents[1], np.float64), np.zeros(x.shape)
        for t in range(steps)[::-1]:
            u = before[t] - threshold
            z = 1 / (1 + np.exp(-np.clip(slope * u, -500, 500)))
            bend = {
                "fast_sigmoid": slope / (1 + np.abs(slope * u)) ** 2,
                "sigmoid": slope * z * (1 - z),
                "arctan": slope / (1 + (np.pi * slope * u) ** 2),
            }[surrogate]
            through = 1.0 if reset == "subtract" else 1 - spikes[t]
            lost = -threshold if reset == "subtract" else -before[t]
            grad = grad * through + (grad * lost + cotangents[0][t]) * bend
            out[t] = grad
            grad = grad * decay
        return [out, grad] if state else [out]

    args = [Arg((steps, *shape), dtype)] + [Arg(shape, dtype)] * state
    return Family(
        f"lif({dtype}{(steps, *shape)}, initial_potential={state}, {options})",
        lambda x, *v: scan.lif(x, initial_potential=v[0] if v else None, **options),
        oracle,
        tuple(args),
        moods=("normal", "normal", "zeros"),
        x64=dtype == "float64",
        tolerance=16 * EPS[dtype],
        gradient_tolerance=2000 * EPS[dtype],
        differentiable=tuple(range(len(args))),
        gradient=gradient,
        dtypes=(dtype, dtype),
    )


OPERATIONS = {
    "scan.linear_recurrence": linear,
    "scan.matrix_linear_recurrence": matrix,
    "scan.selective_scan": selective,
    "scan.parallel_scan": parallel,
    "scan.semiring_scan": semiring,
    "scan.lif": lif,
}
