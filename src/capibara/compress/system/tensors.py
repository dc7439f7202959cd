"""A user's tensor as bits, with what it takes to give back one of the same kind on the same device."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.errors import CompressError
from capibara.compress.formats import NumberFormat
from capibara.compress.models.numbers import is_array, is_torch, numpy_dtype, to_bits, torch_from_bits
from capibara.compress.system.engines import MissingEngineError, engine_problem

__all__ = ["KINDS", "Bits", "TensorTypeError", "make_tensor", "read_tensor", "resolved"]

KINDS = ("numpy", "torch", "jax")


class TensorTypeError(CompressError, TypeError):
    """Not a tensor."""


@dataclass(frozen=True)
class Bits:
    """A tensor's numbers as a codec sees them.

    Attributes:
      values: unsigned integers [count], C order.
      form: what they stand for.
      shape: of the tensor.
      kind: whose tensor it was: ``"numpy"``, ``"torch"`` or ``"jax"``.
      device: where it lay, in that framework's words.
    """

    values: np.ndarray
    form: NumberFormat
    shape: tuple[int, ...]
    kind: str
    device: str


def resolved(tensor: Any) -> Any:
    """A tensor of PyTorch's with the numbers that it stands for in memory.

    A view may be the negative or the conjugate of what lies there (``tensor.imag`` of a conjugate is), which shows
    neither in its bits nor over DLPack.
    """
    tensor = tensor.resolve_conj() if tensor.is_conj() else tensor
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def read_tensor(tensor: Any) -> Bits:
    """The bits of a NumPy array, a PyTorch tensor or a JAX array.

    Raises:
      TensorTypeError: it is not one of these.
      CompressError: archives do not support its dtype (complex, text, four-bit …), or it has no local data (sparse,
        traced, meta, partly on other processes).
    """
    if not is_array(tensor):
        raise TensorTypeError(
            f"tensor: got {type(tensor).__module__}.{type(tensor).__qualname__}, expected a NumPy array, a PyTorch "
            "tensor or a JAX array. Remedy: numpy.asarray(…); for a model ModelCompressionAPI or compress_model."
        )
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(tensor, jax.core.Tracer):
        raise CompressError(
            "tensor: a traced JAX value, which has no data yet. Remedy: compress outside of jit."
        )
    if is_torch(tensor):
        tensor = resolved(tensor)
    values, form, shape = to_bits(tensor)
    if is_torch(tensor):
        return Bits(values, form, shape, "torch", str(tensor.device))
    if isinstance(tensor, np.ndarray | np.generic):
        return Bits(values, form, shape, "numpy", "cpu")
    return Bits(values, form, shape, "jax", min(map(str, tensor.devices())))


def make_tensor(
    values: np.ndarray, form: NumberFormat, shape: tuple[int, ...], kind: str, device: str | None = None
) -> Any:
    """A tensor of those numbers.

    Args:
      values: unsigned integers [count].
      form: what they stand for.
      shape: of the tensor.
      kind: ``"numpy"``, ``"torch"`` or ``"jax"``.
      device: where to, in the framework's words. By default, and where there is no such device here, the framework's
        own choice (PyTorch: the CPU).

    Raises:
      CompressError: another kind, or NumPy has no such numbers.
      MissingEngineError: the package of that kind is not installed.
    """
    if kind not in KINDS:
        raise CompressError(f"kind: got {kind!r}, expected one of {', '.join(map(repr, KINDS))}")
    if kind != "numpy" and (problem := engine_problem(kind)) is not None:
        raise MissingEngineError(kind, problem)
    values = np.ascontiguousarray(values, form.unsigned).reshape(-1)
    if kind == "torch":
        tensor = torch_from_bits(values, form, shape)
        try:
            return tensor if device in (None, "cpu") else tensor.to(device)
        except (RuntimeError, AssertionError):  # no such device here
            return tensor
    array = values.view(numpy_dtype(form)).reshape(shape)
    if kind == "numpy":
        return array if array.flags.writeable else array.copy()
    import jax

    where = next((d for d in jax.local_devices() if str(d) == device), None)
    with jax.enable_x64(form.bits == 64 or jax.config.read("jax_enable_x64")):  # else they are cut to 32 bits
        return jax.device_put(array, where)
