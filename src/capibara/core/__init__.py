"""The language model: built with :mod:`capibara.compose`, configured by TOML."""

from capibara.jax_versions import require_supported_jax

require_supported_jax()  # first: an old JAX would fail below, less clearly

from capibara.core.decoder import build_decoder
from capibara.core.model import ModularCapibaraModel

__all__ = ["ModularCapibaraModel", "build_decoder"]
