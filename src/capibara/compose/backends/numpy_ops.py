"""The operations of composed models in NumPy: what generated code calls as ``ops.<name>``."""

from __future__ import annotations

from capibara.compose.backends import numpy_space
from capibara.compose.backends.portable import operations
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
