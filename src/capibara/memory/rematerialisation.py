"""What a block keeps for its backward pass: everything, its matrix products, nothing, or its products on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from capibara.compose.backends.jax_repeat import keep_products
from capibara.memory.arguments import checked_choice
from capibara.memory.offload import HOST_MEMORY

__all__ = ["REMAT", "rematerialise"]

REMAT = ("none", "dots", "full", "offload")
"""From the fastest to the one that takes the least memory; ``"offload"`` where host memory is apart."""


def rematerialise(
    function: Callable[..., Any], how: str, *, host_kind: str = HOST_MEMORY
) -> Callable[..., Any]:
    """The function, with a rule for what its derivative keeps. Values and gradients stay the same.

    Equivalent plain JAX: ``jax.checkpoint(function, policy=…)`` (Chen et al., "Training deep nets with sublinear memory
    cost", 2016).

    Args:
      function: a block of a model: applied to a whole model, ``"full"`` saves nothing.
      how: ``"none"`` (the function as it is), ``"dots"`` keeps the results of matrix products, ``"full"`` only its
        arguments, ``"offload"`` moves the results of matrix products to the host, and fetches them when needed.
      host_kind: the memory for ``"offload"``.

    Raises:
      MemorySettingError: ``how`` is unknown.
    """
    checked_choice("how", how, REMAT)
    if how == "none":
        return function
    if how == "full":
        return jax.checkpoint(function)
    if how == "dots":
        return jax.checkpoint(function, policy=keep_products())
    return jax.checkpoint(function, policy=keep_products(host_kind))
