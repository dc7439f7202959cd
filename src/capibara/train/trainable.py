"""The part of a model's parameters that is trained: with adapters, only these.

A part is nested like the parameters, with ``None`` in the place of those that stay as they are. JAX and optax pass over
``None``, so that there are neither gradients nor moments of them.
"""

from __future__ import annotations

from typing import Any

import jax

from capibara.core.adapters import joined

__all__ = ["joined", "trained_part"]


def trained_part(model: Any, tree: Any) -> Any:
    """The part of ``tree`` that belongs to trained parameters.

    Args:
      model: ``model.trainable``, if it has that and it is not ``None``: a boolean for each parameter.
      tree: nested like the parameters.
    """
    kept = getattr(model, "trainable", None)
    if kept is None or tree is None:
        return tree
    return jax.tree.map(lambda keep, leaf: leaf if keep else None, kept, tree)
