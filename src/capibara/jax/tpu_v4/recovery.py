"""Recovery at its documented name: a thin face of :mod:`capibara.train.recovery`."""

from __future__ import annotations

from capibara.train.recovery.manager import DeviceFailedError, RecoveryEvent, TpuError, TpuRecoveryManager

__all__ = ["DeviceFailedError", "RecoveryEvent", "TpuError", "TpuRecoveryManager"]
