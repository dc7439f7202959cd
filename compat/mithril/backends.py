"""``JaxBackend``, ``TorchBackend``, ``NumpyBackend``: compose's, under Mithril's names of their attributes."""

from __future__ import annotations

import warnings
from typing import Any

from capibara import compose
from capibara.compose.backends.base import Backend as _Backend
from capibara.compose.errors import CompileError
from mithril.physical import physical

__all__ = ["Backend", "JaxBackend", "NumpyBackend", "TorchBackend"]


class Backend(_Backend):
    """Base of the backends; ``Backend[DataType]`` in an annotation is the backend of arrays of that type."""

    def __class_getitem__(cls, item: Any) -> type:
        return cls

    @property
    def backend_type(self) -> str:
        """ "jax", "torch" or "numpy"."""
        return self.type

    @property
    def DataType(self) -> Any:
        """The class of its arrays."""
        return self.get_backend_array_type()

    def compiled_class(self) -> type:
        return physical(super().compiled_class())


class JaxBackend(Backend, compose.JaxBackend):
    __doc__ = compose.JaxBackend.__doc__


class NumpyBackend(Backend, compose.NumpyBackend):
    __doc__ = compose.NumpyBackend.__doc__


class TorchBackend(Backend, compose.TorchBackend):
    """:class:`capibara.compose.TorchBackend`; ``device_mesh`` is taken, and says in a warning that it does nothing.

    PyTorch's arrays are not sharded here: results are the same, on one device.
    """

    def __init__(self, dtype: Any = "float32", *, device_mesh: Any = None, **options: Any) -> None:
        super().__init__(dtype, **options)
        if device_mesh is not None:
            _unsharded(device_mesh)

    def _make(self, function: str, *args: Any, **options: Any) -> Any:
        mesh = options.pop("device_mesh", None)
        if mesh is not None:
            _unsharded(mesh)
        return super()._make(function, *args, **options)


def _unsharded(mesh: Any) -> None:
    warnings.warn(
        f"device_mesh: got {mesh!r} for PyTorch, whose arrays are not sharded here: they are on one device, with the "
        "same results. Use JaxBackend(device_mesh=…) to shard them",
        UserWarning,
        stacklevel=3,
    )


def _absent(name: str, instead: str) -> type[Backend]:
    class Absent(Backend):
        def __init__(self, *args: Any, **options: Any) -> None:
            raise CompileError(f"{name}: got a backend that Capibara does not have. Use {instead}")

    Absent.__name__ = Absent.__qualname__ = name
    return Absent


MlxBackend = _absent(
    "MlxBackend", "JaxBackend, which computes on Apple's chips through jax-metal or on their CPU"
)
CBackend = _absent("CBackend", "NumpyBackend, or compose.export for programs without Python")
GGMLBackend = _absent("GGMLBackend", "NumpyBackend, and capibara.compress for quantized models")
