"""Arrays made from nothing, randomness, and repetition: what cannot tell from an array which library is meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capibara.compose.backends import philox
from capibara.compose.backends.portable.space import space
from capibara.compose.errors import InputError

__all__ = ["Maker", "checkpointed", "dropout", "fold", "repeat"]

Array = Any

fold = philox.fold


def _needed(key: Any, what: str) -> Any:
    if key is None:
        raise InputError(f"a model with {what} needs randomness: pass key=backend.get_random_key()")
    return key


class Maker:
    """The functions for one library, given its array functions."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def arange(self, start: float, stop: float, step: float, dtype: str) -> Array:
        return self.xp.arange(start, stop, step, dtype)

    def eye(self, rows: int, columns: int, dtype: str) -> Array:
        return self.xp.eye(rows, columns, dtype)

    def eye_complement(self, rows: int, columns: int, dtype: str) -> Array:
        return 1 - self.xp.eye(rows, columns, dtype)

    def full(self, shape: tuple[int, ...], value: float, dtype: str) -> Array:
        return self.xp.full(shape, value, dtype)

    def randn(self, shape: tuple[int, ...], dtype: str, key: Any) -> Array:
        return self._drawn(philox.normal, dtype, _needed(key, "Randn"), shape)

    def random_uniform(self, shape: tuple[int, ...], low: float, high: float, dtype: str, key: Any) -> Array:
        return self._drawn(philox.uniform, dtype, _needed(key, "RandomUniform"), shape, low, high)

    def randint(self, shape: tuple[int, ...], low: int, high: int, key: Any) -> Array:
        return self._drawn(philox.integers, "int32", _needed(key, "RandInt"), shape, low, high)

    def draw_normal(self, key: Any, shape: tuple[int, ...], dtype: str) -> Array:
        return self._drawn(philox.normal, dtype, key, shape)

    def draw_uniform(self, key: Any, shape: tuple[int, ...], low: float, high: float, dtype: str) -> Array:
        return self._drawn(philox.uniform, dtype, key, shape, low, high)

    def draw_integers(self, key: Any, shape: tuple[int, ...], low: int, high: int, dtype: str) -> Array:
        return self._drawn(philox.integers, dtype, key, shape, low, high)

    def linspace(self, start: float, stop: float, count: int, dtype: str) -> Array:
        import numpy as np

        # NumPy hands arrays of other libraries to these, and would not give one of its own.
        drawn = np.linspace(_own(start), _own(stop), count)
        return self.xp.astype(self.xp.from_numpy(drawn), dtype)

    def _drawn(self, draw: Callable[..., Any], dtype: str, *args: Any) -> Array:
        import numpy as np

        # NumPy has no bfloat16: drawn in float32 and rounded. A single value comes as a NumPy scalar.
        wide = "float32" if dtype == "bfloat16" else dtype
        return self.xp.astype(self.xp.from_numpy(np.asarray(draw(*args, wide))), dtype)


def _own(value: Any) -> Any:
    return float(value) if getattr(value, "shape", None) == () else value


def dropout(x: Array, rate: float, key: Any, train: bool) -> Array:
    if not train or rate == 0.0:
        return x
    if key is None:
        raise InputError(
            "a model with dropout needs randomness in training: pass key=backend.get_random_key()"
        )
    xp = space(x)
    keep = xp.from_numpy(philox.uniform(key, tuple(x.shape), 0.0, 1.0, "float32") < 1.0 - rate, x)
    return xp.where(keep, x / (1.0 - rate), xp.constant(0, x))


def _map(fn: Callable[..., Any], *trees: Any) -> Any:
    """``fn`` on the arrays of nested dicts and tuples."""
    first = trees[0]
    if isinstance(first, dict):
        return {k: _map(fn, *(t[k] for t in trees)) for k in first}
    if isinstance(first, tuple):
        return tuple(_map(fn, *row) for row in zip(*trees, strict=True))
    return fn(*trees)


def at(tree: Any, index: int) -> Any:
    """Row ``index`` of every array of a nested dict."""
    return _map(lambda x: space(x).getitem(x, index), tree)


def stacked(trees: list[Any]) -> Any:
    """Nested dicts of one structure, array by array along a new first dimension."""
    return _map(lambda *rows: space(*rows).stack(rows, 0), *trees)


def checkpointed(body: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """The body itself."""
    return body


def repeat(
    body: Callable[..., Any],
    params: Any,
    carry: Any,
    shared: Any,
    state: Any,
    key: Any,
    train: bool,
    *,
    count: int,
    mode: str,
    remat: str,
) -> tuple[Any, Any, Any]:
    """``carry, state[i], extra[i] = body(params[i], carry, shared, state[i], key[i], train)``, one after the other."""
    keys = [None] * count if key is None else philox.split(key, count)
    states, extras = [], []
    for i in range(count):
        carry, after, extra = body(at(params, i), carry, shared, at(state, i), keys[i], train)
        states.append(after)
        extras.append(extra)
    return carry, stacked(states), stacked(extras)
