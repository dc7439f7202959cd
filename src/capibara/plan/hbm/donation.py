"""Which arguments of a step can be donated: those whose every array has a result of its own to become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["choose_donation"]


def choose_donation(
    step: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]
) -> tuple[tuple[int, ...], dict[int, str]]:
    """The arguments to donate, and why the others are not.

    XLA reuses a donated buffer for a result of the same shape and dtype; one that finds no such result is freed only in
    JAX's books ("Some donated buffers were not usable"). Nothing is computed: shapes are enough.

    Args:
      step: a function of arrays and pytrees.
      args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      argnums: the arguments that nothing else needs after the step, in the order in which they are considered.
    """
    import jax

    results = Counter(_kind(leaf) for leaf in jax.tree.leaves(jax.eval_shape(step, *args)))
    donated: list[int] = []
    others: dict[int, str] = {}
    for number in argnums:
        wanted = Counter(_kind(leaf) for leaf in jax.tree.leaves(args[number]))
        missing = wanted - results
        if not wanted:
            others[number] = "it has no arrays"
        elif missing:
            shape, dtype = next(iter(missing))
            count = sum(missing.values())
            others[number] = (
                f"{count} of its arrays have no result of their shape, such as {dtype}{list(shape)}"
            )
        else:
            results -= wanted
            donated.append(number)
    return tuple(sorted(donated)), others


def _kind(leaf: Any) -> tuple[tuple[int, ...], str]:
    import jax

    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    return tuple(aval.shape), str(aval.dtype)
