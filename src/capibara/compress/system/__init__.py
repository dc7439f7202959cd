"""The compression system: configuration, components, strategies, monitor, coordinator."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.compress.system.configuration import OptimizationStrategy, SystemConfiguration
    from capibara.compress.system.coordinator import JAX_COMPONENTS, SystemIntegrationCoordinator
    from capibara.compress.system.engines import JAX_AVAILABLE, FallbackWarning, MissingEngineError
    from capibara.compress.system.monitor import (
        Alert,
        MetricType,
        PipelineType,
        Statistics,
        Threshold,
        UnifiedPerformanceMonitor,
    )
    from capibara.compress.system.result import CompressedTensor
    from capibara.compress.system.strategies import Choice, CompressionStrategy, StrategySelector

_HOMES = {
    "configuration": ("OptimizationStrategy", "SystemConfiguration"),
    "coordinator": ("JAX_COMPONENTS", "SystemIntegrationCoordinator"),
    "engines": ("JAX_AVAILABLE", "FallbackWarning", "MissingEngineError"),
    "monitor": (
        "Alert",
        "MetricType",
        "PipelineType",
        "Statistics",
        "Threshold",
        "UnifiedPerformanceMonitor",
    ),
    "result": ("CompressedTensor",),
    "strategies": ("Choice", "CompressionStrategy", "StrategySelector"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "JAX_AVAILABLE",
    "JAX_COMPONENTS",
    "Alert",
    "Choice",
    "CompressedTensor",
    "CompressionStrategy",
    "FallbackWarning",
    "MetricType",
    "MissingEngineError",
    "OptimizationStrategy",
    "PipelineType",
    "Statistics",
    "StrategySelector",
    "SystemConfiguration",
    "SystemIntegrationCoordinator",
    "Threshold",
    "UnifiedPerformanceMonitor",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
