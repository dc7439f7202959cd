"""The operations of composed models in NumPy: what generated code calls as ``ops.<name>``."""

from __future__ import annotations

import numpy as np

from capibara.compose.backends import numpy_space
from capibara.compose.backends.portable import operations, short
from capibara.compose.backends.portable.creation import Maker
from capibara.compose.backends.portable.operations import *  # noqa: F403

_maker = Maker(numpy_space)
arange = _maker.arange
eye = _maker.eye
eye_complement = _maker.eye_complement
full = _maker.full
randint = _maker.randint
randn = _maker.randn
random_uniform = _maker.random_uniform

# Those that small models call most, without a look at what they were given where it is NumPy's arrays.
dense = short.dense(np.ndarray, np.dot, lambda x, accumulate: x.dtype == accumulate)
add = short.two(np.ndarray, np.add, operations.add)
subtract = short.two(np.ndarray, np.subtract, operations.subtract)
multiply = short.two(np.ndarray, np.multiply, operations.multiply)
relu = short.one(np.ndarray, lambda x: np.maximum(x, 0), operations.relu)
tanh = short.one(np.ndarray, np.tanh, operations.tanh)

__all__ = [
    "arange",
    "eye",
    "eye_complement",
    "full",
    "randint",
    "randn",
    "random_uniform",
]
__all__ += operations.__all__
