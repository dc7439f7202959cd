"""The rate at which this machine moves bytes between memory and a device: the measured bound of what memory limits."""

from __future__ import annotations

import statistics
import time
from typing import Any

__all__ = ["copy_bandwidth"]


def copy_bandwidth(size: int = 256 * 2**20, *, device: Any = None, repeats: int = 5) -> float:
    """Bytes per second, read and written, of ``jax.jit(lambda x: x + 1)`` on a large array, measured now.

    Args:
      size: bytes of the array; larger than the caches.
      device: a ``jax.Device``; by default JAX's default device.
      repeats: timed repetitions.

    Returns:
      2 · ``size`` / median seconds.
    """
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0] if device is None else device
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = add(jax.device_put(jnp.zeros(size // 4, jnp.float32), device))
    times = []
    for _ in range(repeats):
        array.block_until_ready()
        start = time.perf_counter()
        array = add(array)
        array.block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * array.nbytes / statistics.median(times)
