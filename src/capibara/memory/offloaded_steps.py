"""A training step whose optimizer state stays in the host's memory between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from capibara.memory.errors import MemorySettingError
from capibara.memory.offload import to_host

__all__ = ["offload_state"]


def offload_state(
    step: Callable[..., Any], example: Any, *, argnum: int = 0, outnum: int = 0
) -> Callable[..., Any]:
    """A step that fetches one argument from the host's memory, and sends the result that replaces it back there.

    Equivalent plain JAX, for the state ``s``: ``s = device_put(s, on_device)`` before the step, and
    ``device_put(s, on_host)`` after it, within one compiled program (ZeRO-Offload, Ren et al. 2021, for the idea).

    Args:
      step: a function of arrays and pytrees, not jitted yet; returns a tuple.
      example: the state: arrays or ``jax.ShapeDtypeStruct``s with their shardings on the devices.
      argnum: the argument that is kept on the host. outnum: the result that takes its place.

    Returns:
      The step, for ``jax.jit(…, donate_argnums=argnum)``; its first argument is ``to_host(state)``.

    Raises:
      OffloadError: the devices reach no memory of the host.
      MemorySettingError: an array of the example has no sharding.
    """
    for leaf in jax.tree.leaves(example):
        if getattr(leaf, "sharding", None) is None:
            raise MemorySettingError(
                f"example: got {leaf!r:.80} without a sharding, expected arrays, or ShapeDtypeStructs with sharding=."
            )
    on_device = jax.tree.map(lambda leaf: leaf.sharding, example)
    on_host = jax.tree.map(lambda leaf: leaf.sharding, to_host(_described(example)))

    def offloaded(*args: Any) -> tuple[Any, ...]:
        here = list(args)
        here[argnum] = jax.device_put(here[argnum], on_device)
        results = list(step(*here))
        results[outnum] = jax.device_put(results[outnum], on_host)
        return tuple(results)

    return offloaded


def _described(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )
