"""The rate at which this machine multiplies matrices: the measured denominator of FLOP utilisation.

A vendor's peak is theoretical, and CPUs have none. A plain, large, compiled matrix product shows what a program can
reach here; utilisation relative to that shows how well a program performs on *this* machine under its current load.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from capibara.measure.timing import MeasureError

if TYPE_CHECKING:
    from capibara.hardware import Chip

__all__ = ["matmul_rate", "measured_chip"]

# Long enough that the call's own cost (tens of microseconds) does not show.
_LONG_ENOUGH = 0.02
_SIZES = {"cpu": (512, 1024, 2048), "accelerator": (1024, 4096, 8192)}


def matmul_rate(
    dtype: str = "float32", size: int | None = None, *, budget: float = 0.4, device: Any = None
) -> float:
    """FLOP/s of ``jax.jit(jnp.matmul)`` on two square matrices, measured now, in about a second.

    Args:
      dtype: of the matrices; JAX's default precision applies (on a TPU, float32 inputs are multiplied as
        bfloat16).
      size: rows and columns; by default the first of 512, 1024, … (1024, 4096, …
        on an accelerator) whose product takes 20 ms.
      budget: seconds to spend on timed repetitions; the result is the median of at least 3.
      device: a ``jax.Device``; by default JAX's default device.

    Returns:
      2 · size³ / median seconds.

    Raises:
      MeasureError: (a ``ValueError``) an unknown dtype or a size that is not an integer from 1 to 65536.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    try:
        kind = jnp.dtype(dtype)
    except TypeError as error:
        raise MeasureError(
            f"dtype: got {dtype!r}, expected a number type such as 'float32' or 'bfloat16'"
        ) from error
    if not (jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)):
        raise MeasureError(f"dtype: got {dtype!r}, expected a floating-point or integer type")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 65_536):
        raise MeasureError(f"size: got {size!r}, expected an integer from 1 to 65536")
    if jax.dtypes.canonicalize_dtype(kind) != kind:
        raise MeasureError(
            f"dtype: {dtype!r} needs 64-bit numbers; jax.config.update('jax_enable_x64', True)"
        )
    device = jax.devices()[0] if device is None else device
    multiply = jax.jit(jnp.matmul)

    def operands(n: int) -> tuple[Any, Any]:
        # Ones would let some hardware save power; small varied numbers do not overflow any type.
        numbers = (np.arange(n * n) % 7 - 3).reshape(n, n).astype(kind)
        return jax.device_put(numbers, device), jax.device_put(numbers[::-1], device)

    def timed(a: Any, b: Any) -> float:
        start = time.perf_counter()
        multiply(a, b).block_until_ready()
        return time.perf_counter() - start

    sizes = _SIZES["cpu" if device.platform == "cpu" else "accelerator"] if size is None else (size,)
    seconds, n, a, b = 0.0, 0, None, None
    for n in sizes:
        a, b = operands(n)
        timed(a, b)  # compiles
        seconds = timed(a, b)
        # The next size takes eight times as long; stop where it would overrun the budget.
        if seconds >= _LONG_ENOUGH or 8 * 3 * seconds > budget:
            break
    repeats = max(3, min(50, int(budget / max(seconds, 1e-6))))
    return 2.0 * n**3 / statistics.median(timed(a, b) for _ in range(repeats))


def measured_chip(dtypes: tuple[str, ...] = ("float32", "bfloat16"), *, device: Any = None) -> Chip:
    """The local chip with peaks measured by :func:`matmul_rate` instead of the vendor's.

    Takes about a second per dtype.
    """
    from capibara.hardware import detect_chip

    return detect_chip(device, rates={dtype: matmul_rate(dtype, device=device) for dtype in dtypes})
