"""Max-plus and min-plus algebra: term by term, gradients to the lowest index that reaches a value."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from tropical_oracle import oracle as product

from capibara.ops import tropical
from fuzz_ops.case import EPS, Ambiguous, Arg, Family, Generator, compare, floats, pick

__all__ = ["OPERATIONS"]

MOODS = ("normal", "normal", "normal", "zeros", "ties", "large", "special")


def _semiring(rng: Generator) -> str:
    return pick(rng, "max_plus", "max_plus", "min_plus")


def _implementation(rng: Generator) -> str:
    return pick(
        rng, "auto", "auto", "native", "xla", "reference", "pallas_tpu" if rng.random() < 0.3 else "auto"
    )


def _unbroadcast(grad: Any, shape: tuple[int, ...]) -> np.ndarray:
    grad = grad.sum(tuple(range(grad.ndim - len(shape))))
    ones = tuple(i for i, n in enumerate(shape) if n == 1 and grad.shape[i] != 1)
    return grad.sum(ones, keepdims=True) if ones else grad


def _product_gradient(a: Any, b: Any, out: Any, semiring: str) -> list[np.ndarray]:
    """The gradient goes to the lowest index that reaches the value, if there is one."""
    _, index = product(a, b, semiring)
    inner = a.shape[-1]
    hit = index[..., :, None, :] == np.arange(inner)[:, None]  # [*batch, rows, inner, columns]
    sent = np.where(hit, out[..., :, None, :], 0)
    return [_unbroadcast(sent.sum(-1), a.shape), _unbroadcast(sent.sum(-3), b.shape)]


def _soft(a: Any, b: Any, semiring: str, temperature: float) -> np.ndarray:
    if semiring == "min_plus":
        return -_soft(-a, -b, "max_plus", temperature)
    terms = (a[..., :, :, None] + b[..., None, :, :]) / temperature
    if terms.shape[-2] == 0:
        return np.full(terms.shape[:-2] + terms.shape[-1:], -np.inf)
    top = terms.max(-2, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    return temperature * (np.log(np.exp(terms - top).sum(-2)) + top[..., 0, :])


def matmul(rng: Generator, vector: bool = False) -> Family:
    rows, inner, columns = pick(rng, 1, 2, 4, 5), pick(rng, 0, 1, 4, 6), 1 if vector else pick(rng, 1, 3, 4)
    a_lead, b_lead = pick(rng, ((), ()), ((), ()), ((2,), ()), ((), (4,)), ((2, 1), (4,)), ((0,), ()))
    if vector:
        b_lead = a_lead
    semiring, dtype, name = _semiring(rng), floats(rng), _implementation(rng)
    temperature = pick(rng, 0.0, 0.0, 0.0, 0.5)
    index = not vector and temperature == 0 and rng.random() < 0.3
    if temperature and name in ("native", "pallas_tpu"):
        name = "auto"
    if name == "native" and dtype == "float64":
        name = "xla"
    options: dict[str, Any] = {"semiring": semiring, "implementation": name}
    if temperature:
        options["temperature"] = temperature
    if index:
        options["return_argmax"] = True

    def oracle(a: Any, b: Any) -> list[np.ndarray]:
        b = b[..., None] if vector else b
        if temperature:
            values = _soft(a, b, semiring, temperature)
            found = [values]
        else:
            values, lowest = product(a, b, semiring)
            found = [values, lowest.astype(np.int32)] if index else [values]
        return [x[..., 0] if vector else x for x in found]

    def gradient(arrays: Any, cotangents: Any) -> list[np.ndarray]:
        a, b = arrays
        out = cotangents[0][..., None] if vector else cotangents[0]
        grads = _product_gradient(a, b[..., None] if vector else b, out, semiring)
        return [grads[0], grads[1][..., 0] if vector else grads[1]]

    def check(arrays: Any, got: Any) -> str | None:
        """An index is right if its term is the value, but for rounding."""
        if got[0].dtype.name != dtype:
            return f"dtype {got[0].dtype}"
        want = oracle(*arrays)
        size = max(1.0, *(float(np.max(np.abs(x), where=np.isfinite(x), initial=0)) for x in arrays))
        wrong = compare(got[0], want[0], tolerance, size)
        if wrong or not index:
            return wrong
        a, b = arrays
        left, right = np.broadcast_arrays(a[..., :, :, None], b[..., None, :, :])
        with np.errstate(invalid="ignore"):
            terms = left + right
        lost = want[1] < 0
        if np.any((got[1] < 0) != lost):
            return f"index {got[1].tolist()}, expected {want[1].tolist()}"
        if inner == 0:
            return None
        taken = np.take_along_axis(terms, np.where(lost, 0, got[1])[..., :, None, :], -2)[..., :, 0, :]
        good = lost | (taken == want[0]) | (np.abs(taken - want[0]) <= 8 * EPS["float32"] * size)
        return None if good.all() else f"index {got[1].tolist()}, expected {want[1].tolist()}"

    tolerance = 4 * EPS[dtype]
    b_shape = (*b_lead, inner) if vector else (*b_lead, inner, columns)
    smooth = bool(temperature)
    return Family(
        f"{'matvec' if vector else 'matmul'}({dtype}{(*a_lead, rows, inner)}, {b_shape}, {options})",
        lambda a, b: (tropical.matvec if vector else tropical.matmul)(a, b, **options),
        oracle,
        (Arg((*a_lead, rows, inner), dtype), Arg(b_shape, dtype)),
        moods=("normal", "normal", "zeros", "ties", "large") if smooth else MOODS,
        x64=dtype == "float64",
        tolerance=tolerance if not smooth else 16 * EPS[dtype],
        # Narrow numbers tie often, and their sums are compared in float32, exactly.
        differentiable=(0, 1),
        gradient=None if smooth else gradient,
        twice=smooth and dtype in ("float32", "float64") and inner > 0,
        check=None if smooth else check,
    )


def closure(rng: Generator, paths: bool = False) -> Family:
    lead, n = pick(rng, (), (), (2,), (4, 1)), pick(rng, 0, 1, 2, 4, 5)
    dtype, name = floats(rng, narrow=False), pick(rng, "auto", "auto", "xla", "reference")
    semiring = "min_plus" if paths else _semiring(rng)
    sign = 1.0 if semiring == "min_plus" else -1.0
    cycles = bool(rng.random() < 0.2)

    def fix(arrays: list[np.ndarray], rng: Generator) -> list[np.ndarray]:
        lengths = np.abs(arrays[0].astype(np.float64)) + 0.05
        if cycles and n > 1:
            lengths = np.where(rng.random(lengths.shape) < 0.15, -lengths, lengths)
        absent = rng.random(lengths.shape) < 0.5
        return [np.where(absent, sign * np.inf, sign * lengths)]

    def best(d: Any) -> np.ndarray:
        d = d.copy()
        with np.errstate(invalid="ignore"):
            d[..., range(n), range(n)] = np.minimum(d[..., range(n), range(n)], 0)
            for k in range(n):
                d = np.minimum(d, d[..., :, k : k + 1] + d[..., k : k + 1, :])
                d = np.maximum(d, -1e6)  # what goes down for ever stays a number
            lost = np.zeros_like(d, dtype=bool)
            for k in range(n):
                down = d[..., k, k] < -1e-3
                if np.any((d[..., k, k] < 0) & ~down):
                    raise Ambiguous
                reach = np.isfinite(d[..., :, k : k + 1]) & np.isfinite(d[..., k : k + 1, :])
                lost |= reach & down[..., None, None]
        return np.where(lost, -np.inf, d)

    def oracle(weights: Any) -> list[np.ndarray]:
        return [sign * best(sign * weights)] if n else [weights]

    options: dict[str, Any] = (
        {"implementation": name} if paths else {"implementation": name, "semiring": semiring}
    )
    function = tropical.shortest_paths if paths else tropical.closure
    return Family(
        f"{'shortest_paths' if paths else 'closure'}({dtype}{(*lead, n, n)}, cycles={cycles}, {options})",
        lambda weights: function(weights, **options),
        oracle,
        (Arg((*lead, n, n), dtype),),
        fix=fix,
        moods=("normal",),
        x64=dtype == "float64",
        tolerance=16 * EPS[dtype],
        # No path stays no path: differences of the finite ones, where no cycle is passed.
        differentiable=() if cycles else (0,),
        gradient=None
        if cycles or not n
        else lambda arrays, cotangents: [_path_gradient(sign * arrays[0], cotangents[0])],
    )


def _path_gradient(d: Any, out: Any) -> np.ndarray:
    """Along the one shortest path, in lengths that are drawn at random."""
    n = d.shape[-1]
    grads = np.zeros_like(d)
    for at in np.ndindex(*d.shape[:-2]):
        short = d[at].copy()
        after = np.where(np.isfinite(short), np.arange(n)[None, :], -1)
        for i in range(n):
            short[i, i], after[i, i] = 0.0, i
        for k, i, j in itertools.product(range(n), repeat=3):
            if short[i, k] + short[k, j] < short[i, j]:
                short[i, j], after[i, j] = short[i, k] + short[k, j], after[i, k]
        for i, j in itertools.product(range(n), repeat=2):
            here = i
            while here != j and np.isfinite(short[i, j]):
                step = after[here, j]
                grads[(*at, here, step)] += out[(*at, i, j)]
                here = step
    return grads


def _windows(x: Any, window: Any, strides: Any, padding: str, zero: float) -> tuple[np.ndarray, Any]:
    """``[batch, channels, *outputs, *window]``."""
    rank = len(window)
    if padding == "SAME":
        pads = []
        for n, k, s in zip(x.shape[2:], window, strides, strict=True):
            whole = max((-(-n // s) - 1) * s + k - n, 0)
            pads.append((whole // 2, whole - whole // 2))
        x = np.pad(x, [(0, 0), (0, 0), *pads], constant_values=zero)
    seen = np.lib.stride_tricks.sliding_window_view(x, window, axis=tuple(range(2, 2 + rank)))
    return seen[(slice(None), slice(None), *(slice(None, None, s) for s in strides))], x


def conv(n: int) -> Any:
    def family(rng: Generator) -> Family:
        batch, channels, outs = pick(rng, 1, 2, 4), pick(rng, 1, 2), pick(rng, 1, 2, 3)
        sizes = tuple(pick(rng, 3, 4, 6) for _ in range(n))
        taps = tuple(pick(rng, 1, 2, 3) for _ in range(n))
        strides = tuple(pick(rng, 1, 1, 2) for _ in range(n))
        padding, semiring, dtype, name = (
            pick(rng, "VALID", "SAME"),
            _semiring(rng),
            floats(rng),
            _implementation(rng),
        )
        if name == "native" and dtype == "float64":
            name = "xla"
        sign = 1.0 if semiring == "max_plus" else -1.0
        options: dict[str, Any] = {
            "strides": strides if n > 1 else strides[0],
            "padding": padding,
            "semiring": semiring,
            "implementation": name,
        }

        def oracle(x: Any, kernel: Any) -> list[np.ndarray]:
            seen, _ = _windows(sign * x, taps, strides, padding, -np.inf)
            flat = np.moveaxis(seen, 1, 1 + n).reshape(*seen.shape[:1], *seen.shape[2 : 2 + n], -1)
            rows = flat.reshape(-1, flat.shape[-1])
            value, _ = product(rows, (sign * kernel).reshape(outs, -1).T)
            return [sign * np.moveaxis(value.reshape(*flat.shape[:-1], outs), -1, 1)]

        return Family(
            f"tropical.conv{n}d({dtype}{(batch, channels, *sizes)}, {(outs, channels, *taps)}, {options})",
            lambda x, k: (tropical.conv1d if n == 1 else tropical.conv2d)(x, k, **options),
            oracle,
            (Arg((batch, channels, *sizes), dtype), Arg((outs, channels, *taps), dtype)),
            moods=("normal", "normal", "zeros", "large", "special"),
            x64=dtype == "float64",
            tolerance=4 * EPS[dtype],
            differentiable=(0, 1) if dtype in ("float32", "float64") else (),
            gradient=lambda arrays, cotangents: _conv_gradient(
                sign * arrays[0], sign * arrays[1], cotangents[0], taps, strides, padding
            ),
            dtypes=(dtype,),
        )

    return family


def _conv_gradient(x: Any, kernel: Any, out: Any, taps: Any, strides: Any, padding: str) -> list[np.ndarray]:
    seen, _ = _windows(x, taps, strides, padding, -np.inf)
    places, _ = _windows(np.arange(x.size, dtype=np.float64).reshape(x.shape), taps, strides, padding, -1.0)
    grads = [np.zeros(x.size), np.zeros(kernel.shape)]
    for b, o, *at in np.ndindex(*out.shape):
        terms = seen[(b, slice(None), *at)] + kernel[o]
        if not np.isfinite(terms).any():
            continue
        k = np.unravel_index(np.argmax(terms), terms.shape)
        grads[0][int(places[(b, k[0], *at, *k[1:])])] += out[(b, o, *at)]
        grads[1][(o, *k)] += out[(b, o, *at)]
    return [grads[0].reshape(x.shape), grads[1]]


def polyval(rng: Generator) -> Family:
    n, shape = pick(rng, 1, 2, 5, 8, 70), pick(rng, (), (1,), (4,), (2, 4), (0,))
    semiring, dtype, name = _semiring(rng), floats(rng), pick(rng, "auto", "auto", "auto", "xla", "reference")
    sign = 1.0 if semiring == "max_plus" else -1.0

    def oracle(coefficients: Any, x: Any) -> list[np.ndarray]:
        with np.errstate(invalid="ignore"):
            powers = np.arange(n) * x[..., None]
        powers[..., 0] = 0
        terms = sign * (coefficients + powers)
        return [sign * terms.max(-1)]

    def gradient(arrays: Any, cotangents: Any) -> list[np.ndarray]:
        coefficients, x = arrays
        terms = sign * (coefficients + np.arange(n) * x[..., None])
        lowest = terms.argmax(-1)
        top = np.zeros(n)
        np.add.at(top, lowest.ravel(), cotangents[0].ravel())
        return [top, lowest * cotangents[0]]

    return Family(
        f"polyval({dtype}({n},), {shape}, semiring={semiring!r}, implementation={name!r})",
        lambda c, x: tropical.polyval(c, x, semiring=semiring, implementation=name),
        oracle,
        (Arg((n,), dtype), Arg(shape, dtype)),
        moods=("normal", "normal", "ties", "zeros", "large"),
        x64=dtype == "float64",
        tolerance=4 * EPS[dtype],
        differentiable=(0, 1) if dtype in ("float32", "float64") else (),
        gradient=gradient,
        dtypes=(dtype,),
    )


def pool(rng: Generator) -> Family:
    n = pick(rng, 1, 2)
    batch, channels = pick(rng, 1, 2, 4), pick(rng, 1, 2)
    sizes, window = tuple(pick(rng, 3, 4, 6) for _ in range(n)), tuple(pick(rng, 1, 2, 3) for _ in range(n))
    strides = pick(rng, None, tuple(pick(rng, 1, 2) for _ in range(n)))
    padding, semiring, dtype = pick(rng, "VALID", "SAME"), _semiring(rng), floats(rng)
    sign = 1.0 if semiring == "max_plus" else -1.0

    def oracle(x: Any) -> list[np.ndarray]:
        seen, _ = _windows(sign * x, window, strides or window, padding, -np.inf)
        return [sign * seen.max(tuple(range(-n, 0)))]

    return Family(
        f"pool({dtype}{(batch, channels, *sizes)}, {window}, {strides}, {padding}, {semiring})",
        lambda x: tropical.pool(x, window, strides=strides, padding=padding, semiring=semiring),
        oracle,
        (Arg((batch, channels, *sizes), dtype),),
        moods=("normal", "normal", "zeros", "ties", "large")
        if dtype not in ("float32", "float64")
        else ("normal", "large"),
        x64=dtype == "float64",
        tolerance=EPS[dtype],
        differentiable=(0,) if dtype in ("float32", "float64") else (),
        dtypes=(dtype,),
    )


def scan(rng: Generator) -> Family:
    shape = pick(rng, (1,), (6,), (4, 3), (2, 5, 2), (0, 3), (3, 4))
    axis = int(rng.integers(-len(shape), len(shape)))
    reverse, semiring, dtype = bool(rng.random() < 0.5), _semiring(rng), floats(rng)
    sign = 1.0 if semiring == "max_plus" else -1.0

    def oracle(a: Any, b: Any) -> list[np.ndarray]:
        a, b = np.moveaxis(sign * a, axis, 0), np.moveaxis(sign * b, axis, 0)
        h, out = np.full(a.shape[1:], -np.inf), np.zeros_like(b)
        for t in range(len(a))[:: -1 if reverse else 1]:
            with np.errstate(invalid="ignore"):
                carried = np.where((a[t] == -np.inf) | (h == -np.inf), -np.inf, a[t] + h)
            h = np.maximum(carried, b[t])
            out[t] = h
        return [sign * np.moveaxis(out, 0, axis)]

    smooth = dtype in ("float32", "float64")
    return Family(
        f"tropical.scan({dtype}{shape}, axis={axis}, semiring={semiring!r}, reverse={reverse})",
        lambda a, b: tropical.scan(a, b, axis=axis, semiring=semiring, reverse=reverse),
        oracle,
        (Arg(shape, dtype), Arg(shape, dtype)),
        moods=("normal", "large") if smooth else ("normal", "zeros", "ties"),
        x64=dtype == "float64",
        tolerance=16 * EPS[dtype],
        differentiable=(0, 1) if smooth else (),
        dtypes=(dtype,),
    )


OPERATIONS = {
    "tropical.matmul": matmul,
    "tropical.matvec": lambda rng: matmul(rng, vector=True),
    "tropical.closure": closure,
    "tropical.shortest_paths": lambda rng: closure(rng, paths=True),
    "tropical.conv1d": conv(1),
    "tropical.conv2d": conv(2),
    "tropical.polyval": polyval,
    "tropical.pool": pool,
    "tropical.scan": scan,
}
