"""Profiling: document 1, "Memoria y Cache" and "Profiling Avanzado"; document 2, "Profiling y Monitoring"."""

from __future__ import annotations

import re
import textwrap

import jax
import jax.numpy as jnp
import pytest

pytestmark = pytest.mark.usefixtures("without_the_persistent_cache")
FIRST = """
    from capibara.jax.tpu_v4.optimizations import (
        TpuMemoryMonitor,
        create_optimized_cache,
        TpuPerformanceProfiler
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

    # Profiling automático
    profiler = TpuPerformanceProfiler()

    with profiler.profile_context("forward_pass"):
        result = model.forward(inputs)

    metrics = profiler.get_metrics()
    print(f"TFLOPS: {metrics['tflops']:.1f}")
    print(f"Memory efficiency: {metrics['memory_efficiency']:.1f}%")
"""

ADVANCED = """
    from capibara.jax.tpu_v4.optimizations import TpuProfiler

    # Profiler completo TPU
    profiler = TpuProfiler(
        capture_memory=True,
        capture_flops=True,
        capture_communication=True
    )

    with profiler:
        # Operaciones a perfilar
        result = model(inputs)

    # Análisis de rendimiento
    report = profiler.generate_report()
    print(f"Peak memory: {report['peak_memory_gb']:.2f} GB")
    print(f"Total FLOPS: {report['total_flops']:e}")
    print(f"Communication overhead: {report['comm_overhead_ms']:.1f} ms")
"""

SECOND = """
    from capibara.jax.tpu_v4.optimizations import TpuPerformanceProfiler

    # Profiler completo TPU
    profiler = TpuPerformanceProfiler(
        capture_memory=True,
        capture_flops=True,
        capture_communication=True,
        capture_kernel_details=True
    )

    # Profiling con contexto
    with profiler.profile_context("model_forward"):
        result = model(inputs)

    # Obtener métricas detalladas
    metrics = profiler.get_detailed_metrics()

    print(f"🚀 TFLOPS achieved: {metrics['tflops']:.1f}")
    print(f"💾 Peak memory usage: {metrics['peak_memory_gb']:.1f} GB")
    print(f"📊 Memory efficiency: {metrics['memory_efficiency']:.1%}")
    print(f"⚡ Compute efficiency: {metrics['compute_efficiency']:.1%}")
    print(f"🔄 Communication overhead: {metrics['comm_overhead_ms']:.1f} ms")
"""

PRINTED = {
    FIRST: [r"TFLOPS: \d+\.\d", r"Memory efficiency: \d+\.\d%"],
    ADVANCED: [
        r"Peak memory: \d+\.\d\d GB",
        r"Total FLOPS: \d\.\d+e\+\d+",
        r"Communication overhead: 0\.0 ms",
    ],
    SECOND: [
        r"TFLOPS achieved: \d+\.\d",
        r"Peak memory usage: \d+\.\d GB",
        r"Memory efficiency: \d+\.\d%",
        r"Compute efficiency: \d+\.\d%",
        r"Communication overhead: 0\.0 ms",
    ],
}


class Reader:
    """A model as the documents have one: it can be called, and has ``forward``."""

    def __init__(self) -> None:
        self.weights = jnp.full((4, 256, 256), 0.01)
        self.forward = jax.jit(
            lambda x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, self.weights)[0]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.forward(x)


@pytest.mark.parametrize("snippet", PRINTED, ids=["document 1", "document 1, advanced", "document 2"])
def test_the_snippet(snippet: str, capsys: pytest.CaptureFixture[str]):
    model, inputs = Reader(), jnp.ones((256, 256))
    expected = model(inputs).block_until_ready()
    names = {"model": model, "inputs": inputs}
    exec(textwrap.dedent(snippet), names)
    printed = capsys.readouterr().out
    for line in PRINTED[snippet]:
        assert re.search(line, printed), printed
    assert jnp.array_equal(names["result"], expected)
