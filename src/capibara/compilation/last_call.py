"""Recognise that a call needs the same program as the one before it, in a fraction of the time of a signature.

A training loop passes the results of one step to the next. JAX gives these the same type and sharding objects each
time, so that comparing identities is enough; only what has others is compared by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capibara.compilation.signature import settings_now

__all__ = ["LastCall"]


class LastCall:
    """One call.

    Args:
      leaves: all arrays of its arguments, static ones left out.
      tree: their structure.
      static: names, types and values of the static arguments.
      program: what it needed.
    """

    def __init__(
        self, leaves: Sequence[Any], tree: Any, static: tuple[tuple[str, type, Any], ...], program: Any
    ) -> None:
        self.program = program
        self._tree, self._static, self._settings = tree, static, settings_now()
        self._seen = [_seen(leaf) for leaf in leaves]

    def matches(self, leaves: Sequence[Any], tree: Any, static: tuple[tuple[str, type, Any], ...]) -> bool:
        """Whether another call needs the same program."""
        if len(leaves) != len(self._seen) or tree != self._tree:
            return False
        try:
            if static != self._static:
                return False
        except ValueError:  # an array, which is refused when its signature is made
            return False
        for leaf, (kind, aval, sharding, committed) in zip(leaves, self._seen, strict=True):
            if type(leaf) is not kind:
                return False
            if sharding is None:
                if aval is not None and aval != (leaf.shape, leaf.dtype):
                    return False
                continue
            if leaf.aval is not aval and leaf.aval != aval:
                return False
            if leaf.committed is not committed:
                return False
            if leaf.sharding is not sharding and leaf.sharding != sharding:
                return False
        return settings_now() == self._settings


def _seen(leaf: Any) -> tuple[type, Any, Any, bool]:
    import jax

    if isinstance(leaf, jax.Array):
        return type(leaf), leaf.aval, leaf.sharding, leaf.committed
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return type(leaf), (leaf.shape, leaf.dtype), None, False
    return type(leaf), None, None, False  # a number of Python's: its type is all that counts
