"""Convert arrays of NumPy, JAX and PyTorch to the codecs' representation (format, shape, bits) and back.

Bits are preserved for all dtypes: bfloat16 and the eight-bit floats are converted through unsigned integers of their
width. Arrays without plain numeric data (sparse, quantised, complex, PRNG keys) are refused by name.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from capibara.compress.errors import CompressError
from capibara.compress.formats import FORMATS, NumberFormat

__all__ = ["format_of", "from_bits", "is_array", "is_torch", "numpy_dtype", "to_bits", "torch_from_bits"]

# Types that NumPy has no name of its own for, as ml_dtypes (which JAX brings) and torch call them.
_EXTENDED = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_NAMES = {f.numpy: f for f in FORMATS.values() if f.numpy} | {v: FORMATS[k] for k, v in _EXTENDED.items()}


def is_torch(value: object) -> bool:
    """Whether it is a PyTorch tensor, without importing PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: object) -> bool:
    """Whether it is a PyTorch tensor, a JAX array, or a NumPy array."""
    if isinstance(value, np.ndarray | np.generic) or is_torch(value):
        return True
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def format_of(value: Any, name: str = "tensor", *, meta: bool = False) -> NumberFormat:
    """The format of an array, without reading its data.

    Args:
      value: the array.
      name: its name in errors.
      meta: whether PyTorch tensors on the device ``"meta"`` are allowed.

    Raises:
      CompressError: as :func:`to_bits`.
    """
    if not is_array(value):
        raise CompressError(
            f"{name}: got {type(value).__name__}, expected an array of NumPy, JAX or PyTorch. Remedy: numpy.asarray."
        )
    dtype = value.dtype.name if isinstance(value, np.ndarray | np.generic) else str(value.dtype)
    if (form := _NAMES.get(dtype.removeprefix("torch."))) is None:
        raise CompressError(
            f"{name}: numbers of type {dtype}, expected one of {', '.join(_NAMES)}. Remedy: convert the tensor first."
        )
    tensor: Any = value
    if is_torch(value):
        if str(tensor.layout) != "torch.strided" or (tensor.device.type == "meta" and not meta):
            raise CompressError(
                f"{name}: got a {tensor.layout} tensor on {tensor.device}, expected a dense one in memory. "
                "Remedy: to_dense(), or load the weights first."
            )
    elif not isinstance(value, np.ndarray | np.generic) and not value.is_fully_addressable:
        raise CompressError(
            f"{name}: parts of it are on other processes. Remedy: gather it first "
            "(jax.experimental.multihost_utils.process_allgather)."
        )
    return form


def to_bits(value: Any, name: str = "tensor") -> tuple[np.ndarray, NumberFormat, tuple[int, ...]]:
    """The bits [count], the format and the shape of an array; a view if it is in memory in C order.

    Args:
      value: an array of NumPy, JAX (fully addressable) or PyTorch, on any device.
      name: its name in errors.

    Raises:
      CompressError: not an array of a dtype that files support.
    """
    form = format_of(value, name)
    if is_torch(value):
        import torch

        whole = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[form.bits]
        numbers = value.detach().resolve_neg().cpu().contiguous().reshape(-1).view(whole)
        return numbers.numpy().view(form.unsigned), form, tuple(value.shape)
    array = np.asarray(value)
    shape = array.shape  # before ascontiguousarray, which makes vectors of scalars
    flat = np.ascontiguousarray(array).reshape(-1)
    if not flat.dtype.isnative:
        flat = flat.astype(flat.dtype.newbyteorder("="))
    return flat.view(form.unsigned), form, shape


def numpy_dtype(form: NumberFormat) -> np.dtype:
    """NumPy's type of a format.

    Raises:
      CompressError: it needs the package ``ml_dtypes``, which comes with JAX, and that is not installed.
    """
    if form.numpy is not None:
        return np.dtype(form.numpy)
    try:
        import ml_dtypes
    except ImportError:
        raise CompressError(
            f"dtype: NumPy alone has no {_EXTENDED[form.name]}. Remedy: install ml_dtypes, which comes with JAX, "
            "or convert the tensor to float32."
        ) from None
    return np.dtype(getattr(ml_dtypes, _EXTENDED[form.name]))


def from_bits(bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], like: Any = None) -> Any:
    """An array of the same kind as ``like``, on its devices: PyTorch, JAX, or NumPy if it is ``None``."""
    bits = np.ascontiguousarray(bits, form.unsigned).reshape(-1)
    if is_torch(like):
        return torch_from_bits(bits, form, shape).to(like.device)
    array = bits.view(numpy_dtype(form)).reshape(shape)
    if like is None or isinstance(like, np.ndarray | np.generic):
        return array if bits.flags.writeable else array.copy()
    import jax

    return jax.device_put(array, like.sharding)


def torch_from_bits(bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...]) -> Any:
    """A PyTorch tensor on the CPU, with its own memory."""
    import torch

    name = _EXTENDED.get(form.name, form.numpy)
    assert name is not None
    signed = np.ascontiguousarray(bits, form.unsigned).reshape(-1).view(f"<i{form.bits // 8}").copy()
    return torch.from_numpy(signed).view(getattr(torch, name)).reshape(shape)
