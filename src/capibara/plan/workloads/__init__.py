"""What is planned: programs lowered for devices that are only described."""

from __future__ import annotations

from capibara.plan.workloads.workload import Workload

__all__ = ["Workload"]
