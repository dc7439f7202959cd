"""Tropical operations on JAX, and a bridge that passes PyTorch tensors without copying."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.compress.errors import CompressError
from capibara.compress.models.numbers import is_torch, to_bits, torch_from_bits
from capibara.compress.system.engines import MissingEngineError, engine_problem
from capibara.compress.system.host_tropical import HostTropicalEngine
from capibara.compress.system.jax_compilation import JaxCompilationOptimizer
from capibara.compress.system.jax_devices import JaxDeviceManager
from capibara.compress.system.jax_memory import JaxMemoryOptimizer
from capibara.compress.system.tensors import resolved
from capibara.compress.system.tropical_arguments import (
    as_points,
    check_polynomial,
    check_product,
    check_square,
    get_sign,
    refuse_unless,
)
from capibara.ops import tropical

__all__ = ["JaxTropicalBridge", "JaxTropicalEngine"]


class JaxTropicalEngine:
    """The component ``jax_tropical_engine``: :mod:`capibara.ops.tropical`, compiled once per shape.

    A product is sharded by rows over the system's devices, and split into several runs if it would not fit into
    memory. It takes NumPy and JAX arrays and returns JAX arrays; for PyTorch use :class:`JaxTropicalBridge`. Dtypes
    follow JAX: NumPy's float64 becomes float32 unless 64-bit dtypes are enabled; float64 JAX arrays stay float64.

    Args:
      devices: those that share the work.
      compiler: keeps the programs.
      memory: determines what fits.
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
          a: [*batch, rows, inner], floating point. Leading axes broadcast with those of ``b``.
          b: [*batch, inner, columns].
          semiring: ``"max_plus"`` or ``"min_plus"``.

        Raises:
          CompressError: shapes that do not match, a dtype that is not floating point, an unknown semiring.
        """
        get_sign(semiring)
        check_product(a, b, _check)
        with self._scope(a, b):
            return self._matmul(a, b, semiring)

    def _matmul(self, a: Any, b: Any, semiring: str) -> jax.Array:
        rows_apart = a.ndim == b.ndim == 2  # else the result's first axis may be one of b's
        if not rows_apart or len(self.devices.devices) == 1 or len(a) == 0:
            left, right = self.devices.put(a), self.devices.put(b)
            if not rows_apart:
                return self.compiler.call(tropical.matmul, left, right, semiring=semiring)
            return self.memory.run(tropical.matmul, left, right, semiring=semiring)
        outs = []
        for part, device in zip(self.devices.split(a), self.devices.devices, strict=False):
            outs.append(
                self.compiler.call(tropical.matmul, part, jax.device_put(b, device), semiring=semiring)
            )
        return jnp.concatenate([self.devices.put(out) for out in outs])

    def closure(self, weights: Any, *, semiring: str = "max_plus") -> jax.Array:
        """The best weight of any walk between two nodes, as :func:`capibara.ops.tropical.closure`: [*batch, n, n].

        Raises:
          CompressError: not square floating-point matrices, or an unknown semiring.
        """
        get_sign(semiring)
        check_square(weights, _check)
        with self._scope(weights):
            return self.compiler.call(tropical.closure, self.devices.put(weights), semiring=semiring)

    def polyval(self, coefficients: Any, x: Any, *, semiring: str = "max_plus") -> jax.Array:
        """``max over i of coefficients[i] + i * x``, as :func:`capibara.ops.tropical.polyval`: [n], [...] → [...].

        Raises:
          CompressError: no coefficients, a dtype that is not floating point, an unknown semiring.
        """
        get_sign(semiring)
        _check("coefficients", coefficients, 1)
        x = as_points(x, coefficients)
        check_polynomial(coefficients, x, _check)
        with self._scope(coefficients, x):
            left, right = self.devices.put(coefficients), self.devices.put(x)
            return self.compiler.call(tropical.polyval, left, right, semiring=semiring)

    def _scope(self, *arrays: Any) -> Any:
        """The programs' 64-bit setting, or 64 bits if a JAX array has them, so that it is not narrowed."""
        wide = any(isinstance(array, jax.Array) and array.dtype == np.float64 for array in arrays)
        return jax.enable_x64(True) if wide else self.compiler.scope()


def _check(name: str, array: Any, axes: int, *, more: bool = False) -> None:
    """Whether JAX's engine takes it."""
    if is_torch(array):
        raise CompressError(
            f"{name}: got a tensor of PyTorch's, expected an array of NumPy or JAX. "
            "Remedy: the component jax_tropical_bridge, which takes both."
        )
    _check_any(name, array, axes, more=more)


def _check_any(name: str, array: Any, axes: int, *, more: bool = False) -> None:
    """Whether the bridge takes it: as the host's ``check_array``, with arrays and types of JAX."""
    if is_torch(array):
        good = array.is_floating_point()
    else:  # a long double has no place in JAX
        good = isinstance(array, np.ndarray | jax.Array) and jnp.issubdtype(array.dtype, jnp.floating)
        good = good and array.dtype.itemsize <= 8
    refuse_unless(good, name, array, axes, more, "NumPy, PyTorch or JAX")


class JaxTropicalBridge:
    """The component ``jax_tropical_bridge``: PyTorch tensors (by DLPack) and NumPy arrays for JAX functions.

    Its operations match :class:`~capibara.compress.system.host_tropical.HostTropicalEngine`: results have the type of
    the arguments, in their common dtype, and float64 is computed as float64 regardless of the settings. PyTorch's
    gradients do not propagate through JAX: tensors that require a gradient are computed by that engine instead, and
    so are 8-bit floats, which JAX does not promote.

    Memory is shared if both libraries support its layout, and copied otherwise; :attr:`copies` counts the copies. A
    shared tensor must not be written to while JAX uses it.

    Args:
      engine: provides the operations.

    Attributes:
      copies: number of tensors that were copied.
      shared: number of tensors that were not.
    """

    def __init__(self, engine: JaxTropicalEngine) -> None:
        self.engine = engine
        self.copies = self.shared = 0
        self._host = HostTropicalEngine("torch")

    def to_jax(self, tensor: Any) -> jax.Array:
        """The tensor as a JAX array of the same dtype; gradients do not propagate.

        Raises:
          CompressError: not a PyTorch tensor, or a dtype that JAX lacks.
        """
        if not is_torch(tensor):
            raise CompressError(f"tensor: got {type(tensor).__name__}, expected one of PyTorch's")
        wide = tensor.element_size() == 8
        with jax.enable_x64(wide or jax.config.read("jax_enable_x64")):
            plain = resolved(tensor.detach())
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
        """The array as a PyTorch tensor, on the same device if PyTorch supports it.

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
        """Call a function of JAX arrays with PyTorch tensors; in 64 bits if one of them has 64 bits."""
        wide = any(is_torch(tensor) and tensor.element_size() == 8 for tensor in tensors)
        with jax.enable_x64(wide or jax.config.read("jax_enable_x64")):
            return self.to_torch(function(*map(self.to_jax, tensors), **static))

    def _any(self, name: str, *tensors: Any, semiring: str) -> Any:
        function = getattr(self.engine, name)
        if is_torch(tensors[0]):
            if any(map(_is_the_hosts, tensors)):
                return getattr(self._host, name)(*tensors, semiring=semiring)
            return self.call(function, *tensors, semiring=semiring)
        wide = any(tensor.dtype == np.float64 for tensor in tensors)
        with jax.enable_x64(wide or jax.config.read("jax_enable_x64")):
            out = function(*map(_native, tensors), semiring=semiring)
            if any(isinstance(tensor, jax.Array) for tensor in tensors):
                return out
            return np.array(out)  # with memory of its own, that can be written to

    def matmul(self, a: Any, b: Any, *, semiring: str = "max_plus") -> Any:
        """:meth:`JaxTropicalEngine.matmul`; returns the type of its arguments (PyTorch, NumPy or JAX).

        Raises:
          CompressError: shapes that do not match, a dtype that is not floating point, an unknown semiring.
        """
        check_product(a, b, _check_any)
        return self._any("matmul", a, b, semiring=semiring)

    def closure(self, weights: Any, *, semiring: str = "max_plus") -> Any:
        """:meth:`JaxTropicalEngine.closure`; returns the type of its argument (PyTorch, NumPy or JAX).

        Raises:
          CompressError: not square floating-point matrices, or an unknown semiring.
        """
        check_square(weights, _check_any)
        return self._any("closure", weights, semiring=semiring)

    def polyval(self, coefficients: Any, x: Any, *, semiring: str = "max_plus") -> Any:
        """:meth:`JaxTropicalEngine.polyval`; returns the type of its arguments (PyTorch, NumPy or JAX).

        Raises:
          CompressError: no coefficients, a dtype that is not floating point, an unknown semiring.
        """
        _check_any("coefficients", coefficients, 1)
        x = as_points(x, coefficients)
        check_polynomial(coefficients, x, _check_any)
        return self._any("polyval", coefficients, x, semiring=semiring)

    def describe(self) -> dict[str, Any]:
        """Plain values for a status."""
        return {"shared": self.shared, "copies": self.copies, "torch_imported": "torch" in sys.modules}


def _is_the_hosts(tensor: Any) -> bool:
    """Whether a tensor of PyTorch's is one for which JAX does not give what PyTorch gives."""
    import torch

    return (torch.is_grad_enabled() and tensor.requires_grad) or tensor.element_size() == 1


def _native(array: Any) -> Any:
    """In this machine's order of bytes, as JAX wants them."""
    if isinstance(array, np.ndarray) and not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array
