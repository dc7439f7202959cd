"""Create arrays.

``shape`` is given as ``zeros(3, 4)`` or ``zeros((3, 4))``. ``dtype`` is ``ml.float32`` or another of
:mod:`capibara.compose.dtypes`, or its name; without it floats have the backend's dtype and integers int32.

``device_mesh=(2, 2)`` shards the array over that many devices (the first available ones), if the backend supports it:
dimension i is sharded over mesh axis i, or dimension ``tensor_split[i]`` (None: not sharded over that axis).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from capibara.compose.backends.methods.caller import MAX_ELEMENTS, Caller, as_shape, is_number
from capibara.compose.dtypes import dtype_name
from capibara.compose.errors import InputError

__all__ = ["Creation"]

MeshShape = Sequence[int] | None
Split = Sequence[int | None] | None


class Creation(Caller):
    """Create arrays from shapes or values."""

    def array(
        self, input: Any, *, dtype: Any = None, device_mesh: MeshShape = None, tensor_split: Split = None
    ) -> Any:
        """A copy of scalars, nested lists or another library's array. Floats get the backend's dtype, integers int32.

        Raises:
            InputError: the values are not numbers, or do not fit int32 (pass ``dtype=ml.int64``).
        """
        name = None if dtype is None else dtype_name(dtype)
        return self._make("array", input, dtype=name, device_mesh=device_mesh, tensor_split=tensor_split)

    def full(
        self,
        shape: int | Sequence[int],
        value: float,
        *,
        dtype: Any = None,
        device_mesh: MeshShape = None,
        tensor_split: Split = None,
    ) -> Any:
        """``value`` everywhere."""
        if isinstance(value, str | bytes | complex) or not (is_number(value) or hasattr(value, "shape")):
            raise InputError(f"full: value={value!r:.80} must be a number")
        return self._make(
            "full",
            as_shape((shape,)),
            value,
            dtype=self._float(dtype),
            device_mesh=device_mesh,
            tensor_split=tensor_split,
        )

    def zeros(
        self, *shape: Any, dtype: Any = None, device_mesh: MeshShape = None, tensor_split: Split = None
    ) -> Any:
        """Zeros."""
        return self.full(as_shape(shape), 0, dtype=dtype, device_mesh=device_mesh, tensor_split=tensor_split)

    def ones(
        self, *shape: Any, dtype: Any = None, device_mesh: MeshShape = None, tensor_split: Split = None
    ) -> Any:
        """Ones."""
        return self.full(as_shape(shape), 1, dtype=dtype, device_mesh=device_mesh, tensor_split=tensor_split)

    def full_like(
        self,
        input: Any,
        value: float,
        *,
        dtype: Any = None,
        device_mesh: MeshShape = None,
        tensor_split: Split = None,
    ) -> Any:
        """``value`` everywhere, in the shape (and dtype, unless given) of ``input``."""
        name = dtype_name(getattr(input, "dtype", self._float(None)) if dtype is None else dtype)
        shape = tuple(getattr(input, "shape", ()))
        return self.full(shape, value, dtype=name, device_mesh=device_mesh, tensor_split=tensor_split)

    def zeros_like(
        self, input: Any, *, dtype: Any = None, device_mesh: MeshShape = None, tensor_split: Split = None
    ) -> Any:
        """Zeros in the shape and dtype of ``input``."""
        return self.full_like(input, 0, dtype=dtype, device_mesh=device_mesh, tensor_split=tensor_split)

    def ones_like(
        self, input: Any, *, dtype: Any = None, device_mesh: MeshShape = None, tensor_split: Split = None
    ) -> Any:
        """Ones in the shape and dtype of ``input``."""
        return self.full_like(input, 1, dtype=dtype, device_mesh=device_mesh, tensor_split=tensor_split)

    def arange(
        self,
        *bounds: float,
        dtype: Any = None,
        device_mesh: MeshShape = None,
        tensor_split: Split = None,
    ) -> Any:
        """``arange(stop)``, ``arange(start, stop)`` or ``arange(start, stop, step)``: int32, or floats of a float.

        Raises:
            InputError: there are no bounds, more than three, or the step is 0.
        """
        if not 1 <= len(bounds) <= 3:
            raise InputError(f"arange takes stop, or start and stop, or start, stop and step; got {bounds!r}")
        start, stop, step = (0, *bounds, 1)[:3] if len(bounds) == 1 else (*bounds, 1)[:3]
        if not all(is_number(b) and math.isfinite(b) for b in (start, stop, step)):
            raise InputError(f"arange: {bounds!r:.200} must be numbers")
        if step == 0:
            raise InputError("arange: step must not be 0")
        if abs(stop - start) / abs(step) > MAX_ELEMENTS:
            raise InputError(f"arange{bounds!r:.200}: an array has at most 2**48 elements")
        whole = all(isinstance(b, int) for b in bounds)
        name = "int32" if whole and dtype is None else self._float(dtype)
        return self._make(
            "arange", start, stop, step, dtype=name, device_mesh=device_mesh, tensor_split=tensor_split
        )

    def linspace(
        self,
        start: float,
        stop: float,
        num: int = 50,
        *,
        dtype: Any = None,
        device_mesh: MeshShape = None,
        tensor_split: Split = None,
    ) -> Any:
        """``num`` evenly spaced numbers from ``start`` to ``stop``, both included."""
        (count,) = as_shape((num,), "num")
        return self._make(
            "linspace",
            start,
            stop,
            count,
            dtype=self._float(dtype),
            device_mesh=device_mesh,
            tensor_split=tensor_split,
        )

    def eye(
        self,
        rows: int,
        columns: int | None = None,
        *,
        dtype: Any = None,
        device_mesh: MeshShape = None,
        tensor_split: Split = None,
    ) -> Any:
        """Ones on the diagonal, zeros elsewhere."""
        rows, columns = as_shape((rows, rows if columns is None else columns))
        return self._make(
            "eye", rows, columns, dtype=self._float(dtype), device_mesh=device_mesh, tensor_split=tensor_split
        )
