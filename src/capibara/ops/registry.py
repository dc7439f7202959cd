"""How an operation finds its implementation.

An operation is one public function with several implementations of the same mathematics. Which one runs must
be decided when the function is *lowered*, not when it is called: a function traced on a laptop may be
compiled ahead of time for a TPU. So :meth:`Op.run` asks, for every platform JAX knows, which implementation
that platform would use, and where the answers differ it leaves the choice to ``jax.lax.platform_dependent``.

An implementation says whether it can take a problem in its ``check``: it raises ``NotImplementedError`` with
the reason, and the next one in line is asked. No other exception falls through, so a broken kernel is never
hidden. The answer may depend only on the *problem*: a frozen description (shapes, dtypes, options) of the
call. This keeps the forward and the backward pass of an operation on the same implementation.

>>> from capibara.ops import explain
>>> from capibara.ops.attention import flash_attention
>>> import jax.numpy as jnp
>>> x = jnp.ones((1, 2, 8, 4))
>>> explain(flash_attention, x, x, x, platform="tpu").chosen
'pallas_tpu'
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import jax

from capibara.errors import did_you_mean
from capibara.ops.errors import NoImplementationError, OpTypeError, OpValueError

__all__ = [
    "Explanation",
    "Implementation",
    "Op",
    "Problem",
    "explain",
    "get_op",
    "list_ops",
    "portable",
    "public",
]

_F = TypeVar("_F", bound=Callable[..., Any])

# The names `jax.lax.platform_dependent` accepts as keywords. Any other platform (a plug-in) takes the default
# branch, which is what an operation would use on a platform that no implementation names.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class Problem(Protocol):
    """The frozen, hashable description of one call: all that decides which implementation runs."""

    @property
    def implementation(self) -> str: ...


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
      name: What the user writes in ``implementation=``.
      functions: The entry points (``"forward"``, ``"backward"`` …); each is called as
        ``f(problem, *arrays)``.
      platforms: The platforms where ``"auto"`` may take it; ``None`` means every one.
      check: Raises ``NotImplementedError`` with the reason when the problem cannot be taken.
      portable: False for what runs only where this installation is: see :func:`portable`.
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]
    platforms: tuple[str, ...] | None = None
    check: Callable[[Any], None] | None = None
    portable: bool = True

    def refusal(self, problem: Any, platform: str | None) -> str | None:
        """Why this implementation does not take ``problem`` on ``platform``; ``None`` when it does.

        ``platform=None`` leaves the preference for platforms out, as an explicit request does.
        """
        if platform is not None and self.platforms is not None and platform not in self.platforms:
            return f"is for {' and '.join(self.platforms)}, not {platform}"
        if not self.portable and _elsewhere.get():
            return "is native code of this installation, and the program is for elsewhere"
        if self.check is not None:
            try:
                self.check(problem)
            except NotImplementedError as reason:
                return str(reason)
        return None


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found: the implementation that runs, and why each of the others does not."""

    op: str
    platform: str
    chosen: str
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.platform}: {self.chosen}"]
        lines += [f"  not {name}: {why}" for name, why in self.reasons.items()]
        return "\n".join(lines)


class Op:
    """An operation: its implementations in order of preference, and how a call becomes a problem.

    Args:
      name: The operation's name, as in ``explain("flash_attention", …)``.
      prepare: Validates a call's arguments; returns ``(problem, arrays)``.
      implementations: In order of preference; the last one takes every problem on every platform.
    """

    def __init__(
        self, name: str, prepare: Callable[..., tuple[Any, Any]], implementations: list[Implementation]
    ) -> None:
        if name in _OPS:
            raise OpValueError(f"an operation called {name!r} is registered already")
        self.name = name
        self.prepare = prepare
        self._implementations: list[Implementation] = list(implementations)
        _OPS[name] = self

    @property
    def implementations(self) -> tuple[str, ...]:
        return tuple(each.name for each in self._implementations)

    def check_name(self, implementation: object) -> str:
        """Return ``implementation`` if it is ``"auto"`` or one of this operation's names."""
        options = ("auto", *self.implementations)
        if not isinstance(implementation, str):
            raise OpTypeError(
                f"{self.name}: implementation must be a string, one of {', '.join(options)}; got "
                f"{implementation!r} of type {type(implementation).__name__}"
            )
        if implementation not in options:
            raise OpValueError(
                f"{self.name}: there is no implementation {implementation!r}; expected one of "
                f"{', '.join(options)}.{did_you_mean(implementation, options)}"
            )
        return implementation

    def choose(self, problem: Problem, platform: str) -> tuple[Implementation, dict[str, str]]:
        """The implementation that runs ``problem`` on ``platform``, and why the ones not taken are not."""
        asked = problem.implementation
        reasons: dict[str, str] = {}
        chosen: Implementation | None = None
        for each in self._implementations:
            if asked != "auto" and each.name != asked:
                reasons[each.name] = f"implementation={asked!r} was asked for"
                continue
            if chosen is not None:
                reasons[each.name] = f"{chosen.name} comes before it"
                continue
            why = each.refusal(problem, None if asked != "auto" else platform)
            if why is None:
                chosen = each
            else:
                reasons[each.name] = why
        if chosen is None:
            detail = "; ".join(f"{name} {why}" for name, why in reasons.items() if asked in ("auto", name))
            raise NoImplementationError(
                f"{self.name}: no implementation takes this problem on {platform} ({detail}). "
                f"Remedy: implementation='auto' or 'reference'."
            )
        return chosen, reasons

    def run(self, entry: str, problem: Problem, *arrays: Any) -> Any:
        """Call the entry point ``entry`` of the implementation that the lowering's platform uses."""
        if problem.implementation != "auto":
            chosen, _ = self.choose(problem, jax.default_backend())
            return chosen.functions[entry](problem, *arrays)
        default, _ = self.choose(problem, "another platform")
        special = {
            platform: partial(chosen.functions[entry], problem)
            for platform in PLATFORMS
            if (chosen := self.choose(problem, platform)[0]) is not default
        }
        branch = partial(default.functions[entry], problem)
        if not special:
            return branch(*arrays)
        return jax.lax.platform_dependent(*arrays, default=branch, **special)


_OPS: dict[str, Op] = {}
_elsewhere: contextvars.ContextVar[bool] = contextvars.ContextVar("elsewhere", default=False)


@contextlib.contextmanager
def portable() -> Iterator[None]:
    """What is traced in here runs in any process that has JAX: native code of this installation is left out.

    For programs that are written to a file (``jax.export``). Functions that were traced before keep what they chose.
    """
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def list_ops() -> Mapping[str, Op]:
    """Every registered operation by name (read-only)."""
    return MappingProxyType(_OPS)


def public(op: Op) -> Callable[[_F], _F]:
    """Mark a function as the public face of ``op``, so that :func:`explain` accepts the function itself."""

    def mark(function: _F) -> _F:
        function.__capibara_op__ = op.name  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return mark


def get_op(op: str | Callable[..., Any]) -> Op:
    """The registered operation of that name, or the one whose public function this is."""
    name = op if isinstance(op, str) else getattr(op, "__capibara_op__", None)
    if name is None:
        raise OpTypeError(
            f"explain: op must be an operation's name or its public function, got {op!r}. "
            f"Registered: {', '.join(sorted(_OPS))}."
        )
    if name not in _OPS:
        raise OpValueError(
            f"explain: there is no operation {name!r}. Registered: {', '.join(sorted(_OPS))}."
            f"{did_you_mean(name, _OPS)}"
        )
    return _OPS[name]


def explain(
    op: str | Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any
) -> Explanation:
    """Say which implementation of ``op`` runs for these arguments, and why the others do not.

    Args:
      op: An operation's name (``"flash_attention"``) or its public function.
      *args: The arguments the call would get; arrays may be ``jax.ShapeDtypeStruct``.
      platform: ``"cpu"``, ``"cuda"``, ``"rocm"``, ``"tpu"`` …; by default the platform JAX runs on here.
      **kwargs: The keyword arguments the call would get.

    Raises:
      OpValueError, OpTypeError: ``op`` is not an operation, or the call itself is not valid.
      NoImplementationError: the implementation asked for cannot take the problem.
    """
    found = get_op(op)
    where = jax.default_backend() if platform is None else platform
    if where == "gpu":
        where = "cuda"
    problem, _ = found.prepare(*args, **kwargs)
    chosen, reasons = found.choose(problem, where)
    return Explanation(found.name, where, chosen.name, MappingProxyType(reasons))
