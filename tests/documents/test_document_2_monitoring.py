"""Document 2, "Real-time Monitoring": the snippet, with a model and training data; memory passes its bound."""

from __future__ import annotations

import textwrap
import time

import jax
import jax.numpy as jnp
import pytest

from capibara.hardware.telemetry import available_memory
from capibara.observe.monitor import sources

SNIPPET = """
    from capibara.jax.tpu_v4.monitoring import TpuRealTimeMonitor

    # Monitor tiempo real TPU
    monitor = TpuRealTimeMonitor(
        update_frequency_ms=100,     # Actualizar cada 100ms
        alert_thresholds={
            "memory_usage": 0.9,     # Alerta si >90% memoria
            "temperature": 80.0,     # Alerta si >80°C
            "utilization": 0.3       # Alerta si <30% utilización
        }
    )

    # Iniciar monitoring
    monitor.start_monitoring()

    # Ejecutar entrenamiento con monitoring
    for batch in training_data:
        result = model(batch)

        # Obtener métricas actuales
        current_metrics = monitor.get_current_metrics()

        if monitor.has_alerts():
            alerts = monitor.get_alerts()
            for alert in alerts:
                print(f"TPU Alert: {alert}")
"""


def test_the_snippet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    full = False
    real = available_memory
    monkeypatch.setattr(sources, "available_memory", lambda: 1 if full else real())
    names = {}

    def training_data():
        nonlocal full
        yield jnp.ones((8, 8))
        full = True
        deadline = time.monotonic() + 60
        while not names["monitor"].has_alerts() and time.monotonic() < deadline:
            time.sleep(0.05)
        yield jnp.ones((8, 8))

    names.update(training_data=training_data(), model=jax.jit(lambda x: x @ x))
    try:
        exec(textwrap.dedent(SNIPPET), names)
    finally:
        names["monitor"].stop_monitoring()
    printed = capsys.readouterr().out
    assert "TPU Alert: memory_usage 100.0 % > 90.0 % for " in printed
    assert names["current_metrics"]["memory_usage"] == pytest.approx(1.0)
