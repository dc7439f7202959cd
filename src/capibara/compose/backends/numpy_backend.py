"""The NumPy backend: composed models and arrays on the CPU, with NumPy only.

NumPy does not differentiate, so ``compile`` also generates the source of the backward pass
(:mod:`capibara.compose.physical.backward`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from capibara.compose.backends import philox
from capibara.compose.backends.base import Backend
from capibara.compose.backends.conversion import as_numbers
from capibara.compose.backends.tape import Traced
from capibara.compose.errors import CompileError, InputError
from capibara.compose.precision import Precision

__all__ = ["NumpyBackend"]


class _Registered:
    """An operation of the user's own, with its derivative if it has one."""

    def __init__(self, name: str, function: Callable[..., Any], vjp: Callable[..., Any] | None) -> None:
        self.name, self.function, self.vjp = name, function, vjp

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)


class NumpyBackend(Backend):
    """The NumPy backend: compiled models, and methods on arrays.

    ``register_op(name, vjp=…)`` takes the derivative of an operation: ``vjp(cotangent, output, *inputs, **attributes)``
    returns the cotangents of the inputs. It is not needed if the operation uses this backend's methods.

    Args:
        dtype: dtype of parameters and arithmetic: "float32", "float64" or "float16" (NumPy has no bfloat16).
        policy: parameter, compute and accumulation dtypes one by one instead of ``dtype``.
        device: "cpu", the only one.

    Raises:
        CompileError: an unsupported dtype or device.
    """

    type = "numpy"
    ops_module = "capibara.compose.backends.numpy_ops"
    eager_module = "capibara.compose.backends.numpy_eager"
    is_manualgrad = True
    jit_default = False
    mesh = None

    def __init__(
        self, dtype: Any = "float32", *, policy: Precision | None = None, device: str = "cpu"
    ) -> None:
        self._start(dtype, policy)
        if "bfloat16" in (self.policy.param, self.policy.compute, self.policy.accumulate):
            raise CompileError("NumPy has no bfloat16: use float32, or JaxBackend or TorchBackend")
        if device != "cpu":
            raise CompileError(f"device={device!r} is not available: NumPy computes only on 'cpu'")
        self.device = device

    def compiled_class(self) -> type:
        from capibara.compose.backends.portable_model import PortableModel

        return PortableModel

    def get_backend_array_type(self) -> Any:
        """``numpy.ndarray``."""
        return np.ndarray

    @staticmethod
    def get_available_devices() -> list[str]:
        """``["cpu"]``."""
        return ["cpu"]

    def to_numpy(self, input: Any) -> Any:
        """A copy of the array."""
        return np.array(input.value if isinstance(input, Traced) else input)

    def to_device(self, data: Any, device: Any, asynchronous: bool = True) -> Any:
        """The array itself: there is one device."""
        if device != "cpu":
            raise CompileError(f"device={device!r} is not available: NumPy computes only on 'cpu'")
        return data

    def block_until_ready(self, data: Any) -> Any:
        """The array itself: NumPy computes synchronously."""
        return data

    def empty_cache(self) -> None:
        """No effect: NumPy has no cache."""

    def _new_key(self, seed: Any) -> Any:
        return philox.as_key(seed)

    def _register(
        self, name: str, function: Callable[..., Any], vjp: Callable[..., Any] | None = None
    ) -> None:
        self.registered_ops[name] = _Registered(name, function, vjp)

    def _given(self, value: Any) -> Any:
        return self.array(value) if isinstance(value, list) else value

    def _make(self, function: str, *args: Any, **options: Any) -> Any:
        for name in ("device_mesh", "tensor_split"):
            if options.pop(name, None) is not None:
                raise InputError(f"{name}: NumPy has one device, arrays cannot be spread; use JaxBackend")
        if options.get("dtype") == "bfloat16":
            raise InputError("dtype=ml.bfloat16: NumPy has no bfloat16; use ml.float32")
        if function == "array":
            return as_numbers(_plain(args[0]), options["dtype"], self.dtype)
        return self._call(function, *args, **options)

    # ---- what compiled models need ------------------------------------------------------------------------

    def as_input(self, value: Any) -> Any:
        """An input unchanged, or as a NumPy array if it is a list or of another library."""
        if isinstance(value, np.ndarray) or not hasattr(value, "__array__"):
            return value
        if type(value).__module__.partition(".")[0] == "torch":
            value = value.detach().cpu()  # PyTorch hands out no others
            value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        return np.asarray(value)

    def run_forward(self, model: Any, *args: Any) -> Any:
        return model.function(*args)

    def run_gradients(
        self, model: Any, params: Any, inputs: Any, state: Any, key: Any, train: bool, cotangents: Any
    ) -> Any:
        return model.namespace["gradients"](params, inputs, state, key, train, cotangents)

    def __repr__(self) -> str:
        return f"NumpyBackend({self.policy.param}/{self.policy.compute})"


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Traced) else value
