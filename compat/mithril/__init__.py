"""The import name ``mithril`` for :mod:`capibara.compose`, where no package of that name is installed.

It stands at the end of the import path, after every installed package, so that a real ``mithril`` always wins.
``capibara doctor`` says which of the two answers. Blocks are compose's, with Mithril's ``connect``, its arguments and
its names and layout of parameters; what compose has besides is here under its own name.
"""

from importlib import import_module as _import

from capibara.compose import *
from capibara.compose import __all__ as _compose_names
from mithril.backends import (
    Backend,
    CBackend,
    GGMLBackend,
    JaxBackend,
    MlxBackend,
    NumpyBackend,
    TorchBackend,
)
from mithril.compiling import compile
from mithril.iokey import IOKey
from mithril.model import Model
from mithril.physical import PhysicalModel
from mithril.training import TrainModel
from mithril.types import DataType, double, float, int, short

# By assignment: the star import has brought compose's own "models" along.
framework, models, types, utils = (
    _import(f"mithril.{_room}") for _room in ("framework", "models", "types", "utils")
)

for _name in models.__all__:
    if _name in _compose_names and _name != "Precision":
        globals()[_name] = getattr(models, _name)
__all__ = [
    "Backend",
    "CBackend",
    "DataType",
    "GGMLBackend",
    "IOKey",
    "JaxBackend",
    "MlxBackend",
    "Model",
    "NumpyBackend",
    "PhysicalModel",
    "TorchBackend",
    "TrainModel",
    "compile",
    "double",
    "float",
    "framework",
    "int",
    "models",
    "short",
    "types",
    "utils",
]
__all__ += [_name for _name in _compose_names if _name not in __all__]
