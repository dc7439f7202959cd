"""Compress tensors and models: codecs, and the archive that stores their output.

The names below are imported on first use, so that importing the package is cheap, and parts that need JAX or PyTorch
import only those.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from capibara.errors import MissingExtraError

if TYPE_CHECKING:
    from capibara.compress.allocation import Allocation, allocate, survey
    from capibara.compress.analysis import Compressibility
    from capibara.compress.calibration.activations import Moments, collect
    from capibara.compress.codecs.engine import use_engine
    from capibara.compress.codecs.protocol import CODECS, Codec
    from capibara.compress.compressed import CompressedModel
    from capibara.compress.container import Archive, ArchiveWriter, Entry
    from capibara.compress.direct import QuantisedMatrix, load_quantised
    from capibara.compress.errors import ArchiveError, CompressError, DamagedError, TargetError
    from capibara.compress.jax_codes import quantized
    from capibara.compress.loading import load_sharded
    from capibara.compress.model_api import ModelCompressionAPI
    from capibara.compress.profile import CompressionProfile
    from capibara.compress.safetensors_file import SafetensorsFile, write_safetensors
    from capibara.compress.statistics import CompressionStats
    from capibara.compress.tropical import merge_neurons

__all__ = [
    "CODECS",
    "Allocation",
    "Archive",
    "ArchiveError",
    "ArchiveWriter",
    "Codec",
    "CompressError",
    "CompressedModel",
    "Compressibility",
    "CompressionProfile",
    "CompressionStats",
    "DamagedError",
    "Entry",
    "ModelCompressionAPI",
    "Moments",
    "QuantisedMatrix",
    "SafetensorsFile",
    "TargetError",
    "allocate",
    "collect",
    "load_quantised",
    "load_sharded",
    "merge_neurons",
    "quantized",
    "survey",
    "use_engine",
    "write_safetensors",
]


def _has_jax() -> bool:
    try:
        return importlib.util.find_spec("jax") is not None
    except ImportError:  # something stands in the way of it
        return False


if not _has_jax():  # what is there is what ``import *`` takes
    __all__.remove("QuantisedMatrix")
    __all__.remove("quantized")
    __all__.remove("load_quantised")

_MODULES = {
    "allocation": ("Allocation", "allocate", "survey"),
    "analysis": ("Compressibility",),
    "calibration.activations": ("Moments", "collect"),
    "codecs.engine": ("use_engine",),
    "codecs.protocol": ("CODECS", "Codec"),
    "compressed": ("CompressedModel",),
    "container": ("Archive", "ArchiveWriter", "Entry"),
    "direct": ("QuantisedMatrix", "load_quantised"),
    "jax_codes": ("quantized",),
    "errors": ("ArchiveError", "CompressError", "DamagedError", "TargetError"),
    "loading": ("load_sharded",),
    "model_api": ("ModelCompressionAPI",),
    "profile": ("CompressionProfile",),
    "safetensors_file": ("SafetensorsFile", "write_safetensors"),
    "statistics": ("CompressionStats",),
    "tropical": ("merge_neurons",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if (module := _PLACES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != "jax":
            raise
        raise MissingExtraError("jax", "train", f"capibara.compress.{name}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
