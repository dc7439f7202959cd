"""What the JSON of a model may hold: the closed tables of classes, and the bounds (see :mod:`.interchange`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.compose import initializers, primitives
from capibara.compose.errors import ComposeError
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.custom import Operation
from capibara.compose.logical.regions import Region, Remat, Repeat
from capibara.compose.precision import FLOAT_DTYPES

VERSION = 1
FORMAT = "capibara.compose.model"
MAX_TEXT = 64 << 20
MAX_DEPTH = 64  # of models in models
MAX_BLOCKS = 200_000
MAX_SIZE = 10**8  # of one dimension, and of integers in arguments
MAX_PORTS = 1024  # that one block is told to have
MAX_REPEATS = 100_000
MAX_DEGREE = 64
MAX_ELEMENTS = 1 << 20  # of all arrays together

PRIMITIVES = {n: getattr(primitives, n) for n in primitives.__all__}
PRIMITIVES = {n: c for n, c in PRIMITIVES.items() if isinstance(c, type) and issubclass(c, Primitive)}
OPERATIONS: dict[str, type[Primitive]] = {"Operation": Operation}  # of ml.op, looked up by name at compile
REGIONS: dict[str, type[Region]] = {"Repeat": Repeat, "Remat": Remat}
INITIALISERS: dict[str, Any] = {
    n: c for n, c in vars(initializers).items() if isinstance(c, type) and dataclasses.is_dataclass(c)
} | {"Given": initializers.Given}
DTYPES = (*FLOAT_DTYPES, "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool")


class ModelFormatError(ComposeError, ValueError):
    """A model cannot be written as JSON, or a text is not a model that may be read."""
