"""Sharding, at its documented names: thin faces of :mod:`capibara.plan.sharding`."""

from __future__ import annotations

from capibara.plan.sharding import create_mesh_sharding, optimize_sharding_strategy

__all__ = ["create_mesh_sharding", "optimize_sharding_strategy"]
