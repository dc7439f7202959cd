"""Arrays kept on the host, encoded, and brought back with the same bits, dtype and sharding.

The codec is an argument: the lossless codec for arrays is :class:`capibara.compress.host_arrays.LosslessArrays`, and
:class:`PlainCopies` stores the bytes as they are.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from capibara.memory.errors import MemorySettingError
from capibara.memory.feeding import copied_to_device

__all__ = ["ArrayCodec", "HostCopy", "PlainCopies", "bytes_by_device", "checked_arrays"]


class ArrayCodec(Protocol):
    """How arrays are stored on the host; ``decode`` returns exactly the bits that ``encode`` was given."""

    def encode(self, array: np.ndarray) -> bytes:
        """The stored form of a C-contiguous array."""
        ...

    def decode(self, data: bytes, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """The array again, in memory of its own."""
        ...


class PlainCopies:
    """The bytes as they are."""

    def encode(self, array: np.ndarray) -> bytes:
        return array.tobytes()

    def decode(self, data: bytes, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        # A copy: JAX's CPU runtime may use the memory that it is given, for as long as the array lives.
        return np.frombuffer(data, dtype).reshape(shape).copy()


@dataclass(frozen=True)
class HostCopy:
    """One array on the host.

    Attributes:
      data: as the codec stores it.
      dtype, shape: of the array; of the key data of typed keys (``jax.random.key``).
      sharding: where it was.
      committed: whether it was bound to that (``jax.device_put`` with a device), or free to move to other arrays'.
      key_impl: the implementation of typed keys, else None.
    """

    data: bytes
    dtype: np.dtype
    shape: tuple[int, ...]
    sharding: Any
    committed: bool
    key_impl: Any = None

    @classmethod
    def of(cls, array: jax.Array, codec: ArrayCodec) -> HostCopy:
        """Copy and encode an array.

        Raises:
          RuntimeError: it was deleted (donated to a program).
        """
        impl = None
        committed = getattr(array, "committed", True)
        if _is_key(array):
            impl, array = jax.random.key_impl(array), jax.random.key_data(array)
        values = np.asarray(array)
        # Not np.ascontiguousarray, which makes scalars one-dimensional.
        data = codec.encode(values if values.flags.c_contiguous else values.copy())
        return cls(data, values.dtype, values.shape, array.sharding, committed, impl)

    @property
    def size(self) -> int:
        """Bytes on the host."""
        return len(self.data)

    def restore(self, codec: ArrayCodec) -> jax.Array:
        """The array, where it was."""
        values = codec.decode(self.data, self.dtype, self.shape)
        # A float64 array may come back after 64-bit types were switched off again; it must not lose half its bits.
        wide = jax.enable_x64(True) if values.dtype.itemsize >= 8 else contextlib.nullcontext()
        # An array that JAX may move comes back where it was all the same: not everything moves it.
        where = jax.default_device(next(iter(self.sharding.device_set)))
        with wide, contextlib.nullcontext() if self.committed else where:
            array = jax.device_put(values, self.sharding) if self.committed else jax.device_put(values)
        return array if self.key_impl is None else jax.random.wrap_key_data(array, impl=self.key_impl)


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def checked_arrays(name: str, leaves: list[Any]) -> list[Any]:
    """JAX arrays as they are, NumPy arrays and scalars as copies on the default device.

    Raises:
      MemorySettingError: a leaf is not an array, is traced, deleted, not on this process's devices only, or would lose
        bits on the way to a device.
    """
    return [_checked(f"{name}[{n}]" if len(leaves) > 1 else name, leaf) for n, leaf in enumerate(leaves)]


def _checked(name: str, leaf: Any) -> Any:
    if isinstance(leaf, Tracer):
        raise MemorySettingError(
            f"{name}: got a traced value {leaf}, expected an array. Use the cache outside of jit, grad and vmap."
        )
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise MemorySettingError(
                f"{name}: the array was deleted (donated to a program). Pass a live one."
            )
        if not leaf.is_fully_addressable:
            raise MemorySettingError(
                f"{name}: the array is on devices of several processes, expected one of this process. Each process "
                "can store its own part: array.addressable_shards."
            )
        return leaf
    if not isinstance(leaf, np.ndarray | np.generic | int | float | complex):
        raise MemorySettingError(
            f"{name}: got {type(leaf).__name__}, expected JAX or NumPy arrays, or a pytree of them."
        )
    try:
        if isinstance(leaf, np.ndarray | np.generic):
            kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
            if kept != leaf.dtype:
                raise MemorySettingError(
                    f"{name}: got {leaf.dtype}, which JAX would store as {kept} now. Convert it first, or set "
                    "jax_enable_x64."
                )
        return copied_to_device(leaf)
    except (TypeError, OverflowError) as error:
        raise MemorySettingError(f"{name}: {error}. Pass an array of numbers or booleans.") from None


def bytes_by_device(leaves: list[jax.Array]) -> dict[Any, int]:
    """Bytes of arrays on each of their devices."""
    sizes: dict[Any, int] = {}
    for leaf in leaves:
        array = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        one = array.nbytes // max(1, array.size) * math.prod(array.sharding.shard_shape(array.shape))
        for device in array.sharding.device_set:
            sizes[device] = sizes.get(device, 0) + one
    return sizes
