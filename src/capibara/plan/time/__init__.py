"""Seconds that a compiled program takes on a slice: work, memory, exchanges, and what of these is hidden."""

from __future__ import annotations

from capibara.plan.time.prediction import Constants, Part, StepTime, predict_step, time_of_each
from capibara.plan.time.torus import Torus, places_on_grid

__all__ = ["Constants", "Part", "StepTime", "Torus", "places_on_grid", "predict_step", "time_of_each"]
