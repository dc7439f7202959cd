"""Initialisers of parameters and states.

An initialiser is ``init(key, shape, dtype) -> array``. These are frozen dataclasses, so that a model can be printed,
compared and serialised; any callable with that signature works as well (``jax.nn.initializers`` too).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.compose.errors import CompileError
from capibara.compose.logical.arguments import number, whole

if TYPE_CHECKING:
    import jax

__all__ = ["Constant", "Given", "LogUniform", "Normal", "Scaled", "Uniform", "UnitRows", "ones", "zeros"]


def _drawn(sampler: Callable[..., jax.Array], key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``sampler(key, shape)`` in float32, drawn as a vector.

    The numbers are the same (JAX's counters are positions in the flattened array), but XLA on CPU compiles the
    generator about seven times faster without the arithmetic of several dimensions in it.
    """
    return sampler(key, (math.prod(shape),), dtype="float32").reshape(shape)


def _cut_normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    import jax

    return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)


@dataclass(frozen=True)
class Constant:
    """Every element is ``value``."""

    value: float = 0.0

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        import jax.numpy as jnp

        return jnp.full(shape, self.value, dtype)


zeros = Constant(0.0)
ones = Constant(1.0)


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0 and standard deviation ``stddev``."""

    stddev: float = 0.02

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        import jax

        return (self.stddev * _drawn(jax.random.normal, key, shape)).astype(dtype)


@dataclass(frozen=True)
class Uniform:
    """Uniformly distributed from ``low`` to ``high``."""

    low: float
    high: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        import jax

        return (self.low + (self.high - self.low) * _drawn(jax.random.uniform, key, shape)).astype(dtype)


class Given:
    """A given array, or nested tuples of numbers. Not a dataclass, since arrays are not compared."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        import jax.numpy as jnp

        return jnp.broadcast_to(jnp.asarray(self.fitting(shape), dtype), shape)

    def fitting(self, shape: tuple[int, ...]) -> Any:
        """The value.

        Raises:
            CompileError: it cannot be broadcast to ``shape``.
        """
        own = np.shape(self.value)
        try:
            fits = np.broadcast_shapes(own, shape) == tuple(shape)
        except ValueError:
            fits = False
        if not fits:
            raise CompileError(f"an array of shape {tuple(shape)} cannot start as a value of shape {own}")
        return self.value


@dataclass(frozen=True)
class Scaled:
    """Truncated normal with variance ``scale / fan_in`` (LeCun, 1998; He, 2015, with ``scale=2``).

    Args:
        scale: variance of the result for inputs of variance 1.
        fan_in: number of dimensions of the shape that are summed over.
        skip: number of dimensions before those: the outputs of a convolution's kernel, the experts of a mixture.
    """

    scale: float = 1.0
    fan_in: int = 1
    skip: int = 0

    def __post_init__(self) -> None:
        number("scale", self.scale)
        whole("fan_in", self.fan_in, 0)
        whole("skip", self.skip, 0)

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        # 0.8796… is the standard deviation of a unit normal cut at ±2, so that the variance is as said.
        summed = math.prod(shape[self.skip : self.skip + self.fan_in])
        stddev = math.sqrt(self.scale / max(1, summed)) / 0.87962566103423978
        return (stddev * _drawn(_cut_normal, key, shape)).astype(dtype)


@dataclass(frozen=True)
class LogUniform:
    """``transform(exp(u))`` with u uniform between ``log(low)`` and ``log(high)``.

    ``transform="log"`` stores the logarithm (decay rates); ``"softplus_inverse"`` stores the inverse of softplus
    (step sizes), as in Mamba (Gu and Dao, 2023).
    """

    low: float
    high: float
    transform: str = "log"

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        import jax
        import jax.numpy as jnp

        low, high = math.log(self.low), math.log(self.high)
        value = low + (high - low) * _drawn(jax.random.uniform, key, shape)
        if self.transform == "softplus_inverse":
            value = jnp.exp(value)
            value = value + jnp.log(-jnp.expm1(-value))
        return value.astype(dtype)


@dataclass(frozen=True)
class UnitRows:
    """Rows drawn uniformly from the sphere of radius ``radius``.

    Arrays of one block with the same ``salt`` start equal: their key is derived from it instead of their own name.
    """

    radius: float = 1.0
    salt: str | None = None

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        import jax
        import jax.numpy as jnp

        x = _drawn(jax.random.normal, key, shape)
        return (self.radius * x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)
