"""Whether a state may be saved: infinities and NaN in it would replace the good checkpoints before it.

The loss and the gradients of a step say nothing of the parameters after its update, which may overflow. Some models
have infinities from the start, such as a mask; what is not finite in a new state may be so later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.memory.offload import HOST_MEMORY
from capibara.train.errors import DivergedError

__all__ = ["check_finite", "not_finite"]


@jax.jit
def _finite(leaves: list[jax.Array]) -> jax.Array:
    # TPUs compute with nothing that is in the host's memory, such as an optimizer's state (offload).
    here = [jax.device_put(leaf, jax.memory.Space.Device) for leaf in leaves]
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in here])


def check_finite(step: int, items: Mapping[str, Any], allowed: Callable[[], Collection[str]]) -> None:
    """Refuse a state with infinities or NaN in arrays that have none before the first step.

    Args:
      step: that of the state. items: its arrays, on the devices.
      allowed: gives the names of arrays that are not finite in a new run; called only if something is not.

    Raises:
      DivergedError: it names the first of the arrays; in every process.
    """
    if not (names := not_finite(items)):
        return
    if not (names := sorted(set(names) - set(allowed()))):
        return
    others = f" and {len(names) - 1} other arrays" if len(names) > 1 else ""
    raise DivergedError(
        f"{names[0]}{others} became infinite or not a number by step {step}. Nothing of that is saved: the newest "
        "checkpoint is from before. Lower the learning rate, clip the gradients, or compute in float32.",
        step=step,
    )


def not_finite(items: Mapping[str, Any]) -> list[str]:
    """The names of the arrays with infinities or NaN, such as ``model/w``."""
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(dict(items))
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size
    }
    if not named:
        return []
    on_host = {name: leaf for name, leaf in named.items() if leaf.sharding.memory_kind == HOST_MEMORY}
    here = {name: leaf for name, leaf in named.items() if name not in on_host}
    # One after the other, as there may be no room for all of them on the devices.
    groups = [here, *({name: leaf} for name, leaf in on_host.items())]
    good = jax.device_get([_finite(list(group.values())) for group in groups if group])
    found = dict(zip([*here, *on_host], np.concatenate(good), strict=True))
    return [name for name in named if not found[name]]
