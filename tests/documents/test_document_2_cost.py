"""Document 2, "Cost Management": its snippet, as a reader would type it."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

SNIPPET = """
    from capibara.jax.tpu_v4.cost import (
        TpuCostOptimizer,
        estimate_operation_cost
    )

    # Optimizador costos TPU
    cost_optimizer = TpuCostOptimizer(
        max_cost_per_hour=100.0,     # Límite costo/hora
        cost_model="tpu_v4_pricing", # Modelo pricing
        optimization_target="cost_efficiency"
    )

    # Estimación costo operación
    operation_cost = estimate_operation_cost(
        operation_flops=1e12,        # FLOPS operación
        memory_gb=16.0,              # Memoria requerida
        duration_seconds=10.0,       # Duración estimada
        tpu_utilization=0.8          # Utilización esperada
    )

    print(f"💰 Estimated cost: ${operation_cost:.4f}")
"""


def test_cost(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(textwrap.dedent(SNIPPET), "document 2", "exec"), names)
    from capibara.hardware import get_price

    # One chip holds 16 GiB and does 10¹² operations in ten seconds many times over.
    expected = get_price("v4").usd_per_chip_hour * 10 / 3600
    assert names["operation_cost"] == pytest.approx(expected)
    assert capsys.readouterr().out == f"💰 Estimated cost: ${expected:.4f}\n"
    # The optimiser at work, within the document's hundred dollars an hour.
    chosen = names["cost_optimizer"].cheapest_slice(flops=1e20, memory_gb=100.0, hours=24.0)
    assert chosen.best.dollars_per_hour <= 100.0
    assert chosen.candidate.generation == "v4"
