"""Faults put into a family's call, to see that each way of checking can fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fuzz_ops.case import Family

__all__ = ["FAULTS", "plant"]

FAULTS = ("value", "gradient", "second")


def _identity(backward: Callable[[Any], Any]) -> Any:
    """``x`` itself, with another gradient."""
    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, g: (backward(g),))
    return same


TURNED = _identity(jnp.negative)
# The gradient is right and no longer depends on anything.
STIFF = _identity(jax.lax.stop_gradient)


def plant(family: Family, fault: str) -> Family:
    """The family with a fault: ``value`` (a little off), ``gradient`` (of one argument, its sign), or ``second``."""
    a_little = 1 + max(1e-3, 50 * family.tolerance)

    def off(x: Any) -> Any:
        return (x * a_little).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def broken(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            if fault == "value":
                return jax.tree.map(off, call(*arrays))
            wrong = TURNED if fault == "gradient" else STIFF
            places = family.differentiable[:1] if fault == "gradient" else family.differentiable
            return call(*(wrong(x) if i in places else x for i, x in enumerate(arrays)))

        return run

    over = None if family.over is None else dataclasses.replace(family.over, local=broken(family.over.local))
    return dataclasses.replace(family, call=broken(family.call), over=over)
