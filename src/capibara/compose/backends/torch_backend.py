"""The PyTorch backend: composed models and arrays as PyTorch tensors, with PyTorch's own differentiation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from capibara.compose.backends import philox
from capibara.compose.backends.base import Backend
from capibara.compose.backends.conversion import as_numbers
from capibara.compose.errors import CompileError, InputError
from capibara.compose.precision import Precision
from capibara.errors import MissingExtraError

__all__ = ["TorchBackend"]


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("torch", "torch", "TorchBackend") from error
    return torch


class TorchBackend(Backend):
    """The PyTorch backend: compiled models, and methods on tensors. PyTorch's settings do not change.

    Args:
        dtype: dtype of parameters and arithmetic.
        policy: parameter, compute and accumulation dtypes one by one instead of ``dtype``.
        device: "cpu", "cuda:1", "mps" …; "gpu" and "gpu:1" mean CUDA devices.
        jit: run compiled models through ``torch.compile``.

    Raises:
        CompileError: the device is not available. MissingExtraError: PyTorch is not installed.
    """

    type = "torch"
    ops_module = "capibara.compose.backends.torch_ops"
    eager_module = "capibara.compose.backends.torch_eager"
    mesh = None

    def __init__(
        self,
        dtype: Any = "float32",
        *,
        policy: Precision | None = None,
        device: Any = "cpu",
        jit: bool = False,
    ) -> None:
        torch = _torch()
        self._start(dtype, policy)
        name = str(device).replace("gpu", "cuda")
        try:
            self.device = torch.device(name)
            torch.empty((), device=self.device)
        except (RuntimeError, AssertionError, NotImplementedError):
            raise CompileError(
                f"device={device!r} is not available. The devices of this machine are: "
                f"{', '.join(self.get_available_devices())}"
            ) from None
        self.jit_default = jit

    @property
    def platform(self) -> str:
        return "gpu" if self.device.type == "cuda" else self.device.type

    def compiled_class(self) -> type:
        from capibara.compose.backends.portable_model import PortableModel

        return PortableModel

    def scope(self) -> AbstractContextManager[Any]:
        """A context manager that creates new tensors on this backend's device."""
        torch = _torch()
        return contextlib.nullcontext() if self.device.type == "cpu" else torch.device(self.device)

    def get_backend_array_type(self) -> Any:
        """``torch.Tensor``."""
        return _torch().Tensor

    @staticmethod
    def get_available_devices() -> list[str]:
        """The available devices, as values of ``device=``."""
        torch = _torch()
        found = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        return [*found, "mps"] if torch.backends.mps.is_available() else found

    def to_numpy(self, input: Any) -> Any:
        """A NumPy copy of a tensor (bfloat16 as float32, which represents it exactly)."""
        torch = _torch()
        input = input.detach().cpu()
        return (input.float() if input.dtype == torch.bfloat16 else input).numpy().copy()

    def to_device(self, data: Any, device: Any, asynchronous: bool = True) -> Any:
        """The tensor on another device."""
        return data.to(str(device).replace("gpu", "cuda"), non_blocking=asynchronous)

    def block_until_ready(self, data: Any) -> Any:
        """Wait until the device has completed all work, and return the tensor."""
        if self.device.type == "cuda":
            _torch().cuda.synchronize(self.device)
        return data

    def empty_cache(self) -> None:
        """Release unused GPU memory: ``torch.cuda.empty_cache()``."""
        if self.device.type == "cuda":
            _torch().cuda.empty_cache()

    def _new_key(self, seed: Any) -> Any:
        return philox.as_key(seed)

    def _given(self, value: Any) -> Any:
        import numpy as np

        if isinstance(value, list):
            return self.array(value)
        if isinstance(value, np.ndarray) and value.dtype != np.uint64:  # those are keys
            return self.as_input(value)
        return value

    def _make(self, function: str, *args: Any, **options: Any) -> Any:
        for name in ("device_mesh", "tensor_split"):
            if options.pop(name, None) is not None:
                raise InputError(
                    f"{name}: this backend has one device, arrays cannot be spread; use JaxBackend"
                )
        if function == "array":
            return self._array(args[0], options["dtype"])
        return self._call(function, *args, **options)

    def _array(self, value: Any, dtype: str | None) -> Any:
        torch = _torch()
        if isinstance(value, torch.Tensor):
            if dtype is None:
                kind = value.dtype
                dtype = self.dtype if kind.is_floating_point else "bool" if kind == torch.bool else "int32"
            return value.detach().clone().to(device=self.device, dtype=getattr(torch, dtype))
        wide = "float32" if "bfloat16" in (dtype, self.dtype if dtype is None else "") else None
        drawn = as_numbers(value, dtype if wide is None or dtype is None else wide, wide or self.dtype)
        out = torch.from_numpy(drawn).to(self.device)
        if wide is not None and out.is_floating_point():
            out = out.to(torch.bfloat16)
        return out

    # ---- what compiled models need ------------------------------------------------------------------------

    def as_input(self, value: Any) -> Any:
        """An input unchanged, or as a tensor of its own dtype if it is an array of another library."""
        torch = _torch()
        if isinstance(value, torch.Tensor) or not hasattr(value, "__array__"):
            return value
        import numpy as np

        array = np.array(value)
        if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
            return value  # of numbers that no tensor has, which the check of the call names
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.astype("float32")).to(self.device, torch.bfloat16)
        return torch.from_numpy(array).to(self.device)

    def _function_of(self, model: Any) -> Callable[..., Any]:
        if not model.jit:
            return model.function
        if model.namespace.get("compiled") is None:
            model.namespace["compiled"] = _torch().compile(model.function)
        return model.namespace["compiled"]

    def run_forward(self, model: Any, *args: Any) -> Any:
        with _torch().no_grad():
            return self._function_of(model)(*args)

    def run_gradients(
        self, model: Any, params: Any, inputs: Any, state: Any, key: Any, train: bool, cotangents: Any
    ) -> Any:
        torch = _torch()
        flat, rebuild = _flat(params)
        with torch.enable_grad():
            leaves = [torch.as_tensor(self.as_input(p)).detach().requires_grad_(True) for p in flat]
            outputs, after = self._function_of(model)(rebuild(leaves), inputs, state, key, train)
            roots, given = [], []
            for name, value in outputs.items():
                cotangent = cotangents.get(name)
                if cotangent is None or not value.requires_grad:
                    continue
                array = torch.as_tensor(cotangent, dtype=value.dtype, device=value.device)
                if array.shape != value.shape:
                    raise InputError(
                        f"output_gradients[{name!r}] has shape {tuple(array.shape)}, expected {tuple(value.shape)}, "
                        "the shape of that output"
                    )
                roots.append(value)
                given.append(array)
            found = torch.autograd.grad(roots, leaves, given, allow_unused=True) if roots and leaves else ()
        rows = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(leaves, found or [None] * len(flat), strict=True)
        ]
        return _detached(outputs), _detached(after), rebuild(rows)

    def __repr__(self) -> str:
        return f"TorchBackend({self.policy.param}/{self.policy.compute}, {self.device})"


def _flat(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The tensors of a nested dict, and how to put others in their places."""
    leaves: list[Any] = []

    def walk(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {k: walk(v) for k, v in node.items()}
        leaves.append(node)
        return len(leaves) - 1

    shape = walk(tree)

    def rebuild(values: list[Any]) -> Any:
        def fill(node: Any) -> Any:
            return {k: fill(v) for k, v in node.items()} if isinstance(node, dict) else values[node]

        return fill(shape)

    return leaves, rebuild


def _detached(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _detached(v) for k, v in tree.items()}
    return tree.detach()
