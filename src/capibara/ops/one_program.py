"""Calls outside of ``jax.jit`` as one compiled program.

An operation that is called with arrays, not traced, would run its primitives one by one: each is compiled by itself,
for each shape, and a loop whose body is a new function is compiled at every call. :func:`one_program` compiles the body
as a whole, once for the same static arguments, as the functions of ``jax.numpy`` do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.core import Tracer

__all__ = ["one_program"]


def one_program(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    """``function(*static, *arrays)`` as a function of the arrays; compiled as a whole where none of them is traced.

    Args:
      function: one that outlives the call (of a module, not made inside another function): programs are kept by it.
      static: what it is compiled for; hashable.
    """

    def call(*arrays: Any) -> Any:
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays)):
            return function(*static, *arrays)
        return _compiled(function, static)(*arrays)

    return call


@functools.lru_cache(maxsize=4096)
def _compiled(function: Callable[..., Any], static: tuple[Hashable, ...]) -> Callable[..., Any]:
    # Inlined where something around it is being traced after all.
    return jax.jit(functools.partial(function, *static), inline=True)
