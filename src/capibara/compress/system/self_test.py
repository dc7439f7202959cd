"""Whether the compression system works where it is installed: five checks of what its user would do first.

``python -m independent_core.compression_systems.test_jax_integration`` runs them, with JAX or without it, and with
PyTorch or without; ``python -m capibara.compress.system.self_test`` is the same.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from capibara.compress.system.engines import FallbackWarning, engine_problem

__all__ = ["CHECKS", "main"]

_PACKAGE = "independent_core.compression_systems"
_NAMES = {
    "system_integration_coordinator": ("SystemConfiguration", "SystemIntegrationCoordinator"),
    "model_compression_api": ("CompressionProfile", "ModelCompressionAPI"),
    "strategies.compression_strategy": ("StrategySelector",),
    "tropical.unified_performance_monitor": ("MetricType", "PipelineType", "UnifiedPerformanceMonitor"),
}


def _expect(good: object, text: str) -> None:
    if not good:
        raise AssertionError(text)


def _weights(rows: int = 96, columns: int = 64) -> Any:
    """A matrix: PyTorch's where that is installed."""
    values = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    if engine_problem("torch") is not None:
        return values
    import torch

    return torch.from_numpy(values)


def check_component_imports() -> str:
    """Every documented name can be imported."""
    count = 0
    for module, names in _NAMES.items():
        found = importlib.import_module(f"{_PACKAGE}.{module}")
        for name in names:
            _expect(hasattr(found, name), f"{found.__name__} has no {name}")
            count += 1
    return f"{count} names from {_PACKAGE}"


def check_system_integration() -> str:
    """A tensor comes back, exactly and to a ratio; the components are those that there should be."""
    from capibara.compress.system.coordinator import JAX_COMPONENTS, SystemIntegrationCoordinator

    tensor = _weights()
    with SystemIntegrationCoordinator() as system:
        exact = system.compress(tensor)
        back = system.decompress(exact)
        _expect(
            type(back) is type(tensor) and bool((back == tensor).all()),
            "a tensor did not come back as it was",
        )
        small = system.compress(tensor, ratio=4.0)
        _expect(
            abs(small.compression_ratio / 4 - 1) <= 0.05, f"ratio {small.compression_ratio:.2f}, expected 4"
        )
        there = [name for name in JAX_COMPONENTS if name in system.components]
        wanted = 0 if engine_problem("jax") else len(JAX_COMPONENTS)
        _expect(len(there) == wanted, f"{len(there)} components of JAX, expected {wanted}")
        product = system.get_component("tropical_engine").matmul(tensor[:8], tensor[:8].T)
        oracle = np.max(np.asarray(tensor)[:8, None] + np.asarray(tensor)[None, :8], -1)
        _expect(np.allclose(np.asarray(product), oracle), "a tropical product is wrong")
        status = system.get_system_status()
    return f"engine {status['engine']}, {len(there)} components of JAX, error {small.relative_error:.3f} at ratio 4"


def check_model_compression_api() -> str:
    """A model becomes four times smaller and still runs."""
    from capibara.compress.model_api import ModelCompressionAPI
    from capibara.compress.profile import CompressionProfile

    profile = CompressionProfile(strategy="jax", target_compression_ratio=4.0, mode="balanced")
    if engine_problem("torch") is None:
        import torch

        model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        compressed = ModelCompressionAPI(profile).compress(model)
        inputs = torch.randn(16, 64)
        with torch.no_grad():
            before, after = model(inputs), compressed(inputs)
        error = float((after - before).norm() / before.norm())
        _expect(error < 0.5, f"outputs differ by {error:.2f}")
        return f"a PyTorch model, outputs within {error:.3f}"
    compressed = ModelCompressionAPI(profile).compress(
        {"weight": _weights(), "bias": np.zeros(96, np.float32)}
    )
    tree = compressed.decompress()
    error = float(np.linalg.norm(tree["weight"] - _weights()) / np.linalg.norm(_weights()))
    _expect(error < 0.5, f"weights differ by {error:.2f}")
    return f"a tree of arrays, weights within {error:.3f}"


def check_strategy_manager() -> str:
    """JAX's strategy is there exactly where JAX is, and makes the same bytes as the host's."""
    from capibara.compress.system.strategies import StrategySelector
    from capibara.compress.system.tensors import read_tensor

    selector = StrategySelector()
    _expect(selector.jax_available == ("jax" in selector.strategies), "JAX's strategy is not where JAX is")
    bits = read_tensor(_weights())
    host = selector.select(bits, strategy="lossless").strategy.compress(bits)
    _expect(host.relative_error == 0, "lossless is not")
    if not selector.jax_available:
        return f"{len(selector.strategies)} strategies, without JAX ({selector.jax_problem})"
    on_jax = selector.select(bits, strategy="jax").strategy.compress(bits)
    _expect(on_jax.payloads == host.payloads, "JAX and the host made different bytes")
    return f"{len(selector.strategies)} strategies; {on_jax.engine} and {host.engine} make the same bytes"


def check_performance_monitoring() -> str:
    """What happened has figures, and a threshold an alert; without JAX its metrics have none."""
    from capibara.compress.system.coordinator import SystemIntegrationCoordinator
    from capibara.compress.system.monitor import MetricType

    with SystemIntegrationCoordinator() as system:
        system.monitor.set_threshold(MetricType.COMPRESSION_RATIO, 1e9, above=False)
        system.compress(_weights())
        _expect(len(system.monitor.alerts) == 1, "a crossed threshold raised no alert")
        engine = system.get_component("tropical_engine")
        for _ in range(2):
            engine.matmul(np.zeros((3, 4), np.float32), np.zeros((4, 5), np.float32))
        figures = {m: system.monitor.latest(m) for m in MetricType if m.name.startswith("JAX_")}
    if engine_problem("jax") is not None:
        _expect(all(v is None for v in figures.values()), "figures of JAX without JAX")
        return "works without JAX"
    _expect(figures[MetricType.JAX_CACHE_HITS] == 0.5, "one hit and one miss are not a rate of 0.5")
    _expect(all(v is not None for v in figures.values()), f"a metric of JAX has no figure: {figures}")
    return ", ".join(f"{m.name} {v:.3g}" for m, v in figures.items())


CHECKS: dict[str, Callable[[], str]] = {
    "component imports": check_component_imports,
    "system integration": check_system_integration,
    "model compression API": check_model_compression_api,
    "strategy manager": check_strategy_manager,
    "performance monitoring": check_performance_monitoring,
}


def main() -> int:
    """Run the checks and print a line for each; 0 if all passed, 1 otherwise."""
    for name in ("jax", "torch"):
        problem = engine_problem(name)
        print(f"{name}: {f'not here ({problem})' if problem else sys.modules[name].__version__}")
    failed = 0
    for name, check in CHECKS.items():
        begin = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always", FallbackWarning)
                text = check()
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}: {error}")
            traceback.print_exc()
            continue
        for warning in heard:
            print(f"        warning: {warning.message}")
        print(f"passed  {name} ({time.perf_counter() - begin:.1f} s): {text}")
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
