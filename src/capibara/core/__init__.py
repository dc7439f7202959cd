"""The language model: written with :mod:`capibara.compose`, configured by TOML."""

from capibara.core.decoder import build_decoder
from capibara.core.model import ModularCapibaraModel

__all__ = ["ModularCapibaraModel", "build_decoder"]
