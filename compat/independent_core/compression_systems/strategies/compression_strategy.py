"""Strategies and their selector: :mod:`capibara.compress.system.strategies`."""

from capibara.compress.system.engines import JAX_AVAILABLE as JAX_AVAILABLE
from capibara.compress.system.strategies import Choice as Choice
from capibara.compress.system.strategies import CompressionStrategy as CompressionStrategy
from capibara.compress.system.strategies import StrategySelector as StrategySelector
