"""Validation of the arguments of a health check."""

from __future__ import annotations

from collections import Counter
from typing import TypeGuard

import numpy as np
from jax.sharding import Mesh

from capibara.observe.health.errors import HealthError

__all__ = ["check_function", "check_integer", "check_mesh", "is_number"]


def check_mesh(mesh: object) -> None:
    """Raise a :class:`HealthError` unless it is None or a mesh of at least one device, each at one place."""
    if mesh is None:
        return
    remedy = "Make one with jax.make_mesh(sizes, names)."
    if not isinstance(mesh, Mesh):
        raise HealthError(
            f"mesh: got {mesh!r:.200}, expected a jax.sharding.Mesh of devices or None. {remedy}"
        )
    places = Counter(mesh.devices.reshape(-1))
    if not places:
        raise HealthError(f"mesh: got {mesh!r:.200}, expected at least one device. {remedy}")
    if twice := [str(device) for device, count in places.items() if count > 1]:
        raise HealthError(
            f"mesh: got {', '.join(twice[:4])} at more than one place, expected each device once. {remedy}"
        )


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number of Python's or NumPy's; a boolean is not."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def check_function(name: str, value: object, takes: str) -> None:
    """Raise a :class:`HealthError` unless it is None or callable; ``takes`` says with what."""
    if value is not None and not callable(value):
        raise HealthError(
            f"{name}: got {value!r:.200}, expected a function or None. Pass one that takes {takes}."
        )


def check_integer(name: str, value: object, what: str) -> None:
    """Raise a :class:`HealthError` unless it is None or an integer above 0; ``what`` says of what."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise HealthError(
            f"{name}: got {value!r:.200}, expected an integer of at least 1 or None. Pass {what}."
        )
