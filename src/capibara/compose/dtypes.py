"""Names for the dtypes that arrays are made in: ``ml.float32``, ``ml.int8``, ``ml.bool`` …

They stand for the same numbers on every backend, are accepted wherever NumPy takes a dtype, and load no backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capibara.compose.errors import InputError
from capibara.errors import did_you_mean

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "DTYPES",
    "Dtype",
    "bfloat16",
    "bool",
    "dtype_name",
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
]


@dataclass(frozen=True)
class Dtype:
    """A dtype by name. ``kind`` is "float", "int" or "bool"."""

    name: str
    kind: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype (what makes ``numpy.dtype(ml.float32)`` work)."""
        import numpy as np

        if self.name == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"ml.{self.name}"


float16 = Dtype("float16", "float")
bfloat16 = Dtype("bfloat16", "float")
float32 = Dtype("float32", "float")
float64 = Dtype("float64", "float")
int8 = Dtype("int8", "int")
int16 = Dtype("int16", "int")
int32 = Dtype("int32", "int")
int64 = Dtype("int64", "int")
uint8 = Dtype("uint8", "int")
bool = Dtype("bool", "bool")

DTYPES = {d.name: d for d in (float16, bfloat16, float32, float64, int8, int16, int32, int64, uint8, bool)}
_BUILT_IN = {"float": "float32", "int": "int32"}


def dtype_name(dtype: Any, name: str = "dtype") -> str:
    """The name of a dtype: of a :class:`Dtype`, a string, a NumPy, JAX or PyTorch dtype, or a scalar type.

    Raises:
        InputError: it is not one of :data:`DTYPES`.
    """
    if isinstance(dtype, Dtype):
        return dtype.name
    text = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    if text is None:
        text = dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")
        text = _BUILT_IN.get(text, text)
    if text not in DTYPES:
        raise InputError(
            f"{name}={dtype!r} is not a dtype that backends have: use one of "
            f"{', '.join(f'ml.{n}' for n in DTYPES)}, or its name as a string.{did_you_mean(str(text), DTYPES)}"
        )
    return str(text)
