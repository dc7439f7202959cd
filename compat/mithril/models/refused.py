"""What Mithril has for its own machinery: each says what to use instead."""

from __future__ import annotations

from typing import Any

from capibara.compose.errors import WiringError

REGISTERED = "an operation of your own: backend.register_op('name', function) and ml.op('name')"
WINDOWS = "the arguments of Convolution1D, Convolution2D, MaxPool1D …, which take numbers and tuples alike"

INSTEAD = {
    "Activation": REGISTERED,
    "CustomPrimitiveModel": REGISTERED,
    "Dtype": "Cast(dtype), with the dtype by name: models here have one float dtype, the backend's",
    "PaddingConverter1D": WINDOWS,
    "PaddingConverter2D": WINDOWS,
    "PrimitiveConvolution1D": "Convolution1D(kernel_size), and connect its weight and bias",
    "PrimitiveConvolution2D": "Convolution2D(kernel_size), and connect its weight and bias",
    "PrimitiveModel": REGISTERED,
    "PrimitiveRandInt": "RandInt(shape, low, high), whose randomness is the key given to evaluate",
    "PrimitiveRandn": "Randn(shape), whose randomness is the key given to evaluate",
    "PrimitiveUnion": "a tuple of numbers, where one is expected",
    "StrideConverter": WINDOWS,
    "TupleConverter": WINDOWS,
}


def _refusing(name: str) -> type[Any]:
    def refuse(self: Any, *args: Any, **options: Any) -> None:
        raise WiringError(f"{name}: got a block that Capibara does not have. Use {INSTEAD[name]}")

    return type(
        name, (), {"__init__": refuse, "__module__": "mithril.models", "__doc__": f"Use {INSTEAD[name]}."}
    )


REFUSED = {name: _refusing(name) for name in INSTEAD}
