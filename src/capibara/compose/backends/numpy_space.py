"""Array functions of NumPy, with their derivatives: what the portable operations are written in.

Each function takes plain arrays and :class:`~.tape.Traced` ones; the same names with the same meaning are in
:mod:`capibara.compose.backends.torch_space`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from capibara.compose.backends.conversion import place_of
from capibara.compose.backends.numpy_linalg import cholesky, eigvalsh, solve_triangular, svd_rows  # noqa: F401 - part of this space
from capibara.compose.backends.tape import record, value_of

Axis = int | tuple[int, ...] | None


def asarray(x: Any, dtype: Any = None, like: Any = None) -> Any:
    return x if hasattr(x, "shape") and dtype is None else np.asarray(value_of(x), dtype)


def constant(value: float, like: Any) -> Any:
    """A number in the dtype of an array."""
    return np.asarray(value, value_of(like).dtype)


def stop(x: Any) -> Any:
    return value_of(x)


def _fit(g: Any, like: Any) -> Any:
    """A cotangent summed over what was broadcast."""
    shape = like.shape if type(like) is np.ndarray else np.shape(value_of(like))
    if g.shape == shape:
        return g
    if g.ndim == 2 and g.shape[1:] == shape:  # a bias
        return np.add.reduce(g, 0)
    extra = g.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        i + extra for i, n in enumerate(shape) if n == 1 and g.shape[i + extra] != 1
    )
    return g.sum(axis=axes).reshape(shape) if axes else g.reshape(shape)


def _quiet(f: Any) -> Any:
    # log(0), 1 / 0 are values here (as on the other backends), not warnings.
    def run(*args: Any, **options: Any) -> Any:
        with np.errstate(all="ignore"):
            return f(*args, **options)

    return run


def add(a: Any, b: Any) -> Any:
    return record(value_of(a) + value_of(b), (a, lambda g: _fit(g, a)), (b, lambda g: _fit(g, b)))


def subtract(a: Any, b: Any) -> Any:
    return record(value_of(a) - value_of(b), (a, lambda g: _fit(g, a)), (b, lambda g: _fit(-g, b)))


def multiply(a: Any, b: Any) -> Any:
    x, y = value_of(a), value_of(b)
    return record(x * y, (a, lambda g: _fit(g * y, a)), (b, lambda g: _fit(g * x, b)))


@_quiet
def divide(a: Any, b: Any) -> Any:
    x, y = value_of(a), value_of(b)
    out = np.divide(x, y)
    return record(out, (a, _quiet(lambda g: _fit(g / y, a))), (b, _quiet(lambda g: _fit(-g * out / y, b))))


def negative(x: Any) -> Any:
    return record(-value_of(x), (x, lambda g: -g))


@_quiet
def power(a: Any, b: Any) -> Any:
    x, y = value_of(a), value_of(b)
    out = np.power(x, y)

    @_quiet
    def by_base(g: Any) -> Any:
        return _fit(np.where(np.equal(y, 0), 0, g * y * np.power(x, np.where(np.equal(y, 0), 1, y) - 1)), a)

    @_quiet
    def by_exponent(g: Any) -> Any:
        return _fit(g * out * np.log(np.where(np.equal(x, 0), 1, x)), b)

    return record(out, (a, by_base), (b, by_exponent))


def exp(x: Any) -> Any:
    out = _quiet(np.exp)(value_of(x))
    return record(out, (x, lambda g: g * out))


def expm1(x: Any) -> Any:
    out = _quiet(np.expm1)(value_of(x))
    return record(out, (x, lambda g: g * (out + 1)))


def log(x: Any) -> Any:
    v = value_of(x)
    return record(_quiet(np.log)(v), (x, _quiet(lambda g: g / v)))


def log1p(x: Any) -> Any:
    v = value_of(x)
    return record(_quiet(np.log1p)(v), (x, _quiet(lambda g: g / (1 + v))))


def sqrt(x: Any) -> Any:
    out = _quiet(np.sqrt)(value_of(x))
    return record(out, (x, _quiet(lambda g: g / (2 * out))))


def tanh(x: Any) -> Any:
    out = np.tanh(value_of(x))
    return record(out, (x, lambda g: g * (1 - out * out)))


def sin(x: Any) -> Any:
    v = value_of(x)
    return record(np.sin(v), (x, lambda g: g * np.cos(v)))


def cos(x: Any) -> Any:
    v = value_of(x)
    return record(np.cos(v), (x, lambda g: -g * np.sin(v)))


def erf(x: Any) -> Any:
    v = value_of(x)
    out = np.asarray(np.frompyfunc(math.erf, 1, 1)(v), v.dtype)
    return record(out, (x, lambda g: g * (2 / math.sqrt(math.pi)) * np.exp(-v * v)))


def sigmoid(x: Any) -> Any:
    v = value_of(x)
    small = np.exp(-np.abs(v))
    out = np.where(v >= 0, 1, small) / (1 + small)
    out = np.asarray(out, v.dtype)
    return record(out, (x, lambda g: g * out * (1 - out)))


def softplus(x: Any) -> Any:
    v = value_of(x)
    return record(np.logaddexp(v, np.zeros((), v.dtype)), (x, lambda g: g * value_of(sigmoid(v))))


def relu(x: Any) -> Any:
    v = value_of(x)
    return record(np.maximum(v, np.zeros((), v.dtype)), (x, lambda g: g * (v > 0)))


def _extreme(a: Any, b: Any, better: Any, choose: Any) -> Any:
    x, y = value_of(a), value_of(b)
    share = lambda p, q: np.where(p == q, 0.5, better(p, q)).astype(np.result_type(x, y))  # noqa: E731
    return record(
        choose(x, y), (a, lambda g: _fit(g * share(x, y), a)), (b, lambda g: _fit(g * share(y, x), b))
    )


def maximum(a: Any, b: Any) -> Any:
    return _extreme(a, b, np.greater, np.maximum)


def minimum(a: Any, b: Any) -> Any:
    return _extreme(a, b, np.less, np.minimum)


def where(condition: Any, a: Any, b: Any) -> Any:
    c, x, y = value_of(condition), value_of(a), value_of(b)
    out = np.where(c, x, y)
    return record(out, (a, lambda g: _fit(np.where(c, g, 0), a)), (b, lambda g: _fit(np.where(c, 0, g), b)))


def _axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    return tuple(place_of(a, ndim) for a in ((axis,) if isinstance(axis, int) else axis))


def _spread(g: Any, axes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    kept = tuple(1 if i in axes else n for i, n in enumerate(shape))
    return np.broadcast_to(np.reshape(g, kept), shape)


def sum(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    v = value_of(x)
    axes = _axes(axis, v.ndim)
    out = np.sum(v, axis=axes, keepdims=keepdims, dtype=v.dtype)
    return record(out, (x, lambda g: _spread(g, axes, v.shape)))


def prod(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    v = value_of(x)
    axes = _axes(axis, v.ndim)
    out = _quiet(np.prod)(v, axis=axes, keepdims=keepdims, dtype=v.dtype)

    def back(g: Any) -> Any:
        # The product of the others is that of those before and those after: no division, so that zeros,
        # infinities and NaN act on the others alone.
        order = (*(i for i in range(v.ndim) if i not in axes), *axes)
        moved = np.transpose(v, order)
        rows = moved.reshape(*moved.shape[: v.ndim - len(axes)], math.prod(v.shape[i] for i in axes))
        first = np.ones_like(rows[..., :1])
        with np.errstate(all="ignore"):
            before = np.cumprod(np.concatenate([first, rows[..., :-1]], -1), -1)
            after = np.cumprod(np.concatenate([first, rows[..., :0:-1]], -1), -1)[..., ::-1]
            others = np.transpose((before * after).reshape(moved.shape), np.argsort(order))
            return _spread(g, axes, v.shape) * others

    return record(out, (x, back))


def _most(x: Any, axis: Axis, keepdims: bool, find: Any) -> Any:
    v = value_of(x)
    axes = _axes(axis, v.ndim)
    out = find(v, axis=axes, keepdims=keepdims)

    def back(g: Any) -> Any:
        at = v == _spread(out, axes, v.shape)
        return _spread(g, axes, v.shape) * at / np.sum(at, axis=axes, keepdims=True)

    return record(out, (x, back))


def amax(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    return _most(x, axis, keepdims, np.max)


def amin(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    return _most(x, axis, keepdims, np.min)


def any(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    return np.asarray(np.any(value_of(x), axis=axis, keepdims=keepdims))


def all(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    return np.asarray(np.all(value_of(x), axis=axis, keepdims=keepdims))


def argmax(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    return np.asarray(np.argmax(value_of(x), axis=axis, keepdims=keepdims), "int32")


def argmin(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    return np.asarray(np.argmin(value_of(x), axis=axis, keepdims=keepdims), "int32")


def argsort(x: Any, axis: int = -1, descending: bool = False) -> Any:
    v = value_of(x)
    if not descending:
        return np.argsort(v, axis=axis, kind="stable").astype("int32")
    # Reversed before and after, so that equal elements keep their order.
    order = np.flip(np.argsort(np.flip(v, axis), axis=axis, kind="stable"), axis)
    return (v.shape[axis] - 1 - order).astype("int32")


def cumsum(x: Any, axis: int) -> Any:
    v = value_of(x)
    back = lambda g: np.flip(np.cumsum(np.flip(g, axis), axis=axis), axis)  # noqa: E731
    return record(np.cumsum(v, axis=axis, dtype=v.dtype), (x, back))


def matmul(a: Any, b: Any) -> Any:
    x, y = value_of(a), value_of(b)

    def by_left(g: Any) -> Any:
        if y.ndim == 1:
            return _fit(np.multiply.outer(g, y) if x.ndim > 1 else g * y, a)
        g = g[..., None, :] if x.ndim == 1 else g
        out = g @ np.swapaxes(y, -1, -2)
        return _fit(out[..., 0, :] if x.ndim == 1 else out, a)

    def by_right(g: Any) -> Any:
        if x.ndim == 1:
            return _fit(np.expand_dims(g, -2) * x[:, None] if y.ndim > 1 else g * x, b)
        g = g[..., None] if y.ndim == 1 else g
        out = np.swapaxes(x, -1, -2) @ g
        return _fit(out[..., 0] if y.ndim == 1 else out, b)

    return record(np.matmul(x, y), (a, by_left), (b, by_right))


def reshape(x: Any, shape: Any) -> Any:
    v = value_of(x)
    return record(np.reshape(v, shape), (x, lambda g: np.reshape(g, v.shape)))


def transpose(x: Any, axes: Any = None) -> Any:
    v = value_of(x)
    row = tuple(range(v.ndim))[::-1] if axes is None else tuple(place_of(a, v.ndim) for a in axes)
    return record(np.transpose(v, row), (x, lambda g: np.transpose(g, np.argsort(row))))


def swapaxes(x: Any, a: int, b: int) -> Any:
    return record(np.swapaxes(value_of(x), a, b), (x, lambda g: np.swapaxes(g, a, b)))


def broadcast_to(x: Any, shape: Any) -> Any:
    return record(np.broadcast_to(value_of(x), shape), (x, lambda g: _fit(g, x)))


def concatenate(rows: Any, axis: int | None = 0) -> Any:
    if axis is None:
        rows, axis = [reshape(r, (-1,)) for r in rows], 0
    values = [np.asarray(value_of(r)) for r in rows]
    edges = np.cumsum([0, *(v.shape[axis] for v in values)])

    def part(i: int) -> Any:
        index = [slice(None)] * values[0].ndim
        index[axis] = slice(edges[i], edges[i + 1])
        return lambda g: g[tuple(index)]

    return record(np.concatenate(values, axis), *((r, part(i)) for i, r in enumerate(rows)))


def stack(rows: Any, axis: int = 0) -> Any:
    values = [np.asarray(value_of(r)) for r in rows]
    part = lambda i: lambda g: np.take(g, i, axis=axis)  # noqa: E731
    return record(np.stack(values, axis), *((r, part(i)) for i, r in enumerate(rows)))


def getitem(x: Any, index: Any) -> Any:
    v = value_of(x)
    index = tuple(value_of(i) for i in index) if isinstance(index, tuple) else value_of(index)

    def back(g: Any) -> Any:
        out = np.zeros(v.shape, g.dtype)
        np.add.at(out, index, g)
        return out

    return record(v[index], (x, back))


def take(x: Any, indices: Any, axis: int) -> Any:
    v = value_of(x)
    at = np.clip(value_of(indices), 0, v.shape[axis] - 1)
    return getitem(x, (slice(None),) * place_of(axis, v.ndim) + (at,))


def take_along_axis(x: Any, indices: Any, axis: int) -> Any:
    v = value_of(x)
    at = np.clip(value_of(indices), 0, v.shape[axis] - 1)
    shape = [
        max(n, m) if i != place_of(axis, v.ndim) else m
        for i, (n, m) in enumerate(zip(v.shape, at.shape, strict=True))
    ]
    grid: list[Any] = list(np.ogrid[tuple(slice(n) for n in shape)])
    grid = [
        np.where(v.shape[i] == 1, 0, g) if i != place_of(axis, v.ndim) else at for i, g in enumerate(grid)
    ]
    return getitem(x, tuple(grid))


def _put(x: Any, index: tuple[Any, ...], updates: Any, add: bool) -> Any:
    out = np.array(value_of(x))

    def back(g: Any) -> Any:
        if add:
            return g
        g = np.array(g)
        g[index] = 0
        return g

    if add:
        np.add.at(out, index, value_of(updates))
    else:
        out[index] = value_of(updates)
    return record(out, (x, back), (updates, lambda g: g[index]))


def scatter(x: Any, indices: Any, updates: Any, axis: int, add: bool) -> Any:
    v = value_of(x)
    at = np.clip(value_of(indices), 0, v.shape[axis] - 1)
    return _put(x, (slice(None),) * place_of(axis, v.ndim) + (at,), updates, add)


def scatter_along_axis(x: Any, indices: Any, updates: Any, axis: int, add: bool) -> Any:
    v = value_of(x)
    at = np.clip(value_of(indices), 0, v.shape[axis] - 1)
    grid: list[Any] = list(np.ogrid[tuple(slice(n) for n in at.shape)])
    grid[place_of(axis, v.ndim)] = at
    return _put(x, tuple(grid), updates, add)


def astype(x: Any, dtype: Any) -> Any:
    v = value_of(x)
    out = np.asarray(v).astype(str(dtype))
    if not (np.issubdtype(out.dtype, np.floating) and np.issubdtype(np.asarray(v).dtype, np.floating)):
        return out
    return record(out, (x, lambda g: g.astype(v.dtype)))


def round(x: Any) -> Any:
    return np.round(value_of(x))


def floor(x: Any) -> Any:
    return np.floor(value_of(x))


def ceil(x: Any) -> Any:
    return np.ceil(value_of(x))


def sign(x: Any) -> Any:
    return np.sign(value_of(x))


def isnan(x: Any) -> Any:
    return np.isnan(value_of(x))


def isinf(x: Any) -> Any:
    return np.isinf(value_of(x))


def floor_divide(a: Any, b: Any) -> Any:
    return _quiet(np.floor_divide)(value_of(a), value_of(b))


def remainder(a: Any, b: Any) -> Any:
    x, y = value_of(a), value_of(b)
    out = _quiet(np.remainder)(x, y)
    return record(out, (a, lambda g: _fit(g, a)), (b, lambda g: _fit(-g * np.floor(x / y), b)))


def logical_and(a: Any, b: Any) -> Any:
    return np.logical_and(value_of(a), value_of(b))


def logical_or(a: Any, b: Any) -> Any:
    return np.logical_or(value_of(a), value_of(b))


def logical_xor(a: Any, b: Any) -> Any:
    return np.logical_xor(value_of(a), value_of(b))


def logical_not(a: Any) -> Any:
    return np.logical_not(value_of(a))


def left_shift(a: Any, b: Any) -> Any:
    return np.left_shift(a, b)


def right_shift(a: Any, b: Any) -> Any:
    return np.right_shift(a, b)


def full(shape: Any, value: Any, dtype: Any, like: Any = None) -> Any:
    return np.full(shape, value, str(dtype))


def arange(start: Any, stop: Any, step: Any = 1, dtype: Any = "int32", like: Any = None) -> Any:
    return np.arange(start, stop, step).astype(str(dtype))


def eye(rows: int, columns: int, dtype: Any, like: Any = None) -> Any:
    return np.eye(rows, columns, dtype=str(dtype))


def tiny(x: Any) -> float:
    """The smallest normal number of an array's dtype."""
    return float(np.finfo(value_of(x).dtype).tiny)


def wide(x: Any, accumulate: str = "float32") -> str:
    """The wider of an array's dtype and ``accumulate``."""
    return np.promote_types(value_of(x).dtype, accumulate).name


def is_float(x: Any) -> bool:
    return np.issubdtype(np.asarray(value_of(x)).dtype, np.floating)


def is_bool(x: Any) -> bool:
    return np.asarray(value_of(x)).dtype == bool


def dtype_of(x: Any) -> str:
    return np.asarray(value_of(x)).dtype.name


def searchsorted(order: Any, values: Any, right: bool) -> Any:
    return np.searchsorted(value_of(order), value_of(values), side="right" if right else "left")


def bincount(x: Any, length: int) -> Any:
    return np.bincount(value_of(x).reshape(-1), minlength=length).astype("int32")


def unique(x: Any) -> tuple[Any, Any, Any]:
    values, inverse, counts = np.unique(value_of(x), return_inverse=True, return_counts=True)
    return values, inverse.reshape(np.shape(value_of(x))).astype("int32"), counts.astype("int32")


def from_numpy(x: Any, like: Any = None) -> Any:
    return x


def to_numpy(x: Any) -> Any:
    return np.asarray(value_of(x))
