"""How an operation finds its implementation.

An operation is one public function with several implementations of the same mathematics. Which one runs must
be decided when the function is *lowered*, not when it is called: a function traced on a laptop may be
compiled ahead of time for a TPU. So :meth:`Op.run` asks, for every platform JAX knows, which implementation
that platform would use, and where the answers differ it leaves the choice to ``jax.lax.platform_dependent``.

An implementation says whether it can take a problem in its ``check``: it raises ``NotImplementedError`` with
the reason, and the next one in line is asked. No other exception falls through, so a broken kernel is never
hidden. The answer may depend only on the *problem*: a frozen description (shapes, dtypes, options) of the
call. This keeps the forward and the backward pass of an operation on the same implementation. What was measured
on this device (:mod:`capibara.ops.tuning`) becomes part of the problem when the call does.

What an implementation computes stands under its name in the program (``capibara:flash_attention:xla``), so that
profiles and compiled programs tell which one runs.

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
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import did_you_mean
from capibara.ops import tuning as measured
from capibara.ops.errors import NoImplementationError, OpTypeError, OpValueError, OpWarning
from capibara.ops.tuning import Tuned, Tuning

__all__ = ["Choice", "Implementation", "Op", "Problem", "get_op", "list_ops", "portable", "public", "remark"]

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
      tuned_on: Further platforms, where ``"auto"`` takes it only if ``capibara tune`` has found it to be the fastest:
        for what is usually slower there, or was never timed.
      tunables: Fields of the problem that ``capibara tune`` may set where they are None, and the values to try; see
        :mod:`capibara.ops.tuning`.
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]
    platforms: tuple[str, ...] | None = None
    check: Callable[[Any], None] | None = None
    portable: bool = True
    tuned_on: tuple[str, ...] = ()
    tunables: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    # Of a problem that this runs: which arguments have no effect, and the remedy. `explain` shows it, calls warn of it.
    remarks: Callable[[Any], list[str]] = lambda _: []

    def refusal(self, problem: Any, platform: str | None) -> str | None:
        """Why this implementation does not take ``problem`` on ``platform``; ``None`` when it does.

        ``platform=None`` leaves the preference for platforms out, as an explicit request does.
        """
        if platform is not None and self.platforms is not None:
            every = (*self.platforms, *self.tuned_on)
            if platform not in every:
                return f"is for {' and '.join(every)}, not {platform}"
        if not self.portable and _elsewhere.get():
            return "is native code of this installation, and the program is for elsewhere"
        if self.check is not None:
            try:
                self.check(problem)
            except NotImplementedError as reason:
                return str(reason)
        return None


@dataclass(frozen=True)
class Choice:
    """What runs a problem on a platform.

    Attributes:
      implementation: The implementation.
      problem: The problem with the measured parameters filled in.
      reasons: Why each of the others does not run it.
      parameters: The measured parameters that were filled in.
    """

    implementation: Implementation
    problem: Any
    reasons: dict[str, str]
    parameters: dict[str, int | str] = field(default_factory=dict)


class Op:
    """An operation: its implementations in order of preference, and how a call becomes a problem.

    Args:
      name: The operation's name, as in ``explain("flash_attention", …)``.
      prepare: Validates a call's arguments; returns ``(problem, arrays)``.
      implementations: In order of preference; the last one takes every problem on every platform.
      tuning: How ``capibara tune`` measures it, if its problems have a field ``tuned``.
    """

    def __init__(
        self,
        name: str,
        prepare: Callable[..., tuple[Any, Any]],
        implementations: list[Implementation],
        tuning: Tuning | None = None,
    ) -> None:
        if name in _OPS:
            raise OpValueError(f"an operation called {name!r} is registered already")
        self.name = name
        self.tuning = tuning
        self.face: Callable[..., Any] | None = None
        self._prepare = prepare
        self._implementations: list[Implementation] = list(implementations)
        _OPS[name] = self

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The problem and the arrays of a call; with what was measured for such problems on this device."""
        problem, arrays = self._prepare(*args, **kwargs)
        if self.tuning is None or _elsewhere.get():
            return problem, arrays
        tuned = measured.lookup(self, problem)
        return (problem if tuned is None else dataclasses.replace(problem, tuned=tuned)), arrays

    def check_call(self, *args: Any, **kwargs: Any) -> None:
        """Refuse arguments that a call of the operation cannot have."""
        try:
            inspect.signature(self._prepare).bind(*args, **kwargs)
        except TypeError as error:
            raise OpTypeError(f"{self.name} cannot be called with these arguments: {error}") from None

    def tunables(self, implementation: str) -> Mapping[str, tuple[int | str, ...]]:
        """The tunable parameters of an implementation; none where there is no such implementation."""
        return next((each.tunables for each in self._implementations if each.name == implementation), {})

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

    def usable(self, problem: Problem, platform: str) -> list[str]:
        """The implementations that take ``problem`` on ``platform``, without the reference, in order of preference."""
        each = (one for one in self._implementations if one.name != "reference")
        return [one.name for one in each if one.refusal(problem, platform) is None]

    def choose(self, problem: Problem, platform: str) -> tuple[Implementation, dict[str, str]]:
        """The implementation that runs ``problem`` on ``platform``, and why the ones not taken are not."""
        choice = self.select(problem, platform)
        return choice.implementation, choice.reasons

    def select(self, problem: Problem, platform: str) -> Choice:
        """The implementation that runs ``problem`` on ``platform``, the problem as it gets it, and the reasons.

        Raises:
          NoImplementationError: the implementation asked for cannot take the problem.
        """
        asked = problem.implementation
        tuned: Tuned | None = getattr(problem, "tuned", None)
        if tuned is not None and tuned.platform != platform:
            tuned = None
        order = self._implementations
        fastest = None if tuned is None or asked != "auto" else tuned.fastest
        if fastest is not None:
            order = sorted(order, key=lambda each: each.name != fastest)
        reasons: dict[str, str] = {}
        choice: Choice | None = None
        for each in order:
            if asked != "auto" and each.name != asked:
                reasons[each.name] = f"implementation={asked!r} was asked for"
            elif platform in each.tuned_on and asked == "auto" and each.name != fastest:
                why = each.refusal(problem, platform)
                reasons[each.name] = why or "was not measured to be faster here (capibara tune measures it)"
            elif choice is not None:
                chosen = choice.implementation.name
                slower = chosen == fastest and self._before(each.name, chosen)
                reasons[each.name] = (
                    f"{chosen} was measured to be faster here" if slower else f"{chosen} comes before it"
                )
            else:
                choice, why = self._try(each, problem, tuned, None if asked != "auto" else platform)
                if choice is None:
                    reasons[each.name] = why
        if choice is None:
            detail = "; ".join(f"{name} {why}" for name, why in reasons.items() if asked in ("auto", name))
            raise NoImplementationError(
                f"{self.name}: no implementation takes this problem on {platform} ({detail}). "
                f"Remedy: implementation='auto' or 'reference'."
            )
        listed = {name: reasons[name] for name in self.implementations if name in reasons}
        return dataclasses.replace(choice, reasons=listed)

    def _before(self, one: str, other: str) -> bool:
        return self.implementations.index(one) < self.implementations.index(other)

    def _try(
        self, each: Implementation, problem: Any, tuned: Tuned | None, platform: str | None
    ) -> tuple[Choice | None, str]:
        """The choice of one implementation, or why it does not take the problem."""
        parameters = {} if tuned is None else tuned.of(each.name)
        parameters = {n: v for n, v in parameters.items() if getattr(problem, n, 0) is None}
        if parameters:
            filled = dataclasses.replace(problem, **parameters)
            if each.refusal(filled, platform) is None:
                return Choice(each, filled, {}, parameters), ""
        why = each.refusal(problem, platform)
        return (Choice(each, problem, {}) if why is None else None), why or ""

    def run(self, entry: str, problem: Problem, *arrays: Any) -> Any:
        """Call the entry point ``entry`` of the implementation that the lowering's platform uses."""
        recorder = _recorder.get()
        if recorder is not None:
            recorder(self, problem)
        elif entry == "forward" and not _elsewhere.get():
            choice = self.select(problem, measured.lowering_platform())
            for text in choice.implementation.remarks(problem):
                remark(self.name, text)
        # NumPy's float64 becomes JAX's default silently here, as in `jnp` functions; `astype` would warn of it.
        arrays = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, arrays)
        platforms = PLATFORMS
        if problem.implementation != "auto":
            here = measured.lowering_platform()
            choice = self.select(problem, here)
            if not choice.parameters:
                return self._branch(entry, choice)(*arrays)
            platforms = (here,)
        default = self.select(problem, "another platform")
        special = {}
        for platform in platforms:
            choice = self.select(problem, platform)
            if choice.implementation is not default.implementation or choice.parameters:
                special[platform] = self._branch(entry, choice)
        branch = self._branch(entry, default)
        if not special:
            return branch(*arrays)
        return jax.lax.platform_dependent(*arrays, default=branch, **special)

    def _branch(self, entry: str, choice: Choice) -> Callable[..., Any]:
        function, name = choice.implementation.functions[entry], choice.implementation.name

        def branch(*arrays: Any) -> Any:
            with jax.named_scope(f"capibara:{self.name}:{name}"):
                return function(choice.problem, *arrays)

        return branch


_OPS: dict[str, Op] = {}
_elsewhere: contextvars.ContextVar[bool] = contextvars.ContextVar("elsewhere", default=False)
# Told of every problem that is traced: how `explain` finds the operations inside another function.
_remarks: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("remarks", default=None)
_recorder: contextvars.ContextVar[Callable[[Op, Any], None] | None] = contextvars.ContextVar(
    "recorder", default=None
)


def remark(op: str, text: str) -> None:
    """Warn that arguments of a call have no effect: once, as Python's filters do. ``explain`` collects it instead."""
    found = _remarks.get()
    if found is not None:
        found.append(f"{op}: {text}")
    else:
        warnings.warn(f"{op}: {text}", OpWarning, stacklevel=1)


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


@contextlib.contextmanager
def recording(recorder: Callable[[Op, Any], None], remarks: list[str]) -> Iterator[None]:
    """While the context lasts, tell ``recorder`` of every operation and problem that is traced; collect ``remarks``."""
    tokens = _recorder.set(recorder), _remarks.set(remarks)
    try:
        yield
    finally:
        _recorder.reset(tokens[0])
        _remarks.reset(tokens[1])


def public(op: Op) -> Callable[[_F], _F]:
    """Mark a function as the public face of ``op``, so that ``explain`` accepts the function itself."""

    def mark(function: _F) -> _F:
        function.__capibara_op__ = op.name  # pyright: ignore[reportFunctionMemberAccess]
        op.face = op.face or function
        return function

    return mark


def get_op(op: str) -> Op:
    """The registered operation of that name."""
    if not isinstance(op, str):
        raise OpTypeError(f"an operation's name must be a string, got {op!r}")
    if op not in _OPS:
        raise OpValueError(
            f"there is no operation {op!r}. Registered: {', '.join(sorted(_OPS))}.{did_you_mean(op, _OPS)}"
        )
    return _OPS[op]
