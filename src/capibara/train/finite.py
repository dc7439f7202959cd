"""Whether a state may be saved: infinities and NaN in it would replace the good checkpoints before it.

The loss and the gradients of a step say nothing of the parameters after its update, which may overflow. Some models
have infinities from the start, such as a mask; what is not finite in a new state may be so later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.train.errors import DivergedError

__all__ = ["check_finite"]


@jax.jit
def _finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])


def check_finite(step: int, items: Mapping[str, Any], initial: Callable[[], Mapping[str, Any]]) -> None:
    """Refuse a state with infinities or NaN in arrays that have none before the first step.

    Args:
      step: that of the state. items: its arrays, on the devices.
      initial: gives those of a new run; called only if something is not finite.

    Raises:
      DivergedError: it names the first of the arrays; in every process.
    """
    if not (names := _not_finite(items)):
        return
    if not (names := sorted(set(names) - set(_not_finite(initial())))):
        return
    others = f" and {len(names) - 1} other arrays" if len(names) > 1 else ""
    raise DivergedError(
        f"{names[0]}{others} became infinite or not a number by step {step}. Nothing of that is saved: the newest "
        "checkpoint is from before. Lower the learning rate, clip the gradients, or compute in float32.",
        step=step,
    )


def _not_finite(items: Mapping[str, Any]) -> list[str]:
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(dict(items))
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size
    }
    if not named:
        return []
    good = np.asarray(jax.device_get(_finite(list(named.values()))))
    return [name for name, fine in zip(named, good, strict=True) if not fine]
