"""The operations of composed models in PyTorch: what generated code calls as ``ops.<name>``.

Gradients are PyTorch's own."""

from __future__ import annotations

import torch

from capibara.compose.backends import torch_space
from capibara.compose.backends.portable import operations, short
from capibara.compose.backends.portable.creation import Maker
from capibara.compose.backends.portable.operations import *  # noqa: F403

_maker = Maker(torch_space)
arange = _maker.arange
eye = _maker.eye
eye_complement = _maker.eye_complement
full = _maker.full
randint = _maker.randint
randn = _maker.randn
random_uniform = _maker.random_uniform

_NAMED = {"float32": torch.float32, "float64": torch.float64}

# Those that small models call most, without a look at what they were given where it is tensors.
dense = short.dense(torch.Tensor, torch.matmul, lambda x, accumulate: x.dtype is _NAMED.get(accumulate))
add = short.two(torch.Tensor, torch.add, operations.add)
subtract = short.two(torch.Tensor, torch.sub, operations.subtract)
multiply = short.two(torch.Tensor, torch.mul, operations.multiply)
relu = short.one(torch.Tensor, torch.relu, operations.relu)
tanh = short.one(torch.Tensor, torch.tanh, operations.tanh)

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
