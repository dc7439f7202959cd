"""What a program computes that its results depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = ["live_primitives"]


def live_primitives(function: Callable[..., Any], *args: Any) -> set[str]:
    """Names of the primitives in a function's trace that its results depend on, those of inner functions included."""
    return set(_live(jax.make_jaxpr(function)(*args).jaxpr))


def _live(jaxpr: Any) -> Iterator[str]:
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars) and not eqn.effects:
            continue
        needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
        yield eqn.primitive.name
        for value in eqn.params.values():
            if isinstance(value, ClosedJaxpr | Jaxpr):
                yield from _live(getattr(value, "jaxpr", value))
