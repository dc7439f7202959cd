"""What differs between the versions of JAX that Capibara supports, in one file."""

from __future__ import annotations

from typing import Any

__all__ = ["scan_counts"]


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many of the inputs of a ``scan`` equation are constants, and how many are its carry.

    JAX 0.12 no longer has them as parameters (``num_consts``, ``num_carry``). In every version an array that is
    scanned has one axis more outside the body than in it, and constants and the carry do not.
    """
    body = eqn.params["jaxpr"].jaxpr
    carry = _same_rank(eqn.outvars, body.outvars)
    return _same_rank(eqn.invars, body.invars) - carry, carry


def _same_rank(outside: Any, inside: Any) -> int:
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outside, inside, strict=True))
