"""Document 4 ("JAX Integration Guide"): its snippets, word by word, and what it says around them.

Its snippets use ``torch`` and ``model`` without making them; the test gives them. ``jax_backend="gpu"`` on a machine
without one warns and runs on what is there.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest

from capibara.compress.system.engines import FallbackWarning

BASIC = """
from independent_core.compression_systems.system_integration_coordinator import (
    SystemIntegrationCoordinator, SystemConfiguration
)

# Create configuration with JAX enabled
config = SystemConfiguration(
    enable_jax=True,
    jax_backend="gpu",  # or "cpu", "tpu", "auto"
    jax_memory_fraction=0.75,
    jax_compilation_cache_size=128,
    jax_parallel_devices=1
)

# Initialize system with JAX
coordinator = SystemIntegrationCoordinator(config)

# Compress tensor using JAX acceleration
tensor = torch.randn(1000, 1000)
result = coordinator.compress(tensor)
"""

MODEL = """
from independent_core.compression_systems.model_compression_api import (
    CompressionProfile, ModelCompressionAPI
)

# Use JAX strategy explicitly
profile = CompressionProfile(
    strategy="jax",  # Force JAX strategy
    target_compression_ratio=4.0,
    mode="balanced"
)

api = ModelCompressionAPI(profile)
compressed_model = api.compress(model)
"""

AUTO = """
# With strategy="auto", JAX will be used when beneficial
profile = CompressionProfile(
    strategy="auto",  # System chooses best strategy
    mode="aggressive"
)
"""

REGISTRY = """
- `jax_config_adapter`: Configuration adapter for JAX
- `jax_device_manager`: Device management for JAX operations
- `jax_memory_pool`: Memory pool for JAX tensors
- `jax_memory_optimizer`: Memory optimization for JAX
- `jax_compilation_optimizer`: JIT compilation optimization
- `jax_tropical_engine`: Core JAX tropical operations
- `jax_tropical_bridge`: Bridge between PyTorch and JAX
- `jax_strategy`: JAX compression strategy
- `jax_performance_monitor`: JAX-specific performance monitoring
"""

DEFAULTS = {
    "enable_jax": True,
    "jax_backend": "auto",
    "jax_memory_fraction": 0.75,
    "jax_compilation_cache_size": 128,
    "jax_enable_x64": False,
    "jax_parallel_devices": 1,
}


def run(snippet: str, **given: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "snippet", **given}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # there may be no GPU
        exec(compile(snippet, "document 4", "exec"), namespace)
    return namespace


def test_basic_usage() -> None:
    torch = pytest.importorskip("torch")
    names = run(BASIC, torch=torch)
    coordinator, result, tensor = names["coordinator"], names["result"], names["tensor"]
    try:
        assert torch.equal(coordinator.decompress(result), tensor)
        assert result.compression_ratio > 1.1
        registry = [line.split("`")[1] for line in REGISTRY.strip().splitlines()]
        assert len(registry) == 9
        for name in registry:
            assert type(coordinator.get_component(name)).__module__.startswith("capibara.compress.system")
        assert coordinator.get_system_status()["configuration"]["jax_backend"] == "gpu"
    finally:
        coordinator.shutdown()


def test_model_compression() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.ReLU(), torch.nn.Linear(160, 64))
    names = run(MODEL + AUTO, model=model)
    compressed = names["compressed_model"]
    inputs = torch.randn(5, 96)
    with torch.no_grad():
        before, after = model(inputs), compressed(inputs)
    assert (after - before).norm() < 0.5 * before.norm()
    assert names["profile"].mode == "aggressive"


def test_options_and_their_defaults() -> None:
    from independent_core.compression_systems.system_integration_coordinator import SystemConfiguration

    found = {f.name: f.default for f in dataclasses.fields(SystemConfiguration)}
    assert {name: found[name] for name in DEFAULTS} == DEFAULTS


def test_the_places_it_names() -> None:
    code = """
from independent_core.compression_systems.system_integration_coordinator import (
    JAX_AVAILABLE, OptimizationStrategy, SystemIntegrationCoordinator)
from independent_core.compression_systems.strategies.compression_strategy import StrategySelector
from independent_core.compression_systems.tropical.unified_performance_monitor import (
    MetricType, PipelineType, UnifiedPerformanceMonitor)
assert JAX_AVAILABLE is True
assert OptimizationStrategy.JAX_ACCELERATED
assert hasattr(SystemIntegrationCoordinator, "_initialize_jax_components")
assert "jax" in StrategySelector().strategies
assert MetricType.JAX_COMPILATION and MetricType.JAX_CACHE_HITS and MetricType.JAX_MEMORY_POOL and PipelineType.JAX
"""
    run(code)


@pytest.mark.slow  # compiles for every shape that it compresses
def test_the_integration_test() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "independent_core.compression_systems.test_jax_integration"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 checks passed" in done.stdout
    for name in (
        "component imports",
        "system integration",
        "model compression",
        "strategy",
        "performance monitoring",
    ):
        assert f"passed  {name}" in done.stdout
