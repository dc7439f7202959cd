"""Tropical operations on JAX, and the bridge over which PyTorch's tensors come and go without being copied."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from capibara.compress.errors import CompressError
from capibara.compress.models.numbers import is_torch, to_bits, torch_from_bits
from capibara.compress.system.engines import MissingEngineError, engine_problem
from capibara.compress.system.jax_compilation import JaxCompilationOptimizer
from capibara.compress.system.jax_devices import JaxDeviceManager
from capibara.compress.system.jax_memory import JaxMemoryOptimizer
from capibara.ops import tropical

__all__ = ["JaxTropicalBridge", "JaxTropicalEngine"]


class JaxTropicalEngine:
    """The component ``jax_tropical_engine``: :mod:`capibara.ops.tropical`, compiled once for each shape.

    A product is spread by rows over the system's devices, and over several runs where it would not fit into memory.
    Arrays of NumPy and JAX go in, JAX's come out; PyTorch's go through :class:`JaxTropicalBridge`.

    Args:
      devices: that share the work.
      compiler: keeps the programs.
      memory: knows what fits.
    """

    name = "jax"

    def __init__(
        self, devices: JaxDeviceManager, compiler: JaxCompilationOptimizer, memory: JaxMemoryOptimizer
    ) -> None:
        self.devices = devices
        self.compiler = compiler
        self.memory = memory

    def matmul(self, a: Any, b: Any, *, semiring: str = "max_plus") -> jax.Array:
        """``out[i, j] = max over k of a[i, k] + b[k, j]``, as :func:`capibara.ops.tropical.matmul`.

        Args:
          a: [rows, inner], floating point.
          b: [inner, columns].
          semiring: ``"max_plus"`` or ``"min_plus"``.
        """
        with self.compiler.scope():
            return self._matmul(a, b, semiring)

    def _matmul(self, a: Any, b: Any, semiring: str) -> jax.Array:
        if getattr(a, "ndim", None) != 2 or len(self.devices.devices) == 1 or len(a) == 0:
            left, right = self.devices.put(a), self.devices.put(b)
            if left.ndim != 2:
                return self.compiler.call(tropical.matmul, left, right, semiring=semiring)
            return self.memory.run(tropical.matmul, left, right, semiring=semiring)
        outs = []
        for part, device in zip(self.devices.split(a), self.devices.devices, strict=False):
            outs.append(
                self.compiler.call(tropical.matmul, part, jax.device_put(b, device), semiring=semiring)
            )
        return jnp.concatenate([self.devices.put(out) for out in outs])

    def closure(self, weights: Any, *, semiring: str = "max_plus") -> jax.Array:
        """The best weight of any walk between two nodes, as :func:`capibara.ops.tropical.closure`: [n, n] → [n, n]."""
        with self.compiler.scope():
            return self.compiler.call(tropical.closure, self.devices.put(weights), semiring=semiring)

    def polyval(self, coefficients: Any, x: Any, *, semiring: str = "max_plus") -> jax.Array:
        """``max over i of coefficients[i] + i * x``, as :func:`capibara.ops.tropical.polyval`: [n], [...] → [...]."""
        with self.compiler.scope():
            left, right = self.devices.put(coefficients), self.devices.put(x)
            return self.compiler.call(tropical.polyval, left, right, semiring=semiring)


class JaxTropicalBridge:
    """The component ``jax_tropical_bridge``: PyTorch's tensors for JAX's functions, by DLPack.

    Memory is shared where both can use it as it lies, and copied where not; :attr:`copies` counts those. A shared
    tensor must not be written to while JAX uses it.

    Args:
      engine: whose operations :meth:`matmul` and its like use.

    Attributes:
      copies: tensors that were copied on their way.
      shared: tensors that were not.
    """

    def __init__(self, engine: JaxTropicalEngine) -> None:
        self.engine = engine
        self.copies = self.shared = 0

    def to_jax(self, tensor: Any) -> jax.Array:
        """The tensor's numbers as a JAX array of the same type; gradients do not pass.

        Raises:
          CompressError: not a tensor of PyTorch's, or one that JAX has no type for.
        """
        if not is_torch(tensor):
            raise CompressError(f"tensor: got {type(tensor).__name__}, expected one of PyTorch's")
        wide = tensor.element_size() == 8
        with jax.enable_x64(wide or jax.config.read("jax_enable_x64")):
            plain = tensor.detach()
            try:
                if plain.numel() == 0 or not plain.is_contiguous():
                    raise BufferError("JAX takes compact tensors only")
                array = jax.dlpack.from_dlpack(plain)
            except (BufferError, RuntimeError, TypeError, ValueError):
                # Strides, devices and types that DLPack or JAX does not take: through the host, bit by bit.
                bits, form, shape = to_bits(plain)
                from capibara.compress.models.numbers import numpy_dtype

                self.copies += 1
                return self.engine.devices.put(bits.view(numpy_dtype(form)).reshape(shape).copy())
            self.shared += 1
            return array

    def to_torch(self, array: jax.Array) -> Any:
        """The array's numbers as a tensor of PyTorch's, on the same device where PyTorch has it.

        Raises:
          MissingEngineError: PyTorch is not installed.
        """
        if (problem := engine_problem("torch")) is not None:
            raise MissingEngineError("torch", problem)
        import torch

        try:
            if array.size == 0 or len(array.devices()) > 1:
                raise BufferError("nothing to share, or not in one place")
            tensor = torch.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError, ValueError):
            self.copies += 1
            return torch_from_bits(*to_bits(array))
        self.shared += 1
        return tensor

    def call(self, function: Callable[..., Any], *tensors: Any, **static: Hashable) -> Any:
        """A function of JAX arrays, with tensors of PyTorch's in and out."""
        return self.to_torch(function(*map(self.to_jax, tensors), **static))

    def _any(self, function: Callable[..., Any], *tensors: Any, **static: Hashable) -> Any:
        if any(map(is_torch, tensors)):
            return self.call(function, *tensors, **static)
        return function(*tensors, **static)

    def matmul(self, a: Any, b: Any, *, semiring: str = "max_plus") -> Any:
        """:meth:`JaxTropicalEngine.matmul`; PyTorch's tensors come back as such."""
        return self._any(self.engine.matmul, a, b, semiring=semiring)

    def closure(self, weights: Any, *, semiring: str = "max_plus") -> Any:
        """:meth:`JaxTropicalEngine.closure`; a tensor of PyTorch's comes back as such."""
        return self._any(self.engine.closure, weights, semiring=semiring)

    def polyval(self, coefficients: Any, x: Any, *, semiring: str = "max_plus") -> Any:
        """:meth:`JaxTropicalEngine.polyval`; PyTorch's tensors come back as such."""
        return self._any(self.engine.polyval, coefficients, x, semiring=semiring)

    def describe(self) -> dict[str, Any]:
        """Plain values for a status."""
        return {"shared": self.shared, "copies": self.copies, "torch_imported": "torch" in sys.modules}
