"""A lowered program and the kinds of its arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Workload", "bytes_on_a_device"]


@dataclass(frozen=True)
class Workload:
    """The result of a builder.

    A builder is a function ``(mesh, **parameters) -> Workload``, named as ``"module:function"``; the parameters are
    JSON values.

    Attributes:
      lowered: the program, as returned by ``jax.jit(…).lower(…)`` for abstract arguments (``jax.ShapeDtypeStruct``
        with a sharding on the mesh).
      kinds: the arguments by kind: ``{"parameters": tree, "optimizer": tree, "batch": tree}``.
    """

    lowered: Any
    kinds: Mapping[str, Any] = field(default_factory=dict)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the arguments on one device, by kind, without padding."""
        return {kind: bytes_on_a_device(tree) for kind, tree in self.kinds.items()}


def bytes_on_a_device(tree: Any) -> int:
    """Bytes of abstract arrays on one device, without those in the host's memory."""
    import jax

    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None:
            if sharding.memory_kind not in (None, "device"):
                continue
            shape = sharding.shard_shape(shape)
        item = 4 if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
        total += math.prod(shape) * item
    return total
