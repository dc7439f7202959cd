"""Document 2, "Gestión Memoria Optimizada", and document 1, "Memoria y Cache": the snippets in their reader's context.

``model`` and ``large_batch`` are what a reader has: a small model with ``forward``, and a batch for it. The profiler
that document 1 shows beside the monitor belongs to other parts; its lines are not here.
"""

from __future__ import annotations

import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

MEMORY = """
    from capibara.jax.tpu_v4.optimizations import (
        TpuMemoryManager,
        HBMOptimizer
    )

    # Gestión automática memoria HBM
    memory_manager = TpuMemoryManager(
        memory_limit_gb=32.0,        # Límite por chip
        cleanup_threshold=0.85,      # Limpiar si >85% uso
        prefetch_enabled=True,       # Prefetch automático
        compression_enabled=True     # Compresión tensores grandes
    )

    # Optimizador HBM para patrones acceso
    hbm_optimizer = HBMOptimizer(
        access_pattern="sequential", # "sequential", "random", "mixed"
        cache_policy="lru",          # Política cache
        bandwidth_limit_gbps=900     # Límite bandwidth HBM
    )

    # Contexto gestión memoria automática
    with memory_manager.managed_context():
        # Operaciones con gestión automática memoria
        result = model.forward(large_batch)
"""

CACHE = """
    from capibara.jax.tpu_v4.optimizations import (
        TpuMemoryMonitor,
        create_optimized_cache,
    )

    # Monitor de memoria TPU
    memory_monitor = TpuMemoryMonitor(
        memory_limit_gb=32.0,
        cleanup_threshold=0.85
    )

    # Cache optimizado para TPU
    cache = create_optimized_cache(
        cache_size_gb=4.0,
        use_hbm=True,  # Usar High Bandwidth Memory
        prefetch_enabled=True
    )

    result = model.forward(inputs)

    metrics = memory_monitor.get_metrics()
    print(f"Memory efficiency: {metrics['memory_efficiency']:.1f}%")
"""


class Reader:
    """A model of a reader's own."""

    def __init__(self) -> None:
        self.weight = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32))

    def forward(self, x: Any) -> jax.Array:
        return jnp.tanh(x @ self.weight)


def run(snippet: str, **given: Any) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "snippet", **given}
    exec(compile(textwrap.dedent(snippet), "document", "exec"), names)
    return names


def test_management() -> None:
    model, batch = Reader(), np.random.default_rng(1).normal(size=(128, 64)).astype(np.float32)
    names = run(MEMORY, model=model, large_batch=batch)
    np.testing.assert_allclose(
        names["result"], np.tanh(batch @ np.asarray(model.weight)), rtol=1e-4, atol=1e-5
    )
    report = names["memory_manager"].last_report
    assert report.after >= model.weight.nbytes + names["result"].nbytes
    assert report.high_water >= report.after
    limit = names["memory_manager"].budget.limit
    assert limit <= 32 * 2**30
    assert limit.source


@pytest.fixture
def room_for_four_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's cache on machines with less memory: only its size is checked, nothing is allocated."""
    from capibara.compress import device_memory

    monkeypatch.setattr(device_memory, "memory_limit_bytes", lambda: None)


@pytest.mark.usefixtures("room_for_four_gib")
def test_monitor_and_cache(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(CACHE, model=Reader(), inputs=np.ones((4, 64), np.float32))
    text = capsys.readouterr().out
    assert text.startswith("Memory efficiency: ")
    assert 0 < names["metrics"]["memory_efficiency"] <= 100
    cache = names["cache"]
    assert cache.capacity_bytes == 4 * 2**30
    cache.put("result", names["result"])
    cache.evict()
    np.testing.assert_array_equal(cache["result"], names["result"])
    cache.close()
