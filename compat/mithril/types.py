"""``mithril.types``: dtypes, and the names that annotations use."""

from __future__ import annotations

from typing import Any, TypeVar

from capibara.compose.dtypes import (
    DTYPES,
    bfloat16,
    bool,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
)

__all__ = [
    "DataType",
    "Dtype",
    "bfloat16",
    "bool",
    "double",
    "float",
    "float16",
    "float32",
    "float64",
    "half",
    "int",
    "int8",
    "int16",
    "int32",
    "int64",
    "long",
    "short",
    "uint8",
]

DataType = TypeVar("DataType", bound=Any)
"""An array of a backend."""

half, double, short, long = float16, float64, int16, int64
float, int = float32, int32


class Dtype:
    """The dtypes as attributes: ``Dtype.float32``."""


for _name, _dtype in DTYPES.items():
    setattr(Dtype, _name, _dtype)
