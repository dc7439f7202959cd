"""Runs of operations compiled together, each program once.

A function that is evaluated operation by operation has each operation compiled for its shapes, which takes far longer
than the arithmetic. Those between two looks at a weight are compiled as one program, and runs that read alike, as those
of a model's layers do, share it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

__all__ = ["Programs", "bound"]

# Of these only the program itself is run; what stands beside it, for derivatives, is a new object at each trace.
_WITH_DERIVATIVES = frozenset(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"))


def bound(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """The results of one operation of a jaxpr."""
    out = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


class Programs:
    """Compiles and keeps programs."""

    def __init__(self) -> None:
        self._by_text: dict[str, Callable[..., list[Any]]] = {}
        # With the equations, so that the identities of these stay theirs.
        self._by_identity: dict[
            tuple[int, ...], tuple[Callable[..., list[Any]], list[Any], Sequence[Any]]
        ] = {}

    def __len__(self) -> int:
        return len(self._by_text)

    def run(
        self, eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], arrays: Sequence[Any]
    ) -> list[Any]:
        """Evaluate equations of a jaxpr.

        Args:
          eqns: in order, without effects.
          inputs: the variables that they take, in the order in which they are read first.
          outputs: the variables that are wanted.
          arrays: the values of ``inputs``.
        """
        key = (*map(id, eqns), 0, *map(id, outputs))
        if key not in self._by_identity:
            text = _text(eqns, inputs, outputs)
            if text not in self._by_text:
                self._by_text[text] = jax.jit(_function(list(eqns), inputs, outputs))
            self._by_identity[key] = self._by_text[text], list(eqns), outputs
        return self._by_identity[key][0](*arrays)


def _function(eqns: list[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[..., list[Any]]:
    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(inputs, arrays, strict=True))
        for eqn in eqns:
            given = [v.val if hasattr(v, "val") else env[v] for v in eqn.invars]
            env.update(zip(eqn.outvars, bound(eqn, given), strict=True))
        return [env[v] for v in outputs]

    return run


def _text(eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> str:
    """Equal for equations that compute the same; variables are numbered."""
    names: dict[Any, str] = {v: f"%{i}" for i, v in enumerate(inputs)}

    def name(v: Any) -> str:
        return f"{_describe(v.val)}:{v.aval}" if hasattr(v, "val") else names[v]

    lines = [",".join(f"{names[v]}:{v.aval}" for v in inputs)]
    for eqn in eqns:
        kind = eqn.primitive.name
        known = {k: p for k, p in eqn.params.items() if kind not in _WITH_DERIVATIVES or _is_program(p)}
        given = ",".join(map(name, eqn.invars))
        for v in eqn.outvars:
            names[v] = f"%{len(names)}"
        lines.append(f"{','.join(map(name, eqn.outvars))}={kind}{_describe(known)}({given})")
    return "\n".join([*lines, ",".join(map(name, outputs))])


def _is_program(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def _describe(value: Any) -> str:
    """A parameter as text; of what has no text of its own, which object it is."""
    if _is_program(value):
        jaxpr = getattr(value, "jaxpr", value)
        consts = [id(c) for c in getattr(value, "consts", ())]
        return f"{{{_text(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)}|{consts}}}"
    if isinstance(value, Mapping):
        return f"[{','.join(f'{k}:{_describe(v)}' for k, v in value.items())}]"
    if isinstance(value, tuple | list | frozenset):
        return f"({','.join(map(_describe, value))})"
    if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0:
        return f"{value.dtype}{value!r}"
    if isinstance(value, np.ndarray | jax.Array):
        return f"#{id(value)}"
    if value is None or isinstance(
        value, str | bytes | bool | int | float | complex | np.generic | enum.Enum
    ):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        return f"{type(value).__qualname__}{_describe(fields)}"
    text = repr(value)
    return f"#{id(value)}" if " at 0x" in text or callable(value) else text
