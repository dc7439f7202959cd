"""Compose: models written as blocks joined by name, compiled to one pure function.

from capibara import compose as ml

model = ml.Model()
model |= ml.Linear(64)(input="x", output="hidden")
model += ml.Relu()
model += ml.Linear(10)(output="logits")
compiled = ml.compile(model, ml.JaxBackend(), shapes={"x": [None, 32]})
params = compiled.randomize_params(seed=0)
"""

from capibara.compose.backends.jax_backend import JaxBackend
from capibara.compose.compiled import ArraySpec, CompiledModel, compile
from capibara.compose.errors import (
    CompileError,
    ComposeError,
    CycleError,
    InputError,
    KindError,
    ShapeError,
    UnconnectedError,
    WiringError,
)
from capibara.compose.library import *  # noqa: F403
from capibara.compose.library import __all__ as _library
from capibara.compose.model import Block, IOKey, Model, Port, Primitive
from capibara.compose.precision import Precision
from capibara.compose.primitives import *  # noqa: F403
from capibara.compose.primitives import __all__ as _primitives
from capibara.compose.regions import Remat, Repeat
from capibara.compose.sharding import constrain, param_shardings

__all__ = [
    "ArraySpec",
    "Block",
    "CompileError",
    "CompiledModel",
    "ComposeError",
    "CycleError",
    "IOKey",
    "InputError",
    "JaxBackend",
    "KindError",
    "Model",
    "Port",
    "Precision",
    "Primitive",
    "Remat",
    "Repeat",
    "ShapeError",
    "UnconnectedError",
    "WiringError",
    "compile",
    "constrain",
    "param_shardings",
    *_library,
    *_primitives,
]
