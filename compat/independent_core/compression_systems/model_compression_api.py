"""The compression of whole models: :mod:`capibara.compress.model_api`."""

from capibara.compress.model_api import ModelCompressionAPI as ModelCompressionAPI
from capibara.compress.profile import CompressionProfile as CompressionProfile
from capibara.compress.system.engines import JAX_AVAILABLE as JAX_AVAILABLE
