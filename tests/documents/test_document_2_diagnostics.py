"""Document 2, "Diagnóstico TPU": the snippet, beside a thread that works as a reader's program does."""

from __future__ import annotations

import textwrap
import threading

import jax
import jax.numpy as jnp
import pytest

SNIPPET = """
    from capibara.jax.tpu_v4.diagnostics import TpuDiagnostics

    # Sistema diagnóstico TPU
    diagnostics = TpuDiagnostics()

    # Check completo TPU
    health_report = diagnostics.run_full_health_check()

    print("TPU Health Report:")
    print(f"   ✅ All chips online: {health_report['all_chips_online']}")
    print(f"   Temperature normal: {health_report['temperature_normal']}")
    print(f"   💾 Memory healthy: {health_report['memory_healthy']}")
    print(f"   🔄 Interconnect OK: {health_report['interconnect_ok']}")

    # Diagnóstico rendimiento
    perf_analysis = diagnostics.analyze_performance_bottlenecks()
    if perf_analysis.has_bottlenecks:
        print("Performance bottlenecks detected:")
        for bottleneck in perf_analysis.bottlenecks:
            print(f"   - {bottleneck.description}")
            print(f"     Suggestion: {bottleneck.suggestion}")
"""


def test_the_snippet(capsys: pytest.CaptureFixture[str]):
    stop = threading.Event()
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jnp.ones((64, 64))
    step(x).block_until_ready()

    def waits_for_input() -> None:
        while not stop.wait(0.05):
            step(x).block_until_ready()

    thread = threading.Thread(target=waits_for_input)
    thread.start()
    try:
        exec(textwrap.dedent(SNIPPET), {})
    finally:
        stop.set()
        thread.join()
    printed = capsys.readouterr().out
    assert "All chips online: True" in printed
    assert "Memory healthy: True" in printed
    assert "Interconnect OK: None" in printed  # one device has no links
    assert "   - devices were idle for" in printed
    assert "     Suggestion: Prepare batches" in printed
