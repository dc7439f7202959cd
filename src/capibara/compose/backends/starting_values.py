"""Initialisers in NumPy: the distributions of :mod:`capibara.compose.initializers`, drawn without JAX."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from capibara.compose import initializers as i
from capibara.compose.backends.philox import check_key

__all__ = ["start"]


def _generator(key: np.ndarray) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=check_key(key)))


def _cut_normal(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers between -2 and 2: those outside are drawn again."""
    out = np.asarray(random.standard_normal(shape))
    outside = np.abs(out) > 2
    while outside.any():
        out[outside] = random.standard_normal(int(outside.sum()))
        outside = np.abs(out) > 2
    return out


def start(init: Any, key: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An array as an initialiser says, in float64; a callable of the user is given ``(key, shape, "float64")``."""
    random = _generator(key)
    if isinstance(init, i.Constant):
        return np.full(shape, float(init.value))
    if isinstance(init, i.Given):
        return np.broadcast_to(np.asarray(init.fitting(shape), "float64"), shape)
    if isinstance(init, i.Normal):
        return init.stddev * np.asarray(random.standard_normal(shape))
    if isinstance(init, i.Uniform):
        return init.low + (init.high - init.low) * np.asarray(random.random(shape))
    if isinstance(init, i.Scaled):
        summed = math.prod(shape[init.skip : init.skip + init.fan_in])
        stddev = math.sqrt(init.scale / max(1, summed)) / 0.87962566103423978
        return stddev * _cut_normal(random, shape)
    if isinstance(init, i.LogUniform):
        low, high = math.log(init.low), math.log(init.high)
        value = low + (high - low) * np.asarray(random.random(shape))
        if init.transform == "softplus_inverse":
            value = np.exp(value)
            value = value + np.log(-np.expm1(-value))
        return value
    if isinstance(init, i.UnitRows):
        x = np.asarray(random.standard_normal(shape))
        return init.radius * x / np.linalg.norm(x, axis=-1, keepdims=True)
    return np.asarray(init(key, shape, "float64"))
