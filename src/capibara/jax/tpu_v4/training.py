"""Training meshes, at their documented name: a thin face of :mod:`capibara.plan.sharding`."""

from __future__ import annotations

from capibara.plan.sharding import create_training_mesh

__all__ = ["create_training_mesh"]
