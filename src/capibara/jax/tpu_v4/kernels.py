"""The documented classes of operations, as in :mod:`capibara.jax.tpu_v4.backend`."""

from __future__ import annotations

from capibara.jax.tpu_v4 import backend
from capibara.jax.tpu_v4.backend import *  # noqa: F403

__all__ = list(backend.__all__)  # pyright: ignore[reportUnsupportedDunderAll]
